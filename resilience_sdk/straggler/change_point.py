"""Whether, and where, a series has moved to a higher level and stayed there. Pure.

The series are logarithms of durations, one value per window, so a shift is a ratio. Two samples, before and after, are
compared at a few splits; the noise is taken from the differences of neighbours, which a single shift hardly changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs

from resilience_sdk.straggler.window import median

_BEFORE = 8  # windows that make a baseline
_AFTER = (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32)  # windows after the change that are tried
_TRIMMED = 0.7226  # trimmed mean of absolute deviations, of a normal distribution of deviation 1
LEAST_NOISE = 0.002
"""No series is believed to be quieter than this (0.2 %), however few its values are."""


@attrs.frozen
class ChangePoint:
    """A rise of a series."""

    index: int
    """First value after the change."""
    before: float
    after: float
    z: float
    """The rise in standard deviations."""

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
            best = ChangePoint(index, low, high, z)
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
