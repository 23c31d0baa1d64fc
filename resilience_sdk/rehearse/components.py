"""Two runs of one job, step by step: which component differs first, at which step, on which ranks. Pure.

Steps are seen in two ways: the witness ring knows the samples and the loss where a way in keeps one; the looks of the
rehearsal know learning rates, weights, gradients and generators in any loop with an optimizer of torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rank.rehearsed_steps import StepLook
from resilience_sdk.recorder.witness_ring import CONTENT, FIXED, LOSS, ORDER, UNPLACED, WitnessedStep

SAMPLES, RATE, WEIGHTS, GENERATORS, LOSSES = "samples", "learning rate", "weights", "generators", "loss"

SAME_WEIGHTS = 1e-5
"""By how much weights may differ, in parts of their norm: a reduction in another order rounds otherwise."""
_SAME_GRADIENTS = 1e-3
_OF_TWINS = 0.1  # what differs by itself is not to be found by a hair


@attrs.frozen
class _Kind:
    """What is compared of a step. In one step, the first of them that differs explains those behind it."""

    name: str
    component: str
    is_proof: bool
    """Whether it alone proves that the runs differ; else only what follows from it does."""
    nearness: float = 0.0


# A batch may be another one because a loader reads ahead, and a generator that nothing draws from harms nobody.
_ORDER = _Kind("samples", SAMPLES, True)
_BATCH = _Kind("batches", SAMPLES, False)
_RATES = _Kind("learning rate", RATE, True)
_WEIGHTS = _Kind("weights", WEIGHTS, True, SAME_WEIGHTS)
_GENERATORS = {name: _Kind(f"generators of {name}", GENERATORS, False) for name in ("torch", "NumPy", "Python")}
_VALUES = _Kind("values of the samples", SAMPLES, False)
_LOSS = _Kind("loss", LOSSES, True, _SAME_GRADIENTS)
_GRADIENTS = _Kind("gradients", LOSSES, True, _SAME_GRADIENTS)
KINDS = (_ORDER, _BATCH, _RATES, _WEIGHTS, *_GENERATORS.values(), _VALUES, _LOSS, _GRADIENTS)

UNTIL_TWINS = {_GENERATORS[name].name: -1 for name in ("NumPy", "Python")}
"""What is not compared before a second undisturbed run has shown that it is repeated: most scripts seed these never."""

Place = tuple[int, int]
"""A step of the undisturbed run's loop, and which optimizer step in it."""


@attrs.frozen
class Part:
    """One thing that was seen of a step: as a number, or as measures that may differ by rounding."""

    exact: tuple[int, ...] = ()
    measures: tuple[float, ...] = ()
    words: str = ""


Steps = Mapping[Place, Mapping[str, Part]]


@attrs.frozen
class Difference:
    """Where two runs differ first."""

    component: str
    name: str
    """What it is called: the component, or which part of it."""
    step: int
    ranks: tuple[int, ...]
    words: str
    has_proof: bool
    """Whether what follows from it differs, too; else nothing came of it."""


@attrs.frozen
class Compared:
    """What came of the comparison of two runs."""

    steps: int = 0
    """How many optimizer steps, or steps of a loop, both have on every rank."""
    names: tuple[str, ...] = ()
    """What was compared of them."""
    first: Difference | None = None


def compare(one: Sequence[RehearsedRank], other: Sequence[RehearsedRank], without: Mapping[str, int]) -> Compared:
    """Return where `other` differs first from the undisturbed run `one`.

    `without`: names that are not compared, each from which step on.
    """
    before = {trace.rank: seen(trace, trace) for trace in one}
    origin = {trace.rank: trace for trace in one}
    now = {trace.rank: seen(trace, origin[trace.rank]) for trace in other if trace.rank in origin}
    found = {rank: dict(_differing(before[rank], steps, without)) for rank, steps in now.items()}
    common = [before[rank].keys() & steps.keys() for rank, steps in now.items()]
    names = {name for rank, steps in now.items() for place in before[rank].keys() & steps.keys()
             for name in before[rank][place].keys() & steps[place].keys()
             if place[0] < without.get(name, place[0] + 1)}  # fmt: skip
    known = tuple(kind.name for kind in KINDS if kind.name in names)
    return Compared(min(map(len, common), default=0), known, _first(found, before, now))


def varying(one: Sequence[RehearsedRank], again: Sequence[RehearsedRank]) -> dict[str, int]:
    """Return what differs between two undisturbed runs by itself, each from which step on."""
    before = {trace.rank: seen(trace, trace) for trace in one}
    origin = {trace.rank: trace for trace in one}
    found: dict[str, int] = {}
    for trace in again:
        if trace.rank in origin:
            now = seen(trace, origin[trace.rank])
            for (step, _), names in _differing(before[trace.rank], now, {}, _OF_TWINS):
                for name in names:
                    found[name] = min(step, found.get(name, step))
    return {kind.name: found[kind.name] for kind in KINDS if kind.name in found}


def components_of(names: Collection[str]) -> list[str]:
    """Return the components that these names are of, each once."""
    return list(dict.fromkeys(kind.component for kind in KINDS if kind.name in names))


def in_order(names: Collection[str]) -> list[str]:
    """Return these names in the order in which they explain one another."""
    return [kind.name for kind in KINDS if kind.name in names]


def with_consequences(variation: Mapping[str, int]) -> dict[str, int]:
    """Return what is not to be compared where that differs by itself: what follows from it may be near by chance."""
    harmless = {kind.name for kind in _GENERATORS.values()}
    causes = [step for name, step in variation.items() if name not in harmless]
    following = (_WEIGHTS.name, _LOSS.name, _GRADIENTS.name) if causes else ()
    return {**variation, **{name: min(causes) for name in following}}


