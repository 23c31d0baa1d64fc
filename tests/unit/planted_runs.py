"""Runs of a rehearsed job that never ran, and what is planted into them: for tests of their comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from resilience_sdk.rank.rehearsal import RehearsedRank, RehearsedSave
from resilience_sdk.rank.rehearsed_steps import StepLook
from resilience_sdk.recorder.witness_ring import CONTENT, GENERATORS, LOSS, ORDER, RATES, WitnessedStep

STEPS = 20
_ALL = ORDER | CONTENT | RATES | GENERATORS | LOSS


def look(step: int, rank: int = 0) -> StepLook:
    """Return what is seen of a step of these runs."""
    value = step + rank / 10
    return StepLook(
        step,
        1000 + step,
        0.1 / (step + 1),
        {"torch": 77 * step + rank, "Python": 3},
        5 * step + rank,
        0,
        (10 + value, value),
        (value, 1.0),
    )


def witnessed(step: int, rank: int = 0, seen: int = _ALL) -> WitnessedStep:
    """Return what its witness ring has of it."""
    order = 31 * step + rank
    return WitnessedStep(
        step,
        step // 10,
        step % 10,
        seen,
        shapes=4,
        order=order,
        content=order + 1,
        rates=1000 + step,
        rate=0.1,
        generators=step,
        loss=2.0 / (step + 1),
    )


def run(ranks: int = 2, first: int = 0, *, has_ring: bool = True, **facts: Any) -> tuple[RehearsedRank, ...]:
    """Return the traces of an attempt that began at step `first`, in a loop that counts over all attempts."""
    return tuple(
        RehearsedRank(
            0,
            rank,
            tuple((step, step / 10) for step in range(first, STEPS)),
            progress="heartbeats",
            looks=tuple(look(step, rank) for step in range(first, STEPS)),
            witnessed=tuple(witnessed(step, rank) for step in range(first, STEPS)) if has_ring else (),
            **facts,
        )
        for rank in range(ranks)
    )


def counted_behind(trace: RehearsedRank) -> RehearsedRank:
    """Return the trace of a loop whose steps are seen from its optimizer: each is counted when it is done."""
    before = [None, *(number for number, _ in trace.steps)]
    looks = tuple(attrs.evolve(look, at=before[place]) for place, look in enumerate(trace.looks))
    return attrs.evolve(trace, progress="optimizer", looks=looks)


def attempt(
    number: int,
    first: int,
    ran: int,
    saves: tuple[int, ...] = (),
    progress: str = "optimizer",
    begins: float | None = None,
) -> RehearsedRank:
    """Return an attempt that has weights of `first` steps at its begin, and whose loop counts from 0.

    `begins`: other weights than those.
    """
    weights = [(float(first + step), 1.0) for step in range(ran + 1)]
    if begins is not None:
        weights[0] = (begins, 1.0)
    ahead = 1 if progress == "optimizer" else 0  # there a step is counted behind it
    looks = tuple(
        StepLook(None if step < ahead else step - ahead, 1, 0.1, weights=weights[step]) for step in range(ran)
    )
    steps = tuple((step, float(step)) for step in range(ran))
    saved = tuple(RehearsedSave(after, (weights[after],), ("optimizer",)) for after in saves)
    return RehearsedRank(
        number, 0, steps, saves, progress=progress, looks=looks, saved=saved, loaded=("optimizer",) if number else ()
    )


Change = Callable[[RehearsedRank, int], RehearsedRank]


def of_look(**changes: Callable[[Any], Any]) -> Change:
    """Return what changes these fields of the looks, from a step on."""

    def change(trace: RehearsedRank, step: int) -> RehearsedRank:
        def changed(one: StepLook) -> StepLook:
            values = {name: how(getattr(one, name)) for name, how in changes.items()}
            return attrs.evolve(one, **values) if (one.at or 0) >= step else one

        return attrs.evolve(trace, looks=tuple(map(changed, trace.looks)))

    return change


def of_ring(**changes: Callable[[Any], Any]) -> Change:
    """Return what changes these fields of the witnessed steps, from a step on."""

    def change(trace: RehearsedRank, step: int) -> RehearsedRank:
        def changed(one: WitnessedStep) -> WitnessedStep:
            values = {name: how(getattr(one, name)) for name, how in changes.items()}
            return attrs.evolve(one, **values) if one.step >= step else one

        return attrs.evolve(trace, witnessed=tuple(map(changed, trace.witnessed)))

    return change


def grown(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return measures that are a tenth larger."""
    return tuple(value * 1.1 for value in values)


PLANTED: Mapping[str, Change] = {
    "samples": of_ring(order=lambda value: value + 7),
    "learning rate": of_look(rates=lambda value: value + 7, rate=lambda value: value * 2),
    "weights": of_look(weights=grown),
    "generators of torch": of_look(generators=lambda value: {**value, "torch": value["torch"] + 7}),
    "values of the samples": of_ring(content=lambda value: value + 7),
    "loss": of_ring(loss=lambda value: value * 2),
    "gradients": of_look(gradients=grown),
}
