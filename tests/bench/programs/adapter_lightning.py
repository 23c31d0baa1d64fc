"""Prints what `ResilienceCallback` adds to a step of Lightning: `adapter_lightning.py ROUNDS STEPS`."""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from paired import on_one_core, tell
from torch import nn

from resilience_sdk.adapters.lightning import ResilienceCallback, roles
from resilience_sdk.adapters.lightning.base import SdkCallback

_TURNS = 5


class Sections(SdkCallback):
    """The sections alone, which the callback is built on."""

    duties = frozenset({roles.SECTIONS})


class Module(pl.LightningModule):
    """A layer, and the CPU time at which each step began."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)
        self.at_ns: list[int] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        self.at_ns.append(time.thread_time_ns())
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Loader:
    """Gives the same batch, in next to no time."""

    def __init__(self, batches: int) -> None:
        self._batches = [torch.randn(8, 16)] * batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._batches)


def step_ns(steps: int, *callbacks: Any) -> float:
    """Fit once; return the nanoseconds of the middle one of the steps."""
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(callbacks=list(callbacks), max_epochs=1, accelerator="cpu", **off)
    module = Module()
    trainer.fit(module, Loader(steps))
    return statistics.median(later - earlier for earlier, later in pairwise(module.at_ns))


def main(rounds: int, steps: int) -> None:
    """Measure the three in turns, and compare neighbours."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    on_one_core()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"step": [], "sections": [], "added": []}
    for _ in range(rounds * _TURNS):
        alone = step_ns(steps)
        sections = step_ns(steps, Sections())
        whole = step_ns(steps, ResilienceCallback(save=False))
        found["step"].append(alone)
        found["sections"].append(sections - alone)
        found["added"].append(whole - sections)
    tell(found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
