"""Prints what `ResilienceCallback` adds to a step of Lightning: `adapter_lightning.py ROUNDS STEPS`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from paired import on_one_core, tell
from torch import nn
from turns import Turns

from resilience_sdk.adapters.lightning import ResilienceCallback
from resilience_sdk.adapters.lightning.fit import FitSections


class Module(pl.LightningModule):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Loader:
    """Gives the same batch, in next to no time."""

    batch = torch.randn(8, 16)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.batch


def empty_callback() -> pl.Callback:
    """Return a callback that does nothing wherever the adapter's does something."""
    hooks = [name for name in vars(pl.Callback) if name.startswith("on_") and name in _overridden(ResilienceCallback)]
    return type("Empty", (pl.Callback,), dict.fromkeys(hooks, lambda self, *args, **kwargs: None))()


def _overridden(kind: type) -> set[str]:
    return {name for each in kind.__mro__ if each.__module__.startswith("resilience_sdk") for name in vars(each)}


class Ways(pl.Callback):
    """Puts the adapter on and takes it off; it is the last callback."""

    def __init__(self, adapter: ResilienceCallback, rounds: int, steps: int) -> None:
        self._adapter, self._empty = adapter, empty_callback()
        self._fit: Any = None
        self._trainer: Any = None
        self.turns = Turns(rounds, steps, self._change)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with the adapter, which is on."""
        self._trainer, self._fit = trainer, self._adapter._fit

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell of the step."""
        self.turns.step_ends(batch_idx + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Have the adapter end its fit."""
        self._change("whole")

    def _change(self, way: str) -> None:
        fit, trainer = self._fit, self._trainer
        if way == "bare" and fit.sections is not None:
            fit.sections.detach()
            fit.sections = None
        elif way != "bare" and fit.sections is None:
            fit.sections = FitSections(trainer)
            fit.sections.attach(trainer.lightning_module)
        first = {"whole": [self._adapter], "empty": [self._empty]}.get(way, [])
        trainer.callbacks = [*first, self]


def main(rounds: int, steps: int) -> None:
    """Fit once."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    on_one_core()
    torch.set_num_threads(1)
    adapter = ResilienceCallback(save=False)
    ways = Ways(adapter, rounds, steps)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(callbacks=[adapter, ways], max_steps=ways.turns.steps, accelerator="cpu", **off)
    trainer.fit(Module(), Loader())
    tell(ways.turns.found())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
