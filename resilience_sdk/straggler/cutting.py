"""From the passes of one rank, as they come, to windows of eight passes that are the same on all ranks. Pure.

Passes are numbered since the rank began. The first one is left out: what starts up in it differs from rank to rank.
Window k holds the passes 1 + 8k to 8 + 8k.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from resilience_sdk.straggler.window import WINDOW_STEPS

WARM_UP = 1
_LEAST = WINDOW_STEPS // 2
_DIGITS = 4

Section = tuple[str, str]
"""Name and kind."""
Row = tuple["float | None", ...]
"""One duration (s) per pass of a window; None: not known."""


@attrs.define
class _Open:
    index: int = 0
    values: list[float | None] = attrs.field(factory=lambda: [None] * WINDOW_STEPS)


class RankCutter:
    """Cuts the passes of one rank."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._open: dict[Section, _Open] = {}
        self._lanes: dict[Section, int] = {}
        self.passes: dict[Section, int] = {}
        """How many passes each section has completed."""

    def add(self, section: Section, lane: int, start: int, durations_s: Sequence[float]) -> list[tuple[int, Row]]:
        """Take passes from number `start` on; return the windows that they fill, with their numbers.

        Where passes are missing (the ring of the page was overwritten) so are their values; a window that lacks more
        than half is left out. Of a section that runs in several threads, the first one counts.
        """
        if self._lanes.setdefault(section, lane) != lane:
            return []
        self.passes[section] = start + len(durations_s)
        current = self._open.setdefault(section, _Open())
        filled: list[tuple[int, Row]] = []
        for number, duration_s in enumerate(durations_s, start - WARM_UP):
            if number < 0:
                continue
            index, column = divmod(number, WINDOW_STEPS)
            if index != current.index:
                filled += _closed(current)
                current = self._open[section] = _Open(index)
            current.values[column] = float(f"{duration_s:.{_DIGITS}g}")
            if column == WINDOW_STEPS - 1:
                filled += _closed(current)
                current = self._open[section] = _Open(index + 1)
        return filled


def first_pass(index: int) -> int:
    """Return the number of the first pass of a window."""
    return WARM_UP + WINDOW_STEPS * index


def passes_per_step(passes: int, steps: int) -> float:
    """Return how often a section is passed in a step: a whole number, or one over a whole number, if it may be.

    Both counts are of one moment somewhere within a step, so they may be wrong by one.
    """
    if passes <= 0 or steps <= 0:
        return 1.0
    often, seldom = round(passes / steps), round(steps / passes)
    if often and abs(passes - often * steps) <= often + 1:
        return float(often)
    if seldom and abs(steps - seldom * passes) <= seldom + 1:
        return 1.0 / seldom
    return passes / steps


def _closed(window: _Open) -> list[tuple[int, Row]]:
    known = sum(value is not None for value in window.values)
    return [(window.index, tuple(window.values))] if known >= _LEAST else []
