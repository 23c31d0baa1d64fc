"""Prints what `ResilienceCallback` adds to a step of the Trainer: `adapter_transformers.py ROUNDS STEPS`."""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import transformers
from paired import on_one_core, tell
from torch import nn
from turns import Turns

from resilience_sdk.adapters.transformers import ResilienceCallback
from resilience_sdk.adapters.transformers.training import TrainerPatches

DATA = [{"inputs": torch.randn(16)}] * 4096


class Model(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": self.layer(inputs).square().mean()}


def empty_callback() -> transformers.TrainerCallback:
    """Return a callback that does nothing wherever the adapter's does something."""
    ours = {name for each in ResilienceCallback.__mro__[:-1] for name in vars(each)}
    hooks = [name for name in vars(transformers.TrainerCallback) if name.startswith("on_") and name in ours]
    return type("Empty", (transformers.TrainerCallback,), dict.fromkeys(hooks, lambda self, *args, **kwargs: None))()


class Ways(transformers.TrainerCallback):
    """Puts the adapter on and takes it off; it is the last callback."""

    def __init__(self, adapter: ResilienceCallback, rounds: int, steps: int) -> None:
        self._adapter, self._empty = adapter, empty_callback()
        self.turns = Turns(rounds, steps, self._change)
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell of the step."""
        self.turns.step_ends(state.global_step)

    def _change(self, way: str) -> None:
        training = self._adapter._training
        assert training is not None
        if way == "bare" and training._patches is not None:
            training._patches.detach()
            training._patches = None
        elif way != "bare" and training._patches is None:
            training._patches = TrainerPatches(self.trainer, training._losses)
        ways = {"whole": self._adapter, "empty": self._empty}
        others = [one for one in self.trainer.callback_handler.callbacks if one not in ways.values()]
        self.trainer.callback_handler.callbacks = [ways[way], *others] if way in ways else others


def main(rounds: int, steps: int) -> None:
    """Train once."""
    transformers.logging.set_verbosity_error()
    on_one_core()
    torch.set_num_threads(1)
    adapter = ResilienceCallback()
    ways = Ways(adapter, rounds, steps)
    args = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=ways.turns.steps,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(Model(), args, train_dataset=DATA, callbacks=[adapter])
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(ways)
    ways.trainer = trainer
    trainer.train()
    tell(ways.turns.found())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
