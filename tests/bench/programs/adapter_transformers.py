"""Prints what `ResilienceCallback` adds to a step of the Trainer: `adapter_transformers.py ROUNDS STEPS`."""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from paired import on_one_core, settle, tell
from torch import nn

from resilience_sdk.adapters.transformers import ResilienceCallback
from resilience_sdk.adapters.transformers.seams import Seams

WAYS = ("bare", "sections", "whole")
DATA = [{"inputs": torch.randn(16)}] * 4096
_TURN = 4
_SEED = 5


class Model(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.layer(inputs).square().mean()}


class Turns(transformers.TrainerCallback):
    """Lets a trainer go on in one way after the other; it is the last callback.

    The turns are short and their order is left to chance, so that what else the machine does falls on all ways alike. A
    step is the processor time from the end of one to the end of the next; the first one of a turn does not count.
    """

    def __init__(self, adapter: ResilienceCallback, turns: Sequence[str]) -> None:
        self._adapter = adapter
        self._turns = iter(turns)
        self._way, self._at_ns = "", 0
        self.trainer: Any = None
        self.took: dict[str, list[float]] = {way: [] for way in WAYS}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step, and change behind the last one of a turn."""
        now = time.thread_time_ns()
        if self._way and state.global_step % _TURN != 1:
            self.took[self._way].append(now - self._at_ns)
        if not self._way:
            settle(_nothing)
        if state.global_step % _TURN == 0:
            self._change(next(self._turns, "bare"))
        self._at_ns = time.thread_time_ns()

    def _change(self, way: str) -> None:
        training = self._adapter._training
        assert training is not None
        if way == "bare" and training._seams is not None:
            training._seams.detach()
            training._seams = None
        elif way != "bare" and training._seams is None:
            training._seams = Seams(self.trainer)
        others = [one for one in self.trainer.callback_handler.callbacks if one is not self._adapter]
        self.trainer.callback_handler.callbacks = [self._adapter, *others] if way == "whole" else others
        self._way = way


def main(rounds: int, steps: int) -> None:
    """Train once; of each round and way the median of `steps` steps, less that of the way below it."""
    transformers.logging.set_verbosity_error()
    on_one_core()
    torch.set_num_threads(1)
    chance = random.Random(_SEED)
    turns = [way for _ in range(rounds * steps // (_TURN - 1)) for way in chance.sample(WAYS, len(WAYS))]
    adapter = ResilienceCallback()
    watching = Turns(adapter, turns)
    args = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=(len(turns) + 1) * _TURN,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(Model(), args, train_dataset=DATA, callbacks=[adapter])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(watching)
    watching.trainer = trainer
    trainer.train()
    bare, sections, whole = (medians(watching.took[way], steps) for way in WAYS)
    tell(
        {
            "step": bare,
            "sections": [some - alone for some, alone in zip(sections, bare, strict=True)],
            "added": [more - some for more, some in zip(whole, sections, strict=True)],
        }
    )


def _nothing() -> None:
    """Make no step while the monitor begins."""


def medians(took: Sequence[float], steps: int) -> list[float]:
    """Return the median of each round of so many steps."""
    return [statistics.median(took[at : at + steps]) for at in range(0, len(took) - steps + 1, steps)]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
