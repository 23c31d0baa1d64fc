"""Prints what `ResilienceCallback` adds to a step of the Trainer: `adapter_transformers.py ROUNDS STEPS`."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch
import transformers
from paired import on_one_core, tell
from torch import nn

from resilience_sdk.adapters.transformers import ResilienceCallback
from resilience_sdk.adapters.transformers.seams import Seams

_TURNS = 3
DATA = [{"inputs": torch.randn(16)}] * 4096


class Model(nn.Module):
    """A layer, and the CPU time at which each step began."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.at_ns: list[int] = []

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        self.at_ns.append(time.thread_time_ns())
        return {"loss": self.layer(inputs).square().mean()}


class Sections(transformers.TrainerCallback):
    """The sections alone, which the callback is built on."""

    trainer: Any
    seams: Seams

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Put them on."""
        self.seams = Seams(self.trainer)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take them off."""
        self.seams.detach()


def step_ns(steps: int, *callbacks: Any) -> float:
    """Train once; return the nanoseconds of the middle one of the steps."""
    model = Model()
    args = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, args, train_dataset=DATA, callbacks=list(callbacks))
    trainer.remove_callback(transformers.PrinterCallback)
    for callback in callbacks:
        if isinstance(callback, Sections):
            callback.trainer = trainer
    trainer.train()
    return statistics.median(later - earlier for earlier, later in pairwise(model.at_ns))


def main(rounds: int, steps: int) -> None:
    """Measure the three in turns, and compare neighbours."""
    transformers.logging.set_verbosity_error()
    on_one_core()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"step": [], "sections": [], "added": []}
    for _ in range(rounds * _TURNS):
        alone = step_ns(steps)
        sections = step_ns(steps, Sections())
        whole = step_ns(steps, ResilienceCallback())
        found["step"].append(alone)
        found["sections"].append(sections - alone)
        found["added"].append(whole - sections)
    tell(found)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
