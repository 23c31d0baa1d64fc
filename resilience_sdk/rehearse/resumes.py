"""The resumes of a rehearsed job: which save each attempt went on from, as its weights show, and what was in it. Pure.

A loop that begins its epoch anew runs as many steps as one that loaded nothing: only the weights before its first step
tell one from the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rehearse.plan import Baseline, JobFacts

SLACK_STEPS = 2
"""Ranks are not at one place when one of them is struck, and loading a state may step an optimizer."""


@attrs.frozen
class Resume:
    """What the last attempt of a job went on from."""

    after: int | None = None
    """After how many steps of the training; 0: from its start. None: its weights are of no save and no step."""
    more: int = 0
    """How many steps more it ran than were left from there; more than a few: it has lost its place in the epoch."""
    saved: frozenset[str] = frozenset()
    """The kinds of states that were in the saves before it."""
    loaded: frozenset[str] = frozenset()
    """Those that it has loaded before its first step."""


def last_resume(baseline: Baseline, facts: JobFacts) -> Resume:
    """Return what is known of the last attempt; of a job that was never started again, nothing."""
    attempts = [_by_rank(traces) for start in facts.traces for traces in _attempts(start)]
    if len(attempts) < 2:
        return Resume()
    last = attempts[-1]
    ran = min((len(trace.steps) for trace in last), default=0)
    began: list[int | None] = [0]
    for number in range(1, len(attempts)):
        is_last = number + 1 == len(attempts)
        likely = baseline.steps - ran if is_last else baseline.steps
        began.append(_origin(attempts[:number], began, attempts[number], baseline.progress, likely))
    after = began[-1]
    if after == 0 and (loaded := _loaded_behind_a_step(attempts[:-1], began, last)):
        after, ran = loaded, ran - 1
    before = [save for traces in attempts[:-1] for trace in traces for save in trace.saved]
    return Resume(
        after,
        0 if after is None else max(0, ran - (baseline.steps - after)),
        frozenset(kind for save in before for kind in save.kinds),
        frozenset(kind for trace in last for kind in trace.loaded),
    )


def _attempts(start: Sequence[RehearsedRank]) -> Iterator[list[RehearsedRank]]:
    for attempt in sorted({trace.attempt for trace in start}):
        yield [trace for trace in start if trace.attempt == attempt]


def _by_rank(traces: Sequence[RehearsedRank]) -> list[RehearsedRank]:
    return sorted(traces, key=lambda trace: trace.rank)


def _origin(
    earlier: Sequence[Sequence[RehearsedRank]],
    began: Sequence[int | None],
    now: Sequence[RehearsedRank],
    progress: str | None,
    likely: int,
) -> int | None:
    """Return after how many steps of the training the weights were that an attempt began with.

    Where they were the same after several (in a window of accumulation, at a rate of 0): that nearest to `likely`.
    """
    first = {trace.rank: trace.looks[0].weights for trace in now if trace.looks and trace.looks[0].weights}
    for place in reversed(range(len(earlier))):
        origin = began[place]
        if origin is None:
            continue
        found = [
            origin + after
            for trace in earlier[place]
            if trace.rank in first
            for after, weights in _states(trace, progress)
            if weights == first[trace.rank]
        ]
        if found:
            return min(found, key=lambda after: abs(after - likely))
    return None


def _loaded_behind_a_step(
    earlier: Sequence[Sequence[RehearsedRank]], began: Sequence[int | None], now: Sequence[RehearsedRank]
) -> int:
    """Return the save that was loaded behind one step of the optimizer, which makes its state; 0: there is none."""
    second = {trace.rank: trace.looks[1].weights for trace in now if len(trace.looks) > 1 and trace.looks[1].weights}
    return max(
        (
            origin + save.after
            for origin, traces in zip(began, earlier, strict=False)
            if origin is not None
            for trace in traces
            for save in trace.saved
            if second.get(trace.rank) in save.weights and origin + save.after > 1
        ),
        default=0,
    )


def _states(trace: RehearsedRank, progress: str | None) -> Iterator[tuple[int, tuple[float, ...]]]:
    """Return each state of the weights that was seen, with the number of steps that were done."""
    for save in trace.saved:
        for weights in save.weights:
            yield save.after, weights
    done = {number: place for place, (number, _) in enumerate(trace.steps)}
    for look in trace.looks:
        at = done.get(-1 if look.at is None else look.at)
        # Seen from an optimizer, a step is counted behind it.
        yield (0 if at is None else at + 1) if progress == "optimizer" else at or 0, look.weights
