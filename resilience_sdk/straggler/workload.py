"""How long a step takes by its amount of work, as learned from the steps that were seen. Pure.

Everything is in logarithms: then the unit of the amount does not matter, and a curve of second degree follows what
steps are made of (a fixed part, one by the token, and attention by its square) over the lengths that a training mixes.
It is learned from differences *within* windows. So steps that become slower in the middle of the history, all by the
same factor, do not bend it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import attrs

from resilience_sdk.straggler.window import SIGMA_OF_DEVIATION, WINDOW_STEPS, median

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
    spread: float
    """Standard deviation of the amounts within windows."""
    explains: bool
    """Whether steps scatter clearly less around it than they do without it."""

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
    left = [_scatter([y - x * (slope + bend * x) for x, y in points]) for points in kept]
    before = [abs(value) for points in kept for value in _scatter([y for _, y in points])]
    bound = _OUTLIER * SIGMA_OF_DEVIATION * median(abs(value) for values in left for value in values)
    without = [
        [point for point, value in zip(points, values, strict=True) if abs(value) <= bound]
        for points, values in zip(kept, left, strict=True)
    ]
    slope, bend, _ = _fit([points for points in without if len(points) >= LEAST_POINTS]) or fitted
    after = [abs(r) for points in kept for r in _scatter([y - x * (slope + bend * x) for x, y in points])]
    return Curve(middle, slope, bend, spread, explains=median(after) < _EXPLAINED * median(before))


def _scatter(values: Sequence[float]) -> list[float]:
    """Return the distances from the middle one."""
    middle = median(values)
    return [value - middle for value in values]


def _fit(windows: Sequence[Points]) -> tuple[float, float, float] | None:
    """Return slope and bend by least squares, each window with a level of its own, and the spread of the amounts."""
    count, uu, uv, vv, uy, vy = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    for points in windows:
        size = len(points)
        mean_u = sum(x for x, _ in points) / size
        mean_v = sum(x * x for x, _ in points) / size
        mean_y = sum(y for _, y in points) / size
        for x, y in points:
            u, v, rest = x - mean_u, x * x - mean_v, y - mean_y
            uu += u * u
            uv += u * v
            vv += v * v
            uy += u * rest
            vy += v * rest
        count += size
    if count == 0 or uu < count * _FLAT**2:
        return None
    spread = uu / count
    own = vv - uv * uv / uu  # what the square has that the amount itself has not
    if own < count * _LEAST_BEND * spread**2:
        return uy / uu, 0.0, math.sqrt(spread)
    bend = (vy - uv * uy / uu) / own
    return (uy - bend * uv) / uu, bend, math.sqrt(spread)
