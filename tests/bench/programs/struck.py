"""One rank that is killed again and again, and resumes each time: `struck.py WAY DATA KILLS`.

Each attempt does four to nine steps, with a checkpoint after each third one, and kills itself; the one behind the last
kill ends. DATA: `same` in each pass, or `random` on purpose. Nothing seeds a generator but the start.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
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


def by_start_run(training: Training) -> Iterator[None]:
    """Train by `run.steps`."""
    import resilience_sdk

    loader = DataLoader(Rows(), BATCH, shuffle=True)
    with resilience_sdk.start_run(state={**training.state, "data": loader}, checkpoint_every=EVERY) as run:
        for _, batch in run.steps(loader, epochs=EPOCHS):
            resilience_sdk.numerics.check(loss=torch.tensor(training.step(batch)))
            yield


def by_attach(training: Training) -> Iterator[None]:
    """Train a loop of one's own, with a loader that knows its place."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from resilience_sdk.adapters.pytorch import attach
    from resilience_sdk.checkpoint import Checkpointer

    loader = StatefulDataLoader(Rows(), BATCH, shuffle=True)
    checkpointer = Checkpointer({**training.state, "data": loader}, every=EVERY)
    with attach(training.model, training.optimizer, loader, first_step=checkpointer.resume()) as handle:
        for _ in range(EPOCHS):
            for batch in loader:
                training.step(batch)
                checkpointer.maybe_save(handle.step)
                yield


def leave(name: str) -> None:
    """Leave the moment of this attempt under that name."""
    (Path(os.environ["TOLD"]) / f"{name}-{ATTEMPT}").write_text(str(time.monotonic()))


def main() -> None:
    """Train by one way in until it is time to be killed, or to end."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    ways = {"start_run": by_start_run, "attach": by_attach}
    for done, _ in enumerate(ways[WAY](Training()), start=1):
        if done == 1:
            leave("first")
        if done == STEPS_HERE:
            leave("killed")
            if ATTEMPT < KILLS:
                os.kill(os.getpid(), signal.SIGKILL)
            break


main()
