"""The records that two runs of one job have logged: which differs first, on which ranks. Pure.

A record that is missing counts as one that differs: as of an evaluation that was never made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import attrs

from resilience_sdk.rank.rehearsal import RehearsedRank

METRIC, RECORD = "epoch metric", "record"
_NEAR = 1e-3
_OF_CLOCKS = ("time", "second", "speed", "throughput", "/s", "mem", "mfu", "tflops", "latency", "elapsed", "eta")
"""Parts of the names of what depends on the machine: another run has another one, or by chance the same."""
_OF_EPOCHS = ("eval", "val", "test", "epoch")

Records = Mapping[tuple[int, str], tuple[float, ...]]
"""The values under a step and a name, in their order."""


@attrs.frozen
class RecordDifference:
    """Where the records of two runs differ first."""

    component: str
    name: str
    step: int
    ranks: tuple[int, ...]
    words: str


def count(one: Sequence[RehearsedRank], other: Sequence[RehearsedRank]) -> int:
    """Return how many steps have records in both runs."""
    steps = [{step for step, _ in _of(trace)} for trace in other]
    before = {step for trace in one for step, _ in _of(trace)}
    return len(before & set().union(*steps)) if steps else 0


def compare(
    one: Sequence[RehearsedRank], other: Sequence[RehearsedRank], without: Collection[str] = ()
) -> RecordDifference | None:
    """Return which record of `other` differs first from the undisturbed run `one`, but for those names.

    `other` may begin later: what comes before its first record is not known.
    """
    theirs = {trace.rank: _of(trace) for trace in other}
    found: dict[tuple[int, str], list[int]] = {}
    for trace in one:
        before, now = _of(trace), theirs.get(trace.rank, {})
        begun = min((step for step, _ in now), default=None)
        if begun is None:
            continue
        for place in sorted(before.keys() | now.keys()):
            step, name = place
            # In the step that a run goes on behind, some records were written before.
            is_known = step > begun or (step == begun and place in before and place in now)
            if is_known and name not in without and not _are_near(before.get(place, ()), now.get(place, ())):
                found.setdefault(place, []).append(trace.rank)
    if not found:
        return None
    step, name = place = min(found)
    first = next(trace for trace in one if trace.rank == found[place][0])
    component = METRIC if any(part in name.lower() for part in _OF_EPOCHS) else RECORD
    words = _words(name, _of(first).get(place, ()), theirs[first.rank].get(place, ()))
    return RecordDifference(component, name, step, tuple(found[place]), words)


def varying(one: Sequence[RehearsedRank], again: Sequence[RehearsedRank]) -> list[str]:
    """Return the names of what two undisturbed runs do not repeat."""
    found: list[str] = []
    while (first := compare(one, again, found)) is not None:
        found.append(first.name)
    return found


def _of(trace: RehearsedRank) -> Records:
    found: dict[tuple[int, str], tuple[float, ...]] = {}
    for name, step, value in trace.records:
        if not any(part in name.lower() for part in _OF_CLOCKS):
            found[step, name] = (*found.get((step, name), ()), value)
    return found


def _are_near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(map(_is_near, one, other))


def _is_near(one: float, other: float) -> bool:
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) <= _NEAR * max(abs(one), abs(other))
    return repr(one) == repr(other)


def _words(name: str, before: Sequence[float], now: Sequence[float]) -> str:
    if not now:
        return f"{name} is not logged"
    if not before:
        return f"{name} is logged, and was not"
    if len(before) != len(now):
        return f"{name} is logged {len(now)} times instead of {len(before)}"
    was, is_now = next((x, y) for x, y in zip(before, now, strict=True) if not _is_near(x, y))
    return f"{name} {is_now:.6g} instead of {was:.6g}"
