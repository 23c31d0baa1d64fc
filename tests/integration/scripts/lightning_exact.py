"""Loops as the documentation of Lightning writes them; each tells all that a resume has to repeat.

`lightning_exact.py undisturbed LOOP...` fits each in turn without the SDK; `lightning_exact.py LOOP` fits one with it.
`KILL_AT` and `STOP_AT` name a step at which this process is killed, or asked to leave.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

pl = importlib.import_module(os.environ.get("LIGHTNING", "lightning.pytorch"))
Logger = importlib.import_module(f"{pl.__name__}.loggers").Logger
logging.getLogger(pl.__name__).setLevel(logging.ERROR)
warnings.simplefilter("ignore")
torch.set_num_threads(1)
told = Path(os.environ.get("TOLD", "."))
SAMPLES = 24


class Noisy(Dataset):
    """Samples with an augmentation of each kind of generator, those of the data set's own among them."""

    def __init__(self) -> None:
        self._numpy, self._python = numpy.random.default_rng(4), random.Random(2)
        self._torch, self._legacy = torch.Generator().manual_seed(3), numpy.random.RandomState(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        own = self._numpy.random() + self._python.random() + self._legacy.random_sample()
        return noisy(index) + torch.tensor([0, own, torch.rand((), generator=self._torch).item(), 0])


def noisy(index: int) -> torch.Tensor:
    """Return a sample."""
    return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()])


class Unsized(IterableDataset):
    """Samples without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(noisy, range(SAMPLES))


class Stream(IterableDataset):
    """Samples without a length; it knows its place, and how often it was read."""

    def __init__(self) -> None:
        self._index = self._reads = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._index < SAMPLES:
            self._index += 1
            yield noisy(self._index - 1 + 100 * self._reads)
        self._index = 0
        self._reads += 1

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"index": self._index, "reads": self._reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self._index, self._reads = state["index"], state["reads"]


class Module(pl.LightningModule):
    """Two layers, dropout, an average in `on_train_batch_end`, metrics of every kind."""

    def __init__(self, tell: Any, monitor: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.register_buffer("average", torch.zeros(()))
        self.mean, self.all = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
        self._tell, self._monitor = tell, monitor

    def on_train_epoch_start(self) -> None:
        """Draw."""
        self._tell("epoch", self.current_epoch, draw=torch.rand(()).item())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        first = batch["a"] + batch["b"] if isinstance(batch, dict) else batch
        loss = self.net(first).pow(2).mean() / 1000
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self._tell("step", self.global_step, batch=first.tolist(), loss=loss.item(), rate=rate, batch_idx=batch_idx)
        self.log("train", loss, on_step=True, on_epoch=True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.all.update(first[:, 0])
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Average the weights, draw, log."""
        self.average.mul_(0.9).add_(self.net[0].weight.sum().detach() * 0.1 + torch.rand(()))
        self.log("average", self.average)
        self._tell("batch end", self.global_step, average=self.average.item())

    def on_train_epoch_end(self) -> None:
        """Look at the whole epoch."""
        self._tell("epoch end", self.current_epoch, seen=sorted(torch.as_tensor(self.all.compute()).tolist()))
        self.all.reset()
        self._be_slow("EPOCH_END_S")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """Log a number that is drawn, too."""
        value = self.net(batch).mean() + torch.rand(())
        self._tell("validation", self.global_step, batch_idx, value=value.item())
        self.log("val", value)
        self._be_slow("VALIDATION_S")

    def _be_slow(self, name: str) -> None:
        """Take so many seconds, once, before the job is asked to leave."""
        if self.global_step == int(os.environ.get("STOP_AT", "-1")):
            time.sleep(float(os.environ.get(name, "0")))

    def on_train_end(self) -> None:
        """Tell of the end."""
        self._tell("train end", self.global_step, epoch=self.current_epoch)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return an optimizer with state, and a schedule by a metric."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": self._monitor}}


class Record(Logger):
    """Tells what is logged."""

    name, version = "record", "0"

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self._tell = tell

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Tell it."""
        self._tell("log", step, *sorted(metrics), values={name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *_: Any) -> None:
        """There are none."""


class Later(pl.Callback):
    """Stands behind ours, and has a part in the state."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Draw into the average."""
        module.average.add_(torch.rand(()))


