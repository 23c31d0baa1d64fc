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

Section = tuple[str, str]
"""Name and kind."""
Row = tuple["int | None", ...]
"""One duration (ns) per pass of a window; None: not known."""


@attrs.define
class _Open:
    """The window that fills at this moment."""

    index: int = 0
    values: list[int | None] = attrs.field(factory=list)

    @property
    def next(self) -> int:
        """How many passes came before the one that is awaited, without the first."""
        return WINDOW_STEPS * self.index + len(self.values)


class RankCutter:
    """Cuts the passes of one rank."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._open: dict[Section, _Open] = {}
        self._lanes: dict[Section, int] = {}
        self.passes: dict[Section, int] = {}
        """How many passes each section has completed."""

    def add(
        self, section: Section, lane: int, start: int, durations_ns: Sequence[int], every: int = 1
    ) -> list[tuple[int, Row]]:
        """Take passes from number `start` on; return the windows that they fill, with their numbers.

        Of these only those whose number `every` divides.

        Where passes are missing (the ring of the page was overwritten) so are their values; a window that lacks more
        than half is left out. Of a section that runs in several threads, the first one counts.
        """
        if self._lanes.setdefault(section, lane) != lane:
            return []
        self.passes[section] = start + len(durations_ns)
        current = self._open.setdefault(section, _Open())
        filled: list[tuple[int, Row]] = []
        number = max(start - WARM_UP, current.next)
        if number > current.next:
            index, column = divmod(number, WINDOW_STEPS)
            if index > current.index:
                if current.index % every == 0:
                    filled += _closed(current.index, current.values)
                current.index, current.values = index, []
            current.values += [None] * (column - len(current.values))
        current.values += durations_ns[number - (start - WARM_UP) :]
        values, last = current.values, len(current.values) // WINDOW_STEPS
        for window in range(last):
            if (current.index + window) % every == 0:
                at = WINDOW_STEPS * window
                filled += _closed(current.index + window, values[at : at + WINDOW_STEPS])
        current.index, current.values = current.index + last, values[WINDOW_STEPS * last :]
        return filled


def first_pass(index: int) -> int:
    """Return the number of the first pass of a window."""
    return WARM_UP + WINDOW_STEPS * index


def _closed(index: int, values: list[int | None]) -> list[tuple[int, Row]]:
    if values.count(None) + WINDOW_STEPS - len(values) > WINDOW_STEPS - _LEAST:
        return []
    return [(index, (*values, *[None] * (WINDOW_STEPS - len(values))))]
