"""The awkward moments of a training, as an undisturbed run shows them: where a kill strikes in the middle of something.

Pure. A moment that the short run does not reach is told with the reason, and not rehearsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import attrs

from resilience_sdk.rank.rehearsal import RehearsedRank

IN_WINDOW, IN_EVALUATION, AT_EPOCH_END = "kill-in-window", "kill-in-eval", "kill-at-epoch-end"
IN_SAVE, TWICE = "kill-in-save", "kill-twice"
OF_THE_RUN = (IN_WINDOW, IN_EVALUATION, AT_EPOCH_END)
"""Those that an undisturbed run has to come to."""
KINDS = (*OF_THE_RUN, IN_SAVE, TWICE)

_NONE: Mapping[str, str] = {
    IN_WINDOW: "gradients are added up over no several batches: each step that is seen has one pass, and a step of the "
    "optimizer",
    IN_EVALUATION: "no evaluation is seen: the run does not come to one, or no `section('eval')` shows it",
    AT_EPOCH_END: "no epoch comes to its end before the last step; let it take more steps than an epoch has",
}


@attrs.frozen
class KillMoment:
    """A step by its number as the loop counts it, the rank that is struck, and a section if it is in one."""

    step: int
    rank: int
    section: str | None = None


@attrs.frozen
class KillMoments:
    """Those of an undisturbed run, each kind in the order of the steps."""

    in_window: tuple[KillMoment, ...] = ()
    in_evaluation: tuple[KillMoment, ...] = ()
    at_epoch_end: tuple[KillMoment, ...] = ()


def find(traces: Sequence[RehearsedRank]) -> KillMoments:
    """Return the moments that all ranks, or one of them, come to."""
    if not traces:
        return KillMoments()
    last = max(traces, key=lambda trace: trace.rank)
    evaluated = next((one for one in sorted(traces, key=lambda one: -one.rank) if one.evaluations), last)
    return KillMoments(
        tuple(_windows(last)),
        tuple(KillMoment(step, evaluated.rank, name) for name, step in evaluated.evaluations if step >= 0),
        tuple(KillMoment(step, last.rank) for step in _epoch_ends(last)),
    )


def choose(kind: str, moments: KillMoments, numbers: Sequence[int], wanted: int) -> KillMoment | str:
    """Return the moment of this kind that is nearest to the step `wanted`, or why there is none.

    `numbers`: those of all steps but the last, behind which nothing could be struck any more.
    """
    of_kind = {
        IN_WINDOW: moments.in_window,
        IN_EVALUATION: moments.in_evaluation,
        AT_EPOCH_END: moments.at_epoch_end,
    }
    found = [one for one in of_kind[kind] if one.step in numbers[:-1]]
    if not found:
        return _NONE[kind]
    return min(found, key=lambda one: (one.step < wanted, abs(one.step - wanted)))


def _windows(trace: RehearsedRank) -> Iterable[KillMoment]:
    """Return the steps at whose beginning gradients of the step before are waiting, or in which they are added up."""
    if trace.progress != "heartbeats":
        return
    numbers = [number for number, _ in trace.steps]
    stepped = {look.at for look in trace.looks}
    for before, number in pairwise(numbers):
        if stepped and before not in stepped:
            yield KillMoment(number, trace.rank)
        elif trace.inner is not None:
            yield KillMoment(number, trace.rank, trace.inner)


def _epoch_ends(trace: RehearsedRank) -> Iterable[int]:
    if trace.witnessed:
        return [one.step for one, following in pairwise(trace.witnessed) if one.epoch != following.epoch]
    ends = [(one, following) for one, following in pairwise(trace.looks) if one.passes != following.passes]
    # Seen from an optimizer, a step is counted behind it, and so behind its look.
    steps = [following.at if trace.progress == "optimizer" else one.at for one, following in ends]
    return [step for step in steps if step is not None]
