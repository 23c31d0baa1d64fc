"""When a finite value is a spike: far above what the last steps were like. Pure.

The modified z-score of Iglewicz and Hoaglin ("How to Detect and Handle Outliers", 1993) with median and MAD, which a
few spikes do not move, far stricter than their 3.5 since training is noisier than what they had in mind; and a least
factor over the median besides, since a flat curve has next to no spread.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_Z = 10.0
_NORMAL = 1.4826  # MAD to standard deviation
_WINDOW = 128
_LEAST = 32
_RENEW = 8

LOSS_FACTOR = 1.25
"""A loss is no spike below this many times its median."""
GRAD_NORM_FACTOR = 5.0
"""A gradient norm is none below this: ByteRobust (SOSP 2025) acts at five times, and norms scatter widely."""


def bound(values: list[float], factor: float) -> float:
    """Return above what a value is a spike after `values`, of which there is at least one."""
    middle = median(values)
    spread = _NORMAL * median([abs(value - middle) for value in values])
    return middle + max(_Z * spread, (factor - 1.0) * abs(middle))


class Spikes:
    """The last values of one quantity. What was a spike counts too: a level that lasts becomes the usual one."""

    __slots__ = ("_bound", "_factor", "_left", "_values", "usual")

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._left = _LEAST
        self._bound = float("inf")
        self.usual = 0.0
        """The median that the bound goes by."""

    def is_spike(self, value: float) -> bool:
        """Take the next finite value; tell whether it is a spike after those before it."""
        spikes = value > self._bound
        self._values.append(value)
        self._left -= 1
        if self._left <= 0:
            self._left = _RENEW
            values = list(self._values)
            self.usual, self._bound = median(values), bound(values, self._factor)
        return spikes
