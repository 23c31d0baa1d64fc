"""Trains five steps on gloo and ends as one should: `clean_end.py heartbeat|run`. Alone or under a launcher."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilience_sdk
from resilience_sdk import heartbeat

STEPS = 5


def step(model: nn.Module, batch: torch.Tensor) -> None:
    """Make one step, whose gradients go through a collective."""
    model.zero_grad()
    model(batch).sum().backward()


def main(how: str) -> None:
    """Train, and destroy the process group."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = os.path.join(tempfile.mkdtemp(), "store")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = DistributedDataParallel(nn.Linear(8, 1))
    batches = [torch.randn(4, 8) for _ in range(STEPS)]
    if how == "run":
        with resilience_sdk.start_run(state={"model": model}) as run:
            for _, batch in run.steps(batches):
                step(model, batch)
    else:
        for number, batch in enumerate(batches):
            with heartbeat(step=number):
                step(model, batch)
    dist.destroy_process_group()


main(sys.argv[1])
