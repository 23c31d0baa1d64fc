"""Prints what `adapters.accelerate.attach` adds to a step with Accelerate: `adapter_accelerate.py ROUNDS STEPS`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from accelerate import Accelerator
from paired import on_one_core, paired, tell
from torch import nn

from resilience_sdk import straggler
from resilience_sdk.adapters import accelerate as resilience

ACCELERATOR = Accelerator(cpu=True)
NET = nn.Linear(16, 16)
MODEL, OPTIMIZER = ACCELERATOR.prepare(NET, torch.optim.SGD(NET.parameters(), 1e-6))


class Loader:
    """Gives the same batch for ever, in next to no time."""

    batch = torch.randn(8, 16)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.batch


LOADER = Loader()
ACCELERATOR._dataloaders.append(LOADER)  # as if prepared: a real one takes longer than all that is measured here


class Loop:
    """The training loop, with what was attached to it by `attach`, and on detaching by `instead`."""

    batches = iter(LOADER)

    def __init__(self, attach: Callable[[], object], instead: Callable[[], object] | None = None) -> None:
        self._handle = attach()
        self._instead = instead
        Loop.batches = iter(LOADER)

    def detach(self) -> None:
        """Be without it again."""
        self._handle.detach()
        Loop.batches = iter(LOADER)
        if self._instead is not None:
            self._instead()


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


def sections() -> object:
    """Attach what the adapter is built on."""
    return straggler.attach(MODEL, OPTIMIZER.optimizer)


def main(rounds: int, steps: int) -> None:
    """Measure the sections beside the bare loop, and the adapter beside the sections."""
    on_one_core()
    torch.set_num_threads(1)
    rounds = rounds // 3 + 1  # a step takes longer than one of plain PyTorch, and an attach reads the settings
    alone = paired(step, lambda: Loop(sections), rounds, steps)
    sections()
    beside = paired(step, lambda: Loop(adapter, sections), rounds, steps)
    tell({"step": alone["step"], "sections": alone["added"], "added": beside["added"]})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
