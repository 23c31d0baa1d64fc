"""What a framework does between two steps takes long, or does not end; the arguments say which framework, and what.

`left-over`: the last micro-batch of each epoch makes no step, and what comes behind it takes `SECONDS`.
`last-save`: the save at the agreed stop never ends, in the first attempt.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import contract_script as contract
import torch
from torch import nn

FRAMEWORK, WHAT = sys.argv[1:]
EPOCHS, FOREVER = 2, 1_000_000
STEPS = FOREVER if contract.attempt == 0 else 10  # of `last-save`
DATA = [{"inputs": torch.ones(2) * number} for number in range(12)]
torch.set_num_threads(1)


def take_long(*_: Any, **__: Any) -> None:
    """Do something between two steps."""
    time.sleep(float(os.environ["SECONDS"]))


def hang(*_: Any, **__: Any) -> None:
    """Never end, in the first attempt."""
    if contract.attempt == 0:
        threading.Event().wait()


def lightning() -> int:
    """Fit, with an optimizer that the module steps by itself; return how many steps were made."""
    import lightning.pytorch as pl

    from resilience_sdk.adapters.lightning import ResilienceCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = nn.Linear(2, 1)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.manual_backward(self.net(batch["inputs"]).square().mean())
            if batch_idx % 2 == 1:
                self.optimizers().step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    class Slow(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            if WHAT == "left-over":
                take_long()

        def on_save_checkpoint(self, *_: Any) -> None:
            if WHAT == "last-save":
                hang()

    until: dict[str, int] = {"max_epochs": EPOCHS} if WHAT == "left-over" else {"max_epochs": -1, "max_steps": STEPS}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fit = pl.Trainer(
        accelerator="cpu",
        devices=1,
        enable_model_summary=False,
        callbacks=[ResilienceCallback(checkpoint_every=FOREVER), Slow()],
        **until,
        **quiet,
    )
    fit.fit(Module(), torch.utils.data.DataLoader(DATA, batch_size=4))
    return fit.global_step


def transformers() -> int:
    """Train, on a stream where micro-batches are to be left over; return how many steps were made."""
    import transformers

    from resilience_sdk.adapters.transformers import ResilienceCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layer(inputs).square().mean()}

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(DATA)

    class Slow(transformers.TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            if WHAT == "left-over":
                take_long()

    class Trainer(transformers.Trainer):
        def _save_rng_state(self, output_dir: str) -> None:
            hang()
            super()._save_rng_state(output_dir)

    args = transformers.TrainingArguments(
        output_dir=os.environ["RESILIENCE_RUN_DIR"] + "/trainer",
        max_steps=EPOCHS if WHAT == "left-over" else STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_strategy="no",
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    # The trainer takes an epoch of a stream for one of all steps that are left.
    data = Stream() if WHAT == "left-over" else DATA
    trainer = Trainer(Model(), args, train_dataset=data, callbacks=[ResilienceCallback(), Slow()])
    trainer.train()
    return int(trainer.state.global_step)


def accelerate() -> int:
    """Train a loop of one's own, to the last save; return how many steps were made."""
    from accelerate import Accelerator

    from resilience_sdk.adapters.accelerate import attach

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_save_state_pre_hook(hang)
    with attach(accelerator, checkpoint_every=FOREVER) as handle:
        while handle.step < STEPS:
            for batch in loader:
                accelerator.backward(model(batch["inputs"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return handle.step


contract.tell("steps", steps=globals()[FRAMEWORK]())
