"""The same as two replica groups of one rank, as torchft's `train_ddp.py` and README have it."""

from __future__ import annotations

import logging
import os
from datetime import timedelta

import scene
import torch
from plan import STEPS
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

logging.basicConfig(level=logging.INFO)


def main() -> None:
    """Train until the groups together have made all steps."""
    group = int(os.environ["REPLICA_GROUP_ID"])
    scene.started(group)
    module = scene.model()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda state: _load(state, module, optimizer),
        state_dict=lambda: {"model": module.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"train_ddp_{group}",
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.01))
    while (step := manager.current_step()) < STEPS:
        samples = scene.batch(group, step, manager.allreduce)
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
        scene.stepped(group, step)
    manager.shutdown()


def _load(state: dict, module: torch.nn.Module, optimizer: Optimizer) -> None:
    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


if __name__ == "__main__":
    main()
