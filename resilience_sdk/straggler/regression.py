"""Regression of a whole job: whether a pass takes everybody longer than before, for the same amount of work. Pure.

The series are logarithms of durations, one value per window, so a shift is a ratio. Two samples, before and after, are
compared at a few splits; the noise is taken from the differences of neighbours, which a single shift hardly changes.

Where the training tells how much work its steps have, steps are compared with what such a step is expected to take;
else, and where the amounts tell nothing, as they are. The expectation is a curve of second degree through logarithms:
the unit of the amount does not matter, and it follows what steps are made of (a fixed part, one by the token, and
attention by its square) over the lengths that a training mixes. It is learned from differences *within* windows, so
steps that become slower in the middle of the history, all by the same factor, do not bend it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

from resilience_sdk.straggler.windowing import NOT_SEEN, SIGMA_OF_DEVIATION, WINDOW_STEPS, centres, median

_BEFORE = 8  # windows that make a baseline
_AFTER = (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32)  # windows after the change that are tried
_TRIMMED = 0.7226  # trimmed mean of absolute deviations, of a normal distribution of deviation 1
LEAST_NOISE = 0.002
"""No series is believed to be quieter than this (0.2 %), however few its values are."""


@attrs.frozen
class ChangePoint:
    """A rise of a series."""

    length: int  # values since the change
    before: float
    after: float
    z: float  # the rise in standard deviations

    @property
    def rise(self) -> float:
        """How much higher it is, in units of the series."""
        return self.after - self.before

    @property
    def middle(self) -> float:
        """Half way up; what is below has fallen back."""
        return 0.5 * (self.before + self.after)


def find_rise(values: Sequence[float], least_noise: float = 0.0) -> ChangePoint | None:
    """Return the most significant rise that lasts to the end of the series; None where it is too short or fell.

    `least_noise` is what is known otherwise of the standard deviation of a value.
    """
    best: ChangePoint | None = None
    noise = max(noise_of([values]), least_noise)
    for length in _AFTER:
        index = len(values) - length
        if index < _BEFORE:
            break
        before, after = values[:index], values[index:]
        low, high = trimmed_mean(before), trimmed_mean(after) if length >= 8 else median(after)
        # A level is one only if most of its values are there: one extreme window is no change.
        if min(high - low, median(after) - median(before)) < 0.5 * (high - low) or high <= low:
            continue
        spread = max(noise, trimmed_mean([abs(value - low) for value in before]) / _TRIMMED)
        z = (high - low) / (spread * math.sqrt(1.0 / len(before) + 1.0 / len(after)))
        if best is None or z > best.z:
            best = ChangePoint(length, low, high, z)
    return best if best is not None and values[-1] >= best.middle else None


def noise_of(series: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of single values, pooled over series, from the differences of neighbours.

    The largest difference of a series is left out, because a shift may be among them, and the mean is corrected for
    that. Few differences may all be small by chance, so the fewer there are, the larger the result is made.
    """
    kept: list[float] = []
    for values in series:
        steps = sorted(abs(b - a) for a, b in pairwise(values))
        if len(steps) > 1:
            kept += [step * (1.0 + 1.2 / len(steps)) for step in steps[:-1]]
        else:
            kept += steps
    if not kept:
        return math.inf
    deviation = trimmed_mean(kept) / _TRIMMED / math.sqrt(2.0)
    return max(LEAST_NOISE, deviation * math.sqrt(1.0 + 8.0 / len(kept)))


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest eighth. Needs a value."""
    cut = len(values) // 8
    kept = sorted(values)[cut : len(values) - cut]
    return sum(kept) / len(kept)


Point = tuple[float, float]
"""One step: the logarithms of its amount of work and of its seconds."""
Points = Sequence[Point]
"""Those steps of a window of which both are known."""

LEAST_POINTS = WINDOW_STEPS // 2
"""So many steps of a window must have an amount, for it to be a window of known work."""
_FLAT = 0.02  # a standard deviation within windows below which amounts tell nothing about a step
_LEAST_BEND = 0.05  # of what evenly spread amounts have: below it (two lengths only) there is but a straight line
_OUTLIER = 4.0  # standard deviations
_EXPLAINED = 0.8  # the scatter of the steps that may be left, as a share, for the amounts to tell something


@attrs.frozen
class Curve:
    """How much longer than one of the `middle` amount a step takes, as a logarithm."""

    middle: float
    slope: float
    bend: float
    spread: float  # standard deviation of the amounts within windows
    explains: bool  # steps scatter clearly less around it than they do without it

    def beyond(self, amount: float) -> float:
        """Return how much longer a step of this amount (a logarithm) takes."""
        x = amount - self.middle
        return x * (self.slope + self.bend * x)

    def residuals(self, points: Points) -> list[float]:
        """Return the logarithm of what each step would have taken, had it been of the middle amount."""
        return [seconds - self.beyond(amount) for amount, seconds in points]


def points_of(amounts: Sequence[float], seconds: Sequence[float]) -> list[Point]:
    """Return the steps of a window of which amount and duration are known, and above zero."""
    return [
        (math.log(amount), math.log(took))
        for amount, took in zip(amounts, seconds, strict=True)
        if 0.0 < amount < math.inf and 0.0 < took < math.inf
    ]


def middle_amount(windows: Iterable[Points]) -> float:
    """Return the median of all amounts. Needs one."""
    return median(amount for points in windows for amount, _ in points)


def learn(windows: Sequence[Points], middle: float) -> Curve | None:
    """Return the curve through the steps of these windows; None where the amounts hardly vary within any."""
    kept = [[(amount - middle, seconds) for amount, seconds in points] for points in windows]
    fitted = _fit(kept)
    if fitted is None:
        return None
    slope, bend, spread = fitted
    bound = _OUTLIER * SIGMA_OF_DEVIATION * _scatter(kept, slope, bend)
    without = [
        [point for point, value in zip(points, _left(points, slope, bend), strict=True) if abs(value) <= bound]
        for points in kept
    ]
    slope, bend, _ = _fit([points for points in without if len(points) >= LEAST_POINTS]) or fitted
    explains = _scatter(kept, slope, bend) < _EXPLAINED * _scatter(kept, 0.0, 0.0)
    return Curve(middle, slope, bend, spread, explains)


def _left(points: Points, slope: float, bend: float) -> list[float]:
    """Return what a curve leaves of the steps of a window, as distances from the middle one."""
    values = [y - x * (slope + bend * x) for x, y in points]
    middle = median(values)
    return [value - middle for value in values]


def _scatter(windows: Sequence[Points], slope: float, bend: float) -> float:
    """Return the median distance of a step from the curve."""
    return median(abs(value) for points in windows for value in _left(points, slope, bend))


def _fit(windows: Sequence[Points]) -> tuple[float, float, float] | None:
    """Return slope and bend by least squares, each window with a level of its own, and the spread of the amounts."""
    centred: list[tuple[float, float, float]] = []
    for points in windows:
        size = len(points)
        mean_u = sum(x for x, _ in points) / size
        mean_v = sum(x * x for x, _ in points) / size
        mean_y = sum(y for _, y in points) / size
        centred += [(x - mean_u, x * x - mean_v, y - mean_y) for x, y in points]
    count = len(centred)
    uu = sum(u * u for u, _, _ in centred)
    if count == 0 or uu < count * _FLAT**2:
        return None
    uv, vv = sum(u * v for u, v, _ in centred), sum(v * v for _, v, _ in centred)
    uy, vy = sum(u * y for u, _, y in centred), sum(v * y for _, v, y in centred)
    spread = uu / count
    own = vv - uv * uv / uu  # what the square has that the amount itself has not
    if own < count * _LEAST_BEND * spread**2:
        return uy / uu, 0.0, math.sqrt(spread)
    bend = (vy - uv * uy / uu) / own
    return (uy - bend * uv) / uu, bend, math.sqrt(spread)


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
        self._curve: Curve | None = None
        self._since_learned = 0
        self._series: list[float] = []

    @property
    def newest(self) -> float:
        """The level of the newest window, as a logarithm of seconds; NOT_SEEN before the first."""
        return self._series[-1] if self._series else NOT_SEEN

    def add(self, level: float, points: Points = ()) -> None:
        """Take one window: its level, and those of its steps whose amount of work is known."""
        if level == level:
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
        now, middle = middle_amount(known[-1:]), middle_amount(known)
        if self._curve is not None:  # beyond its reach seconds are those of a step as they are now
            middle = now if abs(now - self._curve.middle) > _reach(self._curve) else self._curve.middle
        self._curve = learn(known, middle)

    def _comparable(self) -> list[float]:
        """Return the levels of the windows that the newest one can be compared with, oldest first, and its own."""
        levels, now, curve = list(self._levels), self._points[-1], self._curve
        without = sum(1 for points in self._points if not points)
        if not now or without > _MOST_WITHOUT * len(levels) or (curve is not None and not curve.explains):
            return levels
        amount, reach = middle_amount([now]), _reach(curve)
        alike = [
            (level, points)
            for level, points in zip(levels, self._points, strict=True)
            if not points or abs(middle_amount([points]) - amount) <= reach
        ]
        if curve is None:
            return [level for level, _ in alike]
        return [trimmed_mean(curve.residuals(points)) for _, points in alike if points]


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
    steps: Sequence[float], rows: Mapping[int, Sequence[float]], amounts: Mapping[int, Sequence[float]], few: int
) -> list[Point]:
    """Return the amounts of work beside what the steps of `rows` took everybody; of the fastest where there are few.

    The median rank has the median amount, where ranks have different ones.
    """
    ours = {rank: amounts[rank] for rank in rows if len(amounts.get(rank, ())) == len(steps)}
    if not ours:
        return []
    if len(rows) >= few:
        return points_of(centres(ours.values()), steps)
    fastest = [
        next((row[at] for rank, row in ours.items() if rows[rank][at] == took), NOT_SEEN)
        for at, took in enumerate(steps)
    ]
    return points_of(fastest, steps)
