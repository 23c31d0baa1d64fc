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

_TURN = 10
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


class Turns(transformers.TrainerCallback):
    """Lets a trainer go on without the adapter, with its sections alone, and with all of it, in short turns."""

    def __init__(self, adapter: ResilienceCallback) -> None:
        self._adapter = adapter
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Change behind the last step of a turn; it is the last callback."""
        training = self._adapter._training
        if training is None or state.global_step % _TURN:
            return
        turn = state.global_step // _TURN % 3
        callbacks = [one for one in self.trainer.callback_handler.callbacks if one is not self._adapter]
        if turn == 0 and training._seams is not None:
            training._seams.detach()
        elif turn == 1:
            training._seams = Seams(self.trainer)
        elif turn == 2:
            callbacks.insert(0, self._adapter)
        self.trainer.callback_handler.callbacks = callbacks


def main(rounds: int, steps: int) -> None:
    """Train once, and compare neighbours."""
    transformers.logging.set_verbosity_error()
    on_one_core()
    torch.set_num_threads(1)
    model, adapter = Model(), ResilienceCallback()
    turns = Turns(adapter)
    args = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=(rounds * steps + 1) * 3 * _TURN // 2,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model, args, train_dataset=DATA, callbacks=[adapter])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(turns)
    turns.trainer = trainer
    trainer.train()
    took = [later - earlier for earlier, later in pairwise(model.at_ns)]
    # The first step of each turn is left out, as is the first turn, which has all.
    medians = [statistics.median(took[at + 1 : at + _TURN - 1]) for at in range(3 * _TURN, len(took) - _TURN, _TURN)]
    rows = [medians[at : at + 3] for at in range(0, len(medians) - 2, 3)]
    step, sections, added = zip(*((alone, some - alone, whole - some) for alone, some, whole in rows), strict=True)
    tell({"step": step, "sections": sections, "added": added})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
