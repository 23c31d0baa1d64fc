"""What a pass of a section takes everybody, window by window, and whether that has risen. Pure.

Where the training tells how much work its steps have, steps are compared with what such a step is expected to take;
else, and where the amounts tell nothing, as they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from resilience_sdk.straggler.change_point import ChangePoint, find_rise, trimmed_mean
from resilience_sdk.straggler.window import NOT_SEEN, centres, median
from resilience_sdk.straggler.workload import LEAST_POINTS, Curve, Point, Points, learn, middle_amount, points_of

_HISTORY = 64  # windows in which a change is looked for
_LEAST_TO_LEARN = 8  # windows; a change is not looked for in fewer than eleven
_LEARNED_EVERY = 4  # windows
_MOST_WITHOUT = 0.25  # of the windows may lack amounts, for those to count that have them
_SAME_AMOUNT = 0.05  # as a logarithm: windows of steps that are all alike are compared with such alone
_SPREADS = 2.5  # windows whose amounts differ by more than that many spreads are not compared: no step links them


class Common:
    """The history of what a section takes all ranks of a role."""

    def __init__(self) -> None:
        """Begin without any."""
        self._levels: deque[float] = deque(maxlen=_HISTORY)
        self._points: deque[Points] = deque(maxlen=_HISTORY)
        self.restart()

    @property
    def newest(self) -> float:
        """The level of the newest window, as a logarithm of seconds; NOT_SEEN before the first."""
        return self._series[-1] if self._series else NOT_SEEN

    @property
    def windows(self) -> int:
        """How many windows the newest one is compared with, and itself."""
        return len(self._series)

    def restart(self) -> None:
        """Forget everything: a regression has ended, so the mixture is no baseline."""
        self._levels.clear()
        self._points.clear()
        self._curve: Curve | None = None
        self._since_learned = 0
        self._series: list[float] = []

    def add(self, level: float, points: Points = ()) -> None:
        """Take one window: its level, and those of its steps whose amount of work is known."""
        if level != level:
            return
        self._levels.append(level)
        self._points.append(points if len(points) >= LEAST_POINTS else ())
        self._learn()
        self._series = self._comparable()

    def rise(self) -> ChangePoint | None:
        """Return the rise that lasts to the newest window; None where there is none."""
        return find_rise(self._series)

    def _learn(self) -> None:
        if not self._points[-1]:
            return
        known = [points for points in self._points if points]
        self._since_learned += 1
        if len(known) < _LEAST_TO_LEARN or (self._since_learned < _LEARNED_EVERY and len(known) != _LEAST_TO_LEARN):
            return
        self._since_learned = 0
        middle = self._curve.middle if self._curve is not None else middle_amount(known)
        if self._curve is not None and abs(_amount(self._points[-1]) - middle) > _reach(self._curve):
            middle = _amount(self._points[-1])  # seconds are then those of a step as they are now
        self._curve = learn(known, middle)

    def _comparable(self) -> list[float]:
        """Return the levels of the windows that the newest one can be compared with, oldest first, and its own."""
        levels, now = list(self._levels), self._points[-1]
        without = sum(1 for points in self._points if not points)
        if not now or without > _MOST_WITHOUT * len(levels):
            return levels
        curve, amount = self._curve, _amount(now)
        if curve is not None and not curve.explains:
            return levels
        reach = _reach(curve)
        is_alike = [not points or abs(_amount(points) - amount) <= reach for points in self._points]
        if curve is None:
            return [level for level, alike in zip(levels, is_alike, strict=True) if alike]
        return [
            trimmed_mean(curve.residuals(points))
            for points, alike in zip(self._points, is_alike, strict=True)
            if alike and points
        ]


def _amount(points: Points) -> float:
    return median(amount for amount, _ in points)


def _reach(curve: Curve | None) -> float:
    return _SAME_AMOUNT if curve is None else max(_SAME_AMOUNT, _SPREADS * curve.spread)


def steps_of(rows: Sequence[Sequence[float]], few: int) -> list[float]:
    """Return what each pass takes everybody, in seconds: the median rank, and where there are few, the fastest."""
    if len(rows) >= few:
        return centres(rows)
    columns = ([value for value in column if value > 0.0] for column in zip(*rows, strict=True))
    return [min(column, default=NOT_SEEN) for column in columns]


def level_of(steps: Sequence[float]) -> float:
    """Return the logarithm of what a pass takes everybody in a window of `steps`; NOT_SEEN where none is known."""
    known = [math.log(value) for value in steps if value > 0.0]
    return trimmed_mean(known) if known else NOT_SEEN


def work_of(
    steps: Sequence[float], rows: Mapping[int, Sequence[float]], amounts: Mapping[int, Sequence[float | None]], few: int
) -> list[Point]:
    """Return the amounts of work beside what the steps of `rows` took everybody; of the fastest where there are few.

    The median rank has the median amount, where ranks have different ones.
    """
    clean: dict[int, list[float]] = {}
    ours: dict[int, list[float]] = {}
    for rank in rows:
        told = amounts.get(rank)
        if told is None or len(told) != len(steps):
            continue
        row = clean.get(id(told))  # ranks that have told the same share one
        if row is None:
            row = clean[id(told)] = [NOT_SEEN if value is None or not value > 0.0 else value for value in told]
        ours[rank] = row
    if not ours:
        return []
    if len(rows) >= few:
        return points_of(centres(ours.values()) if len(clean) > 1 else next(iter(clean.values())), steps)
    fastest = [
        next((row for rank, row in ours.items() if rows[rank][at] == took), None) for at, took in enumerate(steps)
    ]
    return points_of([NOT_SEEN if row is None else row[at] for at, row in enumerate(fastest)], steps)
