"""Prints what `adapters.accelerate.attach` adds to a step with Accelerate: `adapter_accelerate.py ROUNDS STEPS`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from accelerate import Accelerator
from bare_loop import LOADER, Loop, measure
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.adapters import accelerate as resilience

ACCELERATOR = Accelerator(cpu=True)
NET = nn.Linear(16, 16)
MODEL, OPTIMIZER = ACCELERATOR.prepare(NET, torch.optim.SGD(NET.parameters(), 1e-6))
ACCELERATOR._dataloaders.append(LOADER)  # as if prepared: a real one takes longer than all that is measured here


def step() -> None:
    """Make one step."""
    batch = next(Loop.batches)
    with ACCELERATOR.accumulate(MODEL):
        ACCELERATOR.backward(MODEL(batch).sum())
        OPTIMIZER.step()
        OPTIMIZER.zero_grad()


def adapter() -> resilience.Attached:
    """Attach the adapter, which is not to save while it is measured."""
    return resilience.attach(ACCELERATOR, resume=False, checkpoint_every=10**9)


def sections(**seams: Callable[[], None]) -> object:
    """Attach what the adapter is built on."""
    return straggler.attach(MODEL, OPTIMIZER.optimizer, **seams)


if __name__ == "__main__":
    rounds, steps = map(int, sys.argv[1:])
    # A step takes longer than one of plain PyTorch, and an attach reads the settings.
    measure(step, sections, adapter, rounds // 3 + 1, steps)
