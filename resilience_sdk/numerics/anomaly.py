"""Anomalies: NaN, infinity and spikes, where they were seen, and what that says about whose fault it is. Pure.

The modified z-score of Iglewicz and Hoaglin ("How to Detect and Handle Outliers", 1993) with median and MAD, which a
few spikes do not move, far stricter than their 3.5 since training is noisier than what they had in mind; and a least
factor over the median besides, since a flat curve has next to no spread.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

_Z = 10.0
_NORMAL = 1.4826  # MAD to standard deviation
_WINDOW = 128
_LEAST = 32
_RENEW = 16
_LARGEST = sys.float_info.max  # what is above is infinity, and what compares with nothing is NaN

LOSS_FACTOR = 1.25
"""A loss is no spike below this many times its median."""
GRAD_NORM_FACTOR = 5.0
"""A gradient norm is none below this: ByteRobust (SOSP 2025) acts at five times, and norms scatter widely."""


def bound(ordered: Sequence[float], factor: float) -> tuple[float, float]:
    """Return the median of sorted values, at least one, and above what the next value is a spike.

    The values nearest to the median lie side by side, and the furthest of that half tells the MAD: no deviation of each
    needs to be made and sorted, which would be felt in the step that pays for it.
    """
    half = len(ordered) // 2
    middle = (ordered[half] + ordered[~half]) / 2
    begins = range(len(ordered) - half - 1)
    first = bisect_left(begins, True, key=lambda at: middle - ordered[at] <= ordered[at + half + 1] - middle)
    spread = _NORMAL * max(middle - ordered[first], ordered[first + half] - middle)
    return middle, middle + max(_Z * spread, (factor - 1.0) * abs(middle))


class UsualValues:
    """The last values of one quantity. Spikes are added too: a level that lasts becomes the usual one."""

    __slots__ = ("_bound", "_factor", "_left", "_values", "middle")

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._left = _LEAST
        self._bound = _LARGEST
        self.middle = 0.0
        """The median that the bound goes by."""

    def takes(self, value: float) -> bool:
        """Add the next value if it is a usual one, finite and no spike after those before it; tell whether it is."""
        if not -_LARGEST <= value <= self._bound:
            return False
        self._values.append(value)
        self._left -= 1
        if self._left <= 0:
            self._renew()
        return True

    def add(self, value: float) -> None:
        """Add one that was not taken; what is not finite tells nothing about the usual ones."""
        if -_LARGEST <= value <= _LARGEST:
            self._values.append(value)
            self._left -= 1
            if self._left <= 0:
                self._renew()

    def _renew(self) -> None:
        self._left = _RENEW
        self.middle, self._bound = bound(sorted(self._values), self._factor)
        self._bound = min(self._bound, _LARGEST)


Found = Literal["nan", "inf", "spike"]

NAN_LOSS, NAN_GRADIENT, SPIKE = "nan_loss", "nan_grad_anomaly", "loss_spike"
QUIET_STEPS = 16
"""After so many good values it is over, and what comes then is something new."""


def found_in(value: float) -> Found | None:
    """Return what is wrong with a value that stands alone."""
    if math.isnan(value):
        return "nan"
    return "inf" if math.isinf(value) else None


@attrs.frozen
class Trouble:
    """One bad value: of `loss` or `grad_norm`, at a step, on a rank.

    `is_global`: the step is the same number on all ranks and in all attempts. `usual`: the median of the steps before,
    where it is a spike.
    """

    rank: int
    step: int
    name: Literal["loss", "grad_norm"]
    found: Found
    value: float = attrs.field(eq=False)  # NaN equals nothing, itself included
    is_global: bool = False
    usual: float | None = None

    @property
    def text(self) -> str:
        """Return it in words."""
        told = f"is {self.found}"
        if self.found == "spike":
            usual = "" if self.usual is None else f", usually {self.usual:.4g}"
            told = f"spikes ({self.value:.4g}{usual})"
        return (
            f"{self.name} {told} at step {self.step}{'' if self.is_global else ' of this attempt'} on rank {self.rank}"
        )

    @property
    def cause(self) -> str:
        """Return the cause as the taxonomy names it."""
        if self.found == "spike":
            return SPIKE
        return NAN_LOSS if self.name == "loss" else NAN_GRADIENT

    @property
    def order(self) -> tuple[int, bool, bool]:
        """Sort by it: what can have led to the other comes first. The gradient of a step follows from its loss."""
        return self.step, self.name != "loss", self.found == "spike"


@attrs.frozen
class AnomalyJudgement:
    """Which of the things seen came first, whom that names, and how sure it is."""

    first: Trouble
    culprits: tuple[int, ...]
    confidence: float


def judge(seen: Iterable[Trouble], world_size: int) -> AnomalyJudgement:
    """Return what the troubles of one episode, at least one, come to.

    A loss is a rank's own, so a rank that had a bad one before all others is the culprit. The norm of gradients that
    were reduced is equal on all ranks and names nobody; so does a loss that was bad on all at once, which comes from
    the weights that they share.
    """
    ordered = sorted(seen, key=lambda trouble: (trouble.order, trouble.rank, trouble.found))
    first = ordered[0]
    ranks = tuple(sorted({trouble.rank for trouble in ordered if trouble.order == first.order}))
    surely = 0.5 if first.found == "spike" else 0.9
    if world_size == 1:
        return AnomalyJudgement(first, ranks, surely)
    if first.name != "loss":
        return AnomalyJudgement(first, (), min(surely, 0.6))
    if len(ranks) >= world_size:
        return AnomalyJudgement(first, (), min(surely, 0.7))
    return AnomalyJudgement(first, ranks, surely)


def is_same_episode(trouble: Trouble, seen: Sequence[Trouble]) -> bool:
    """Tell whether a trouble belongs to those that were seen, in one attempt."""
    steps = [other.step for other in seen]
    return min(steps) - QUIET_STEPS <= trouble.step <= max(steps) + QUIET_STEPS