def _differing(
    before: Steps, now: Steps, without: Mapping[str, int], strictness: float = 1.0
) -> Iterator[tuple[Place, tuple[str, ...]]]:
    for place in sorted(before.keys() & now.keys()):
        names = tuple(
            kind.name
            for kind in KINDS
            if place[0] < without.get(kind.name, place[0] + 1)
            and kind.name in before[place]
            and kind.name in now[place]
            and not _is_same(kind, before[place][kind.name], now[place][kind.name], strictness)
        )
        if names:
            yield place, names


def _first(
    found: Mapping[int, Mapping[Place, Collection[str]]], before: Mapping[int, Steps], now: Mapping[int, Steps]
) -> Difference | None:
    places = sorted({place for steps in found.values() for place in steps})
    if not places:
        return None
    place = places[0]
    kind = next(kind for kind in KINDS if any(kind.name in steps.get(place, ()) for steps in found.values()))
    ranks = tuple(sorted(rank for rank, steps in found.items() if kind.name in steps.get(place, ())))
    proofs = {one.name for one in KINDS if one.is_proof}
    has_proof = any(proofs & set(names) for steps in found.values() for names in steps.values())
    words = _words(kind, before[ranks[0]][place][kind.name], now[ranks[0]][place][kind.name])
    return Difference(kind.component, kind.name, place[0], ranks, words, has_proof)


def _is_same(kind: _Kind, one: Part, other: Part, strictness: float) -> bool:
    if one.exact != other.exact or len(one.measures) != len(other.measures):
        return False
    scale = max((abs(value) for value in (*one.measures, *other.measures) if math.isfinite(value)), default=0.0)
    return all(
        _is_near(x, y, strictness * kind.nearness * scale) for x, y in zip(one.measures, other.measures, strict=True)
    )


def _is_near(one: float, other: float, most: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= most
    return repr(one) == repr(other)


def _words(kind: _Kind, before: Part, now: Part) -> str:
    if before.words != now.words:
        return f"{now.words} instead of {before.words.removeprefix(kind.name).lstrip()}"
    if kind.component == GENERATORS:
        return f"{kind.name} in another state"
    return {
        _ORDER.name: f"other samples in {now.words}",
        _BATCH.name: "another batch: other samples, or other values of them",
        _RATES.name: "another learning rate of a group behind the first",
        _WEIGHTS.name: "other weights before the step",
        _VALUES.name: "other values of the same samples",
        _LOSS.name: "another loss",
        _GRADIENTS.name: "other gradients from the same weights",
    }[kind.name]


# -- what is known of each step, under the numbers of the undisturbed run


def seen(trace: RehearsedRank, like: RehearsedRank) -> Steps:
    """Return what was seen of each step of `trace`, under the numbers that the undisturbed run `like` gives them.

    A loop that counts from 0 in each attempt is counted from its end, which both runs have in common.
    """
    places = _places(like)
    if _counts_on(trace, like):
        own = _places(trace)
    else:
        ahead = len(places) - len(trace.looks)
        own = [places[ahead + number] if ahead + number >= 0 else None for number in range(len(trace.looks))]
    knows_order = any(one.seen & (ORDER | FIXED) for one in like.witnessed)
    found: dict[Place, dict[str, Part]] = {}
    for place, look in zip(own, trace.looks, strict=True):
        if place is not None:
            found[place] = dict(_of_look(look, knows_order=knows_order))
    for one in trace.witnessed:
        found.setdefault((one.step, 0), {}).update(_of_witness(one))
    return found


def _counts_on(trace: RehearsedRank, like: RehearsedRank) -> bool:
    return bool(trace.steps and like.steps) and trace.steps[-1][0] == like.steps[-1][0]


def _places(trace: RehearsedRank) -> list[Place | None]:
    """Return the place of each look of a run, by the numbers that its loop gives."""
    # Seen from an optimizer, a step is counted behind it, and so behind the look.
    following = dict(zip((None, *(number for number, _ in trace.steps)), (n for n, _ in trace.steps)))  # noqa: B905
    found: list[Place | None] = []
    for look in trace.looks:
        step = following.get(look.at, look.at) if trace.progress == "optimizer" else look.at
        number = -1 if step is None else step
        last = found[-1] if found else None
        found.append((number, last[1] + 1 if last is not None and last[0] == number else 0))
    return found


def _of_look(look: StepLook, *, knows_order: bool) -> Iterator[tuple[str, Part]]:
    if look.batch is not None and not knows_order:
        yield _BATCH.name, Part((look.batch,))
    if look.rates is not None:
        yield _RATES.name, Part((look.rates,), words=f"learning rate {look.rate:.6g}")
    yield _WEIGHTS.name, Part(measures=look.weights)
    for name, number in look.generators.items():
        if name in _GENERATORS:
            yield _GENERATORS[name].name, Part((number,))
    if look.gradients:  # a step that computes them by itself, in a closure, has none yet the first time
        yield _GRADIENTS.name, Part(measures=look.gradients)


def _of_witness(one: WitnessedStep) -> Iterator[tuple[str, Part]]:
    place = f"batch {one.batch} of epoch {one.epoch}"
    if one.seen & ORDER and not one.seen & UNPLACED:  # else it is no order that another attempt has too
        yield _ORDER.name, Part((one.epoch, one.batch, one.order), words=place)
    elif one.seen & FIXED:
        yield _ORDER.name, Part((one.epoch, one.batch, one.content, one.shapes), words=place)
    if one.seen & CONTENT and one.seen & (ORDER | FIXED):
        yield _VALUES.name, Part((one.content, one.shapes))
    if one.seen & LOSS:
        yield _LOSS.name, Part(measures=(one.loss,), words=f"loss {one.loss:.6g}")
