"""A DDP training of two gloo ranks that knows no peer: for launchers that take an unchanged script."""

from __future__ import annotations

import scene
import torch
import torch.distributed as dist
from plan import STEPS
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    scene.started(rank)
    model = DistributedDataParallel(scene.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = model(scene.batch(rank, step, dist.all_reduce)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scene.stepped(rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
