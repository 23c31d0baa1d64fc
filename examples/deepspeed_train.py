"""DeepSpeed: one line behind `initialize` watches, saves, resumes and stops a training with ZeRO.

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
    resilience run --nproc-per-node 2 --run-dir runs/deepspeed examples/deepspeed_train.py --steps 200 --stage 3
    RESILIENCE_FAULT=kill:rank=1,step=70 resilience run ... (the same): restarted from step 50

Learns the next letter of the documentation of Python's own modules. Send it SIGTERM and start it again: it goes on at
the next batch.
"""

from __future__ import annotations

import argparse
import importlib

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resilience_sdk.adapters import deepspeed as resilience

WINDOW, LETTERS, BATCH = 16, 128, 32
MODULES = ("argparse", "collections", "functools", "heapq", "logging", "pickle", "random", "re", "subprocess", "typing")


def windows() -> TensorDataset:
    """Return pieces of a text that every machine with Python has, and the letter after each."""
    text = "".join(importlib.import_module(name).__doc__ or "" for name in MODULES)
    codes = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
    pieces = codes.unfold(0, WINDOW + 1, 1)
    return TensorDataset(pieces[:, :-1], pieces[:, -1])


def main(steps: int, stage: int) -> None:
    """Train for so many steps, over all starts with the same run directory."""
    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__ = {}  # else it compiles collectives for the CPU, which takes a minute
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Embedding(LETTERS, 16), nn.Flatten(), nn.Linear(16 * WINDOW, 64), nn.ReLU(), nn.Linear(64, LETTERS)
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    data = windows()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    with resilience.attach(engine, loader=loader, checkpoint_every=50) as handle:  # resumes by itself
        while handle.step < steps:
            sampler.set_epoch(handle.epoch)
            for inputs, targets in loader:  # after a resume: what is left of the epoch
                loss = nn.functional.cross_entropy(engine(inputs.to(engine.device)), targets.to(engine.device))
                engine.backward(loss)
                before = handle.step
                engine.step()
                if handle.step > before and handle.step % 50 == 0 and dist.get_rank() == 0:
                    print(f"step {handle.step:4}  epoch {handle.epoch}  loss {loss.item():.3f}")
                if handle.step >= steps:
                    break
    if dist.get_rank() == 0:
        print(f"finished after step {handle.step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    args = parser.parse_args()
    main(args.steps, args.stage)
