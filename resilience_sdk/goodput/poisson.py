"""Counts of rare events: how probable so many are, and between which rates the true one lies. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable


def at_least(count: int, expected: float) -> float:
    """Return the probability of `count` events or more where `expected` (0 or more) are, of a Poisson distribution.

    Small probabilities keep their digits: below the mean it is the complement that is summed.
    """
    if count <= 0:
        return 1.0
    if expected <= 0:
        return 0.0
    if expected < count:
        return min(1.0, math.exp(_log_of(count, expected)) * _sum_up(count, expected))
    return max(0.0, 1.0 - math.exp(_log_of(count - 1, expected)) * _sum_down(count - 1, expected))


def limits(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact limits of the expected number of events where `count` were seen (Garwood 1936)."""
    tail = (1.0 - confidence) / 2.0
    most = count + 10.0 + 10.0 * math.sqrt(count + 1.0)
    low = _solve(lambda mean: at_least(count, mean) - tail, count) if count else 0.0
    return low, _solve(lambda mean: at_least(count + 1, mean) - (1.0 - tail), most)


def _solve(rises: Callable[[float], float], most: float) -> float:
    low, high = 0.0, float(most)
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return 0.5 * (low + high)


def _log_of(count: int, expected: float) -> float:
    return count * math.log(expected) - expected - math.lgamma(count + 1.0)


def _sum_up(count: int, expected: float) -> float:
    whole = term = 1.0
    while term > 1e-17 * whole:
        count += 1
        term *= expected / count
        whole += term
    return whole


def _sum_down(count: int, expected: float) -> float:
    whole = term = 1.0
    while count > 0 and term > 1e-17 * whole:
        term *= count / expected
        count -= 1
        whole += term
    return whole
