"""Plain PyTorch, a loop of one's own: one line watches it, one object saves it.

    python examples/pytorch_attach.py --steps 100
    torchrun --nproc-per-node 2 examples/pytorch_attach.py
    resilience run --nproc-per-node 2 --run-dir runs/letters examples/pytorch_attach.py
    RESILIENCE_FAULT=kill:rank=1,step=70 resilience run ... (the same): restarted from step 60

Learns the next letter of the source code of Python's own modules.
"""

import argparse
import ast
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import resilience_sdk
from resilience_sdk.adapters import pytorch
from resilience_sdk.checkpoint import Checkpointer

CONTEXT, BATCH = 16, 32


def letters() -> TensorDataset:
    """Return every stretch of `CONTEXT` letters with the one that follows it."""
    text = "".join(Path(module.__file__ or "").read_text() for module in (argparse, ast))
    codes = torch.tensor([min(ord(letter), 127) for letter in text])
    windows = codes.unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])


def main(steps: int) -> None:
    """Train for so many steps, over all starts with the same run directory."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 64), nn.ReLU(), nn.Linear(64, 128))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run_dir = os.environ.setdefault("RESILIENCE_RUN_DIR", "runs/letters")
    saver = Checkpointer({"model": model, "optimizer": optimizer}, run_dir=run_dir, every=20)
    first = saver.resume()

    data, rank, ranks = letters(), dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    own = order[first * BATCH * ranks + rank : steps * BATCH * ranks : ranks]  # what this rank has not seen yet
    loader = DataLoader(Subset(data, own.tolist()), batch_size=BATCH)

    handle = pytorch.attach(model, optimizer, loader, first_step=first)  # last, on what the loop calls
    try:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            saver.maybe_save(handle.step)
            if handle.step % 20 == 0 and rank == 0:
                print(f"step {handle.step:3}  loss {loss.item():.4f}")
    except resilience_sdk.Preempted:  # on every rank behind the same step
        saver.save(handle.step)
        raise
    saver.save(handle.step)
    handle.detach()
    if rank == 0:
        print(f"finished after step {handle.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
