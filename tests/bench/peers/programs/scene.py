"""What the loops have in common: a model, a fault of rank 1, and stamps by which is known what came when.

`python LOOP.py FAULT OUT`; stamps are lines of OUT/stamps: moment (CLOCK_MONOTONIC, one for the whole machine),
process, rank, what. Nothing is printed here, so that all that is printed is the peer's word, or that of torch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from plan import CULPRIT, PAUSE_S, STRIKE_AT
from torch import nn

FAULT, OUT = sys.argv[1], Path(sys.argv[2])


class Model(nn.Module):
    """A few equal layers, as a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer gives."""
        for layer in self.layers:
            x = layer(x)
        return x


def model() -> nn.Module:
    """Return what is trained, the same on each rank."""
    torch.manual_seed(1)
    return Model()


def batch(rank: int, step: int, collective: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Return the samples of a step; on the rank that fails, at its step, the fault comes first."""
    if rank == CULPRIT and step == STRIKE_AT and (FAULT == "mismatch" or not _has_struck()):
        stamp(rank, "strike")
        _FAULTS[FAULT](collective)
    time.sleep(PAUSE_S)
    return torch.randn(8, 64)


def started(rank: int) -> None:
    """Note that a process of this rank is about to train."""
    stamp(rank, "start")


def stepped(rank: int, step: int) -> None:
    """Note that a step is complete."""
    stamp(rank, f"step {step}")


def stamp(rank: int, what: str) -> None:
    """Add a line to the stamps."""
    with (OUT / "stamps").open("a") as file:
        file.write(f"{time.monotonic()} {os.getpid()} {rank} {what}\n")


def _has_struck() -> bool:
    return " strike\n" in (OUT / "stamps").read_text()


def _sleep(_: object) -> None:
    while True:
        time.sleep(3600)


def _kill(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(_: object) -> None:
    raise ValueError("sample 4711 is broken")


def _log_the_loss(collective: Callable[[torch.Tensor], object]) -> None:
    collective(torch.zeros(1))  # which only this rank does


_FAULTS = {"asleep": _sleep, "killed": _kill, "exception": _raise, "mismatch": _log_the_loss}
