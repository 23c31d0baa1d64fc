"""Windows for the tests of the judge, with the jitter of a quiet machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from resilience_sdk.straggler.detector import Judge
from resilience_sdk.straggler.verdicts import Change, Rules
from resilience_sdk.straggler.windowing import WINDOW_STEPS, RankPlace, SectionWindow, Window

Slower = Callable[[int, int], float]
"""(rank, step) -> factor."""


class Fleet:
    """Ranks whose sections take 10 ms with 1 % of jitter, times what a test says, and the judge of them."""

    def __init__(self, places: int | Mapping[int, RankPlace], rules: Rules | None = None, seed: int = 0) -> None:
        if isinstance(places, int):
            places = {rank: RankPlace(f"n{rank // 2}") for rank in range(places)}
        self.places = dict(places)
        self.judge = Judge(self.places, rules)
        self.step = 0
        self.changes: list[Change] = []
        self._random = random.Random(seed)

    def durations(self, slower: Slower = lambda rank, step: 1.0) -> dict[int, list[float]]:
        """Return one window of all ranks."""
        return {
            rank: [
                0.010 * self._random.lognormvariate(0.0, 0.01) * slower(rank, self.step + at)
                for at in range(WINDOW_STEPS)
            ]
            for rank in self.places
        }

    def show(self, *sections: SectionWindow, **options) -> list[Change]:
        """Give the judge one window and return what has changed."""
        changes = self.judge.add(Window(self.step, sections, **options))
        self.step += WINDOW_STEPS
        self.changes += changes
        return changes

    def run(self, windows: int, slower: Slower = lambda rank, step: 1.0, kind: str = "compute") -> list[Change]:
        """Run so many windows of one section and return what has changed."""
        return [
            change for _ in range(windows) for change in self.show(SectionWindow("fwd", kind, self.durations(slower)))
        ]


def what(changes):
    """Return of each change what it is, and of its verdict the kind and the ranks."""
    return [(change.what, change.verdict.kind, change.verdict.ranks) for change in changes]


def slow(*ranks: int, by: float = 1.1, since: int = 0, until: float = float("inf")):
    """Return the factor of each rank and step, where these ranks are slow."""
    return lambda rank, step: by if rank in ranks and since <= step < until else 1.0
