"""Prints what `adapters.pytorch.attach` adds to a step of plain PyTorch: `adapter_pytorch.py ROUNDS STEPS`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from bare_loop import LOADER, Loop, measure
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.adapters import pytorch

MODEL = nn.Linear(16, 16)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), 1e-6)


def step() -> None:
    """Make one step."""
    MODEL(next(Loop.batches)).sum().backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()


def adapter() -> pytorch.Attached:
    """Attach the adapter as a resumed training does, with numbered steps."""
    return pytorch.attach(MODEL, OPTIMIZER, LOADER, first_step=0)


def sections(**seams: Callable[[], None]) -> object:
    """Attach what the adapter is built on."""
    return straggler.attach(MODEL, OPTIMIZER, **seams)


if __name__ == "__main__":
    rounds, steps = map(int, sys.argv[1:])
    measure(step, sections, adapter, rounds, steps)
