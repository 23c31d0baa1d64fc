"""Lightning: one callback watches, saves, resumes and stops a training.

    pip install lightning torchdata
    resilience run --nproc-per-node 2 --run-dir runs/words examples/lightning_fit.py --steps 200
    torchrun --standalone --nproc-per-node 2 examples/lightning_fit.py --steps 200
    python examples/lightning_fit.py --steps 200

Learns the next letter of the documentation of Python's own modules. Send it SIGTERM and start it again (with
RESILIENCE_RUN_DIR=runs/words, where our launcher does not name one): it goes on at the next step.
"""

import argparse
import importlib
import os

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

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


def main(steps: int) -> None:
    """Train for so many steps, over all starts with the same run directory."""
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    data = windows()
    # What Lightning makes of `shuffle=True` is drawn anew in a process that resumes; here the epoch decides the order.
    sampler = DistributedSampler(data, int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")))
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        callbacks=[ResilienceCallback(checkpoint_every=50)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(NextLetter(), StatefulDataLoader(data, batch_size=32, sampler=sampler))  # resumes at the very batch
    if trainer.is_global_zero:
        print(f"finished after step {trainer.global_step}, loss {trainer.callback_metrics.get('loss', 'as before')}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
