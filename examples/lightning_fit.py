"""Lightning: one callback watches, saves, resumes and stops a training.

    pip install lightning
    resilience run --nproc-per-node 2 --run-dir runs/words examples/lightning_fit.py --steps 200
    torchrun --standalone --nproc-per-node 2 examples/lightning_fit.py --steps 200
    python examples/lightning_fit.py --steps 200

Learns the next letter of the documentation of Python's own modules. Send it SIGTERM and start it again (with
RESILIENCE_RUN_DIR=runs/words, where our launcher does not name one): it goes on at the next step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resilience_sdk.adapters.lightning import ResilienceCallback

WINDOW, LETTERS = 16, 128
MODULES = ("argparse", "collections", "functools", "heapq", "logging", "pickle", "random", "re", "subprocess", "typing")


def windows() -> TensorDataset:
    """Return pieces of a text that every machine with Python has, and the letter after each."""
    text = "".join(importlib.import_module(name).__doc__ or "" for name in MODULES)
    codes = torch.tensor([min(ord(letter), LETTERS - 1) for letter in text])
    pieces = codes.unfold(0, WINDOW + 1, 1)
    return TensorDataset(pieces[:, :-1], pieces[:, -1])


class NextLetter(pl.LightningModule):
    """Predicts a character from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Embedding(LETTERS, 16), nn.Flatten(), nn.Linear(16 * WINDOW, 64), nn.ReLU(), nn.Linear(64, LETTERS)
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=3e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
torch.set_num_threads(1)
pl.seed_everything(0, verbose=False)
data = windows()
loader_class = DataLoader
with contextlib.suppress(ImportError):  # a loader that knows where it is resumes at the very batch
    loader_class = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
trainer = pl.Trainer(
    max_steps=steps,
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    callbacks=[ResilienceCallback(checkpoint_every=50)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
# An order that the epoch alone decides: what Lightning makes of `shuffle=True` is drawn anew in a process that resumes.
ranks, rank = (int(os.environ.get(name, alone)) for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0")))
sampler = DistributedSampler(data, ranks, rank)
trainer.fit(NextLetter(), loader_class(data, batch_size=32, sampler=sampler))
if trainer.is_global_zero:
    print(f"finished after step {trainer.global_step}, loss {trainer.callback_metrics.get('loss', 'as before')}")
