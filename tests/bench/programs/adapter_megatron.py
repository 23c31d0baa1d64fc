"""Prints what `adapters.megatron.attach` adds to a step with Megatron's timers: `adapter_megatron.py ROUNDS STEPS`.

The step calls them in the order of the schedule without a pipeline, around a small model: what of the schedule is
not timed is the same with and without the adapter, and needs CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from megatron.core import Timers
from paired import on_one_core, paired, tell
from torch import nn

from resilience_sdk.adapters import megatron
from resilience_sdk.adapters.megatron.step import NAMES, SECTION_OF, ObservingTimers, SharedSection
from resilience_sdk.straggler.model_hooks import Guard

MODEL = nn.Linear(16, 16)
BATCH = torch.randn(8, 16)
CONFIG = SimpleNamespace(timers=Timers(0, "minmax"))


class Optimizer:
    """An optimizer around torch's, as Megatron's are."""

    inner = torch.optim.SGD(MODEL.parameters(), 1e-6)

    def step(self) -> None:
        """Make a step."""
        self.inner.step()


OPTIMIZER = Optimizer()


def step() -> None:
    """Make one step of one micro-batch."""
    timers = CONFIG.timers
    timers("forward-backward", log_level=1).start(barrier=False)
    timers("forward-compute", log_level=2).start()
    timers("batch-generator", log_level=2).start()
    timers("batch-generator").stop()
    loss = MODEL(BATCH).sum()
    timers("forward-compute").stop()
    timers("backward-compute", log_level=2).start()
    loss.backward()
    timers("backward-compute").stop()
    timers("all-grads-sync", log_level=1).start(barrier=False)
    timers("all-grads-sync").stop()
    timers("forward-backward").stop()
    OPTIMIZER.step()
    OPTIMIZER.inner.zero_grad()


class Sections:
    """The sections alone: the same timers heard, without steps, roles or care for exceptions."""

    def __init__(self) -> None:
        self._plain = CONFIG.timers
        found = {name: SharedSection(name) for name in NAMES}
        heard = {timer: (found[name].begin, found[name].end) for timer, name in SECTION_OF.items()}
        CONFIG.timers = ObservingTimers(self._plain, heard, Guard(_raise))
        optim = found["optim"]

        def step() -> None:
            optim.begin()
            Optimizer.step(OPTIMIZER)
            optim.end()

        OPTIMIZER.step = step

    def detach(self) -> None:
        """Be without them again."""
        CONFIG.timers = self._plain
        del OPTIMIZER.step


class Empty(Sections):
    """The sections, and functions that do nothing where the adapter has its part of a step."""

    def __init__(self, sections: Sections, instead: Callable[[], Sections]) -> None:
        sections.detach()
        super().__init__()
        self._instead = instead
        timed = OPTIMIZER.step

        def step() -> None:
            _nothing()
            timed()
            _nothing()

        OPTIMIZER.step = step

    def detach(self) -> None:
        """Have the sections alone again."""
        super().detach()
        self._instead()


def _nothing() -> None:
    """Take the place of a hook."""


def _raise(error: Exception) -> None:
    raise error


class Adapter:
    """The adapter in the place of the sections."""

    def __init__(self, sections: Sections, instead: Callable[[], Sections]) -> None:
        sections.detach()
        self._instead = instead
        self._handle = megatron.attach(CONFIG, OPTIMIZER, first_step=0)

    def detach(self) -> None:
        """Have the sections again."""
        self._handle.detach()
        self._instead()


def main(rounds: int, steps: int) -> None:
    """Measure the sections beside the bare step, and the adapter beside the sections."""
    on_one_core()
    torch.set_num_threads(1)
    alone = paired(step, Sections, rounds, steps)
    standing = [Sections()]

    def again() -> Sections:
        standing[0] = Sections()
        return standing[0]

    beside = paired(step, lambda: Adapter(standing[0], again), rounds, steps)
    empty = paired(step, lambda: Empty(standing[0], again), rounds, steps)
    tell({"step": alone["step"], "sections": alone["added"], "added": beside["added"], "empty": empty["added"]})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
