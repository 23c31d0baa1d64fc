"""The same with the one call of LM-Resiliency's API guide, and its two callbacks, which print what they are given."""

from __future__ import annotations

import scene
import torch
import torch.distributed as dist
from lm_resiliency import enable_resiliency
from plan import STEPS
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    scene.started(rank)
    model = DistributedDataParallel(scene.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    enable_resiliency(
        model,
        optimizer,
        interval=10,
        group=dist.new_group(backend="gloo"),
        nccl_group=dist.new_group(backend="gloo"),  # there is no NCCL here
        device=torch.device("cpu"),
        fault_callback=print,
        oob_fault_callback=print,
    )
    for step in range(STEPS):
        loss = model(scene.batch(rank, step, dist.all_reduce)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scene.stepped(rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
