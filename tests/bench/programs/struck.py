"""One rank that is killed again and again, and resumes each time: `struck.py WAY DATA KILLS`.

Each attempt does four to nine steps, with a checkpoint after each third one, and kills itself; the one behind the last
kill ends. DATA: `same` in each pass, or `random` on purpose. Nothing seeds a generator but the start.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EVERY, BATCH, BATCHES = 3, 4, 16
WAY, DATA, KILLS = sys.argv[1], sys.argv[2], int(sys.argv[3])
ATTEMPT = int(os.environ["RESILIENCE_INTERNAL_ATTEMPT"])
STEPS_HERE = random.Random(ATTEMPT).randint(EVERY + 1, 3 * EVERY)
EPOCHS = 1 + (KILLS + 1) * 3 * EVERY // BATCHES


class Rows(Dataset[torch.Tensor]):
    """Rows that are the same each time, or that nobody can repeat."""

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = random.SystemRandom().random() if DATA == "random" else torch.rand(1).item()
        return torch.full((4,), float(index % 7)) + 0.1 * noise


class Training:
    """A model whose loss depends on all that a resume has to bring back."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.999**step)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self, batch: torch.Tensor) -> float:
        """Do one step and return its loss."""
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.item())


class Progress:
    """How many steps this attempt has done, and whether it is time to be killed, or to end."""

    def __init__(self) -> None:
        self.done = 0

    def step_begins(self) -> bool:
        """Be killed if it is time; tell whether to end instead."""
        if self.done == STEPS_HERE:
            leave("killed")
            if ATTEMPT < KILLS:
                os.kill(os.getpid(), signal.SIGKILL)
            return True
        return False

    def step_ends(self) -> None:
        """Count it."""
        self.done += 1
        if self.done == 1:
            leave("first")


def by_start_run(training: Training, progress: Progress) -> None:
    """Train by `run.steps`."""
    import resilience_sdk

    loader = DataLoader(Rows(), BATCH, shuffle=True)
    with resilience_sdk.start_run(state={**training.state, "data": loader}, checkpoint_every=EVERY) as run:
        for _, batch in run.steps(loader, epochs=EPOCHS):
            if progress.step_begins():
                return
            resilience_sdk.numerics.check(loss=torch.tensor(training.step(batch)))
            progress.step_ends()


def by_attach(training: Training, progress: Progress) -> None:
    """Train a loop of one's own, with a loader that knows its place."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from resilience_sdk.adapters.pytorch import attach
    from resilience_sdk.checkpoint import Checkpointer

    loader = StatefulDataLoader(Rows(), BATCH, shuffle=True)
    checkpointer = Checkpointer({**training.state, "data": loader}, every=EVERY)
    with attach(training.model, training.optimizer, loader, first_step=checkpointer.resume()) as handle:
        for _ in range(EPOCHS):
            for batch in loader:
                if progress.step_begins():
                    return
                training.step(batch)
                checkpointer.maybe_save(handle.step)
                progress.step_ends()


def by_accelerate(training: Training, progress: Progress) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator

    from resilience_sdk.adapters import accelerate as resilience

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(Rows(), BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(
        training.model, training.optimizer, loader, training.scheduler
    )
    with resilience.attach(accelerator, checkpoint_every=EVERY) as handle:
        for _ in range(handle.epoch, EPOCHS):
            for batch in loader:
                if progress.step_begins():
                    return
                optimizer.zero_grad()
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                scheduler.step()
                progress.step_ends()


def by_lightning(training: Training, progress: Progress) -> None:
    """Train with Lightning."""
    import lightning.pytorch as pl

    from resilience_sdk.adapters.lightning import ResilienceCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model

        def on_train_batch_start(self, batch: torch.Tensor, number: int) -> int | None:
            self.trainer.should_stop = progress.step_begins()
            return -1 if self.trainer.should_stop else None  # what is left of the epoch is skipped

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.model(batch).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            progress.step_ends()

        def configure_optimizers(self) -> Any:
            return [training.optimizer], [{"scheduler": training.scheduler, "interval": "step"}]

    trainer = pl.Trainer(
        callbacks=[ResilienceCallback(checkpoint_every=EVERY)],
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Rows(), BATCH, shuffle=True))


def by_transformers(training: Training, progress: Progress) -> None:
    """Train with the Trainer of Hugging Face."""
    import transformers

    from resilience_sdk.adapters.transformers import ResilienceCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = training.model

        def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(rows).square().mean()}

    class Striking(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.step_begins()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            progress.step_ends()
            control.should_training_stop = ATTEMPT == KILLS and progress.done == STEPS_HERE

    arguments = transformers.TrainingArguments(
        output_dir=os.environ["RESILIENCE_RUN_DIR"] + "/trainer",
        max_steps=EPOCHS * BATCHES,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=3,
        remove_unused_columns=False,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(
        Model(),
        arguments,
        data_collator=lambda rows: {"rows": torch.stack(rows)},
        train_dataset=Rows(),
        callbacks=[Striking(), ResilienceCallback()],
        optimizers=(training.optimizer, training.scheduler),
    )
    trainer.train()


def leave(name: str) -> None:
    """Leave the moment of this attempt under that name."""
    (Path(os.environ["TOLD"]) / f"{name}-{ATTEMPT}").write_text(str(time.monotonic()))


def main() -> None:
    """Train by one way in until it is time to be killed, or to end."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    ways = {
        "start_run": by_start_run,
        "attach": by_attach,
        "accelerate": by_accelerate,
        "lightning": by_lightning,
        "transformers": by_transformers,
    }
    ways[WAY](Training(), Progress())


main()
