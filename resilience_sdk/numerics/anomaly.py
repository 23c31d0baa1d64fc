"""Anomalies: NaN, infinity and spikes, where they were seen, and what that says about whose fault it is. Pure.

The modified z-score of Iglewicz and Hoaglin ("How to Detect and Handle Outliers", 1993) with median and MAD, which a
few spikes do not move, far stricter than their 3.5 since training is noisier than what they had in mind; and a least
factor over the median besides, since a flat curve has next to no spread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import attrs

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
