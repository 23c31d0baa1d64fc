"""The amounts of work that one rank has told, put beside the passes of its sections. Pure.

A rank tells them in two rows: one amount with each call, and one with each step, the sum of its calls. Whichever is as
long as what the rank has passed of a section, tells of its passes. Neither is, where a section is passed at times only,
or began later than the telling: then nothing is known of its work.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import attrs

from resilience_sdk.rank_page.layout import RING_SAMPLES, WORK
from resilience_sdk.straggler.cutting import first_pass
from resilience_sdk.straggler.window import WINDOW_STEPS
from resilience_sdk.straggler.workload import LEAST_POINTS

__all__ = ["WORK", "Amounts", "Told"]

_KEPT = 2 * RING_SAMPLES
_SLACK = 2  # the page is read in the midst of a step

Amounts = tuple["float | None", ...]
"""One amount per pass of a window; None: not known."""


@attrs.define
class _Row:
    end: int = 0
    values: list[float] = attrs.field(factory=list)

    def add(self, start: int, values: Sequence[float]) -> None:
        """Take amounts from number `start` on."""
        if start != self.end:
            self.values = []
        self.values = [*self.values, *values][-_KEPT:]
        self.end = start + len(values)

    def at(self, number: int) -> float | None:
        """Return the amount of that number, where it is known and tells anything."""
        index = number - (self.end - len(self.values))
        return self.values[index] if 0 <= index < len(self.values) and self.values[index] > 0.0 else None


class Told:
    """What one rank has told."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._rows: dict[str, _Row] = {}

    def add(self, name: str, start: int, words: Sequence[int]) -> None:
        """Take new words of a row of the page; `start` is the number of the first since the rank began."""
        count = len(words)
        self._rows.setdefault(name, _Row()).add(start, struct.unpack(f"={count}d", struct.pack(f"={count}Q", *words)))

    def of(self, index: int, passes: int) -> Amounts | None:
        """Return the amounts of window `index` of a section that was passed so often up to now; None: unknown."""
        if not self._rows:
            return None
        row = min(self._rows.values(), key=lambda row: abs(row.end - passes))
        fewest = min(known.end for known in self._rows.values())
        a_step = -(-row.end // max(1, fewest))  # so many may be told at once, before the first of them is passed
        if abs(row.end - passes) > _SLACK + a_step:
            return None
        first = first_pass(index)
        amounts = tuple(row.at(number) for number in range(first, first + WINDOW_STEPS))
        return amounts if WINDOW_STEPS - amounts.count(None) >= LEAST_POINTS else None