class Fault(pl.Callback):
    """Kills this process, or asks it to leave, while a step is under way; the steps behind that take their time."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Do so."""
        kill, stop = (int(os.environ.get(name, "-1")) for name in ("KILL_AT", "STOP_AT"))
        if trainer.global_step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 <= stop <= trainer.global_step:
            time.sleep(0.3)


class Batches:
    """A loader of one's own: what each epoch iterates anew."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for first in torch.randperm(12).tolist():
            yield torch.stack([noisy(first), noisy(first + 12)])

    def __len__(self) -> int:
        return 12


def plain(**options: Any) -> DataLoader:
    """Return torch's own loader."""
    return DataLoader(Noisy(), batch_size=2, shuffle=True, **options)


def distributed() -> StatefulDataLoader:
    """Return the loader that the documentation recommends."""
    return StatefulDataLoader(Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), 1, 0))


class Reloaded(pl.LightningDataModule):
    """Other samples in every second epoch, for the training and for the validation."""

    def train_dataloader(self) -> DataLoader:
        """Return those of this epoch."""
        return self._shifted(shuffle=True, batch_size=4)

    def val_dataloader(self) -> DataLoader:
        """Return those of this epoch."""
        return self._shifted(batch_size=8)

    def _shifted(self, **options: Any) -> DataLoader:
        stage = self.trainer.current_epoch // 2
        return DataLoader([torch.full((4,), index + 100.0 * stage) for index in range(SAMPLES)], **options)


EPOCHS = {"max_epochs": 3}
LOOPS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "distributed": (distributed, "train_epoch", EPOCHS),
    "plain": (plain, "val", EPOCHS),
    "stream": (lambda: StatefulDataLoader(Stream(), batch_size=2), "val", EPOCHS),
    "unsized": (lambda: DataLoader(Unsized(), batch_size=2), "train_epoch", EPOCHS),
    "steps": (plain, "train_epoch", {"max_steps": 30}),
    "shuffled": (lambda: StatefulDataLoader(Noisy(), batch_size=2, shuffle=True), "val", EPOCHS),
    "generator": (lambda: plain(generator=torch.Generator().manual_seed(5)), "val", EPOCHS),
    "workers": (lambda: plain(num_workers=2), "train_epoch", EPOCHS),
    "own": (Batches, "train_epoch", EPOCHS),
    "two": (
        lambda: {"a": plain(), "b": DataLoader(Noisy(), batch_size=2, sampler=range(10))},
        "train_epoch",
        EPOCHS,
    ),
    "accumulated": (plain, "train_epoch", {**EPOCHS, "accumulate_grad_batches": 5}),
    "often": (plain, "val", {**EPOCHS, "val_check_interval": 1, "limit_val_batches": 1}),
    "reloaded": (Reloaded, "val", {"max_epochs": 6, "reload_dataloaders_every_n_epochs": 2}),
    "short": (plain, "val", {"max_epochs": 30, "limit_train_batches": 1, "limit_val_batches": 1}),
}


def fit(name: str, *callbacks: Any, best: Path) -> None:
    """Fit a loop, and tell of it."""
    lines = open(told / name, "a", encoding="utf-8")  # noqa: SIM115 - open to the end, which may be a kill

    def tell(kind: str, *key: Any, **facts: Any) -> None:
        lines.write(json.dumps([[kind, *key], facts]) + "\n")
        lines.flush()

    make, monitor, options = LOOPS[name]
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1)
    keep_best = pl.callbacks.ModelCheckpoint(best, monitor="val", save_top_k=2, filename="{step}")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=Record(tell),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, Later(), Fault(), keep_best],
        **options,
    )
    module = Module(tell, monitor)
    data = make()
    if isinstance(data, Reloaded):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, data, DataLoader(Noisy(), batch_size=8))
    draws = [torch.rand(()).item(), random.random(), numpy.random.rand()]
    weights = [value.sum().item() for value in module.state_dict().values()]
    files = sorted(os.listdir(best))
    tell("fitted", weights=weights, draws=draws, epoch=trainer.current_epoch, best=files)


if __name__ == "__main__":
    if sys.argv[1] == "undisturbed":
        for loop in sys.argv[2:]:
            fit(loop, best=told / f"best-{loop}")
    else:
        from resilience_sdk.adapters.lightning import ResilienceCallback

        fit(sys.argv[1], ResilienceCallback(checkpoint_every=int(os.environ["EVERY"])), best=told / "best")
