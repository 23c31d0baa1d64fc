"""The same with the steps of TraceML's README: `traceml.init()` and `trace_step()`."""

from __future__ import annotations

import scene
import torch
import torch.distributed as dist
import traceml_ai as traceml
from plan import STEPS
from torch.nn.parallel import DistributedDataParallel

traceml.init(mode="auto")


def main() -> None:
    """Train."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    scene.started(rank)
    model = DistributedDataParallel(scene.model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        with traceml.trace_step(model):
            loss = model(scene.batch(rank, step, dist.all_reduce)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scene.stepped(rank, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
