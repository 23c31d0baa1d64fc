"""Measures what an adapter adds to a step of a framework that makes its own loop: with and without it, in one training.

The turns are short and their order is left to chance, so that what else the machine does falls on all ways alike. A
step is the processor time from the end of one to the end of the next; the first one of a turn does not count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from paired import settle

WAYS = ("bare", "sections", "whole", "empty")
"""Without us; with the sections that the adapter is built on; with the adapter; with what does nothing in its place."""
_TURN = 4
_SEED = 5


class Turns:
    """Lets a training go on in one way after the other: it is told of each step, by what comes last behind it."""

    def __init__(self, rounds: int, steps: int, change: Callable[[str], None]) -> None:
        """Measure `rounds` times `steps` steps of each way; `change(way)` is called between two steps."""
        chance = random.Random(_SEED)
        ways = [way for _ in range(rounds * steps // (_TURN - 1)) for way in chance.sample(WAYS, len(WAYS))]
        self.steps = (len(ways) + 1) * _TURN
        """How many steps it takes."""
        self._round = steps
        self._ways = iter(ways)
        self._change = change
        self._way, self._at_ns = "", 0
        self._took: dict[str, list[float]] = {way: [] for way in WAYS}

    def step_ends(self, step: int) -> None:
        """Note step number `step`, the first of which is 1, and change behind the last one of a turn."""
        now = time.thread_time_ns()
        if self._way and step % _TURN != 1:
            self._took[self._way].append(now - self._at_ns)
        if not self._way:
            settle(_nothing)
        if step % _TURN == 0:
            self._way = next(self._ways, "bare")
            self._change(self._way)
        self._at_ns = time.thread_time_ns()

    def found(self) -> dict[str, list[float]]:
        """Return, of each round, the median step without us in ns, and what the other ways take more."""
        bare, sections, whole, empty = (self._medians(self._took[way]) for way in WAYS)
        return {
            "step": bare,
            "sections": [some - alone for some, alone in zip(sections, bare, strict=True)],
            "added": [more - some for more, some in zip(whole, sections, strict=True)],
            "empty": [more - some for more, some in zip(empty, sections, strict=True)],
        }

    def _medians(self, took: Sequence[float]) -> list[float]:
        count = self._round
        return [statistics.median(took[at : at + count]) for at in range(0, len(took) - count + 1, count)]


def _nothing() -> None:
    """Make no step while the monitor begins."""
