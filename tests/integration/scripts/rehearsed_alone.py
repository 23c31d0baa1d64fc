"""A training of one process, as tutorials have it: a save each 7 steps and where it is asked to leave, in mid-epoch.

place   the place in the epoch is saved and loaded, too; without, a resume begins the epoch anew
spawn   two processes train, which this one starts
"""

import os
import sys
from itertools import islice

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk import preemption

WAY = sys.argv[1] if len(sys.argv) > 1 else ""
FILE = "checkpoint.pt"
EPOCHS, PER_EPOCH = 3, 16


def save(model, optimizer, step: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, f"{FILE}.tmp")
    os.replace(f"{FILE}.tmp", FILE)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * PER_EPOCH, 20), torch.randint(0, 2, (16 * PER_EPOCH,)))
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    if os.path.exists(FILE):
        state = torch.load(FILE)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for epoch in range(step // PER_EPOCH, EPOCHS):
        loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(epoch))
        for inputs, labels in islice(loader, step % PER_EPOCH if WAY == "place" else 0, None):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 7 == 0:
                save(model, optimizer, step)
            if preemption.check():
                save(model, optimizer, step)
                preemption.exit()


def train_as(rank: int, size: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29873"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if WAY == "spawn":
        mp.spawn(train_as, args=(2,), nprocs=2)
    else:
        main()
