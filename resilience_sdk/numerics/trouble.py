"""What was seen where, and what that says about whose fault it is. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

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
class Judgement:
    """Which of the things seen came first, whom that names, and how sure it is."""

    first: Trouble
    culprits: tuple[int, ...]
    confidence: float


def judge(seen: Iterable[Trouble], world_size: int) -> Judgement:
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
        return Judgement(first, ranks, surely)
    if first.name != "loss":
        return Judgement(first, (), min(surely, 0.6))
    if len(ranks) >= world_size:
        return Judgement(first, (), min(surely, 0.7))
    return Judgement(first, ranks, surely)


def is_same_episode(trouble: Trouble, seen: Sequence[Trouble]) -> bool:
    """Tell whether a trouble belongs to those that were seen, in one attempt."""
    steps = [other.step for other in seen]
    return min(steps) - QUIET_STEPS <= trouble.step <= max(steps) + QUIET_STEPS
