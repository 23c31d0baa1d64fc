"""From what an attempt left behind to what is said and decided about it. Pure.

The launcher hands in the exits in the order it saw them and the traces of the ranks; out come the end of the
attempt for `decision` and the crash incident for `incidents`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.exits import describe_exit
from resilience_sdk.attribution.fingerprint import fingerprint
from resilience_sdk.attribution.first_death import Death, FirstDeath, find_first_death
from resilience_sdk.incidents import Culprit, Evidence, Incident
from resilience_sdk.launcher.attempt_files import RankTrace
from resilience_sdk.launcher.decision import AttemptEnd, EndedBy, KnownError
from resilience_sdk.launcher.peers import Peer
from resilience_sdk.launcher.ranks import RankExit
from resilience_sdk.rank_page import RankSnapshot

_MOST_FRAMES = 50
_SURELY_BEGUN_S = 60.0  # a script without a sign of progress may have been training after so long


@attrs.frozen
class Facts:
    """Everything that is known when an attempt is over. `ending_ns`: when we began to end it, monotonic."""

    attempt: int
    node: str
    exits: Sequence[RankExit]
    traces: Mapping[int, RankTrace]
    ended_by: EndedBy
    ending_ns: int | None = None
    unkillable: Sequence[int] = ()
    cgroup_oom: bool | None = None
    checkpoint_before: int | None = None
    checkpoint_after: int | None = None
    stop_agreed: bool = False
    node_number: int = 0
    nodes: int = 1
    peers: Sequence[Peer] = ()  # all nodes by number, where there are several
    store_host: str = ""  # where the store of the rendezvous is
    lasted_s: float | None = None  # from the start of the ranks; None: they cannot give signs of progress


def first_death(facts: Facts) -> FirstDeath:
    """Tell the culprits of the attempt from their victims.

    An exception dates from when it was raised, not from when its process was gone: teardown can take longer
    than the peers need to notice.
    """
    deaths = []
    for end in facts.exits:
        trace = facts.traces.get(end.rank)
        at_ns = end.at_ns
        if trace is not None and trace.exception_ns is not None:
            at_ns = min(at_ns, trace.exception_ns)
        exception = trace.exception if trace is not None else None
        deaths.append(Death(end.rank, end.exit_code, exception, at_ns, facts.cgroup_oom))
    return find_first_death(deaths, ending_ns=facts.ending_ns)


def attempt_end(facts: Facts, first: FirstDeath) -> AttemptEnd:
    """Return what `decision.decide` needs to know about the attempt."""
    snapshots = [trace.snapshot for trace in facts.traces.values()]
    known = first.classification
    return AttemptEnd(
        attempt=facts.attempt,
        ended_by=facts.ended_by,
        exit_codes={end.rank: end.exit_code for end in facts.exits},
        error=_known_error(facts, first),
        category=known.category,
        cause=known.cause,
        action=known.action,
        confidence=known.confidence,
        completed_a_step=completed_a_step(snapshots, facts.lasted_s),
        checkpoint_before=facts.checkpoint_before,
        checkpoint_after=facts.checkpoint_after,
        stop_agreed=facts.stop_agreed,
        all_done=bool(snapshots) and all(page is not None and page.done for page in snapshots),
    )


def completed_a_step(snapshots: Sequence[RankSnapshot | None], lasted_s: float | None) -> bool | None:
    """Tell whether any rank completed a step; None when that cannot be told.

    A rank that dies at its start has given no sign of progress yet, whether it was going to or not, so silence
    is told from a script that never gives one by how long the attempt lasted (seconds, None where nobody looked).
    """
    pages = [page for page in snapshots if page is not None]
    if any(page.beats > 0 for page in pages):
        return True
    beats_expected = [page for page in pages if page.declared or page.beat_source != "none"]
    if beats_expected:
        return False
    return None if lasted_s is None or lasted_s > _SURELY_BEGUN_S else False


def crash_incident(facts: Facts, first: FirstDeath, detected_at: float, latency_s: float | None) -> Incident:
    """Return the incident of a crash. `detected_at` is Unix time in seconds."""
    known = first.classification
    culprits = tuple(_culprit(rank, facts) for rank in first.culprits)
    return Incident(
        kind="crash",
        attempt=facts.attempt,
        detected_at=detected_at,
        detection_latency_s=latency_s,
        culprits=culprits,
        victims=tuple(first.victims),
        category=known.category,
        cause=known.cause,
        action=known.action,
        confidence=known.confidence,
        evidence=(*known.evidence, *_order_evidence(facts)),
    )


def headline(facts: Facts, first: FirstDeath) -> str:
    """Say in one line what ended the attempt: which rank, how, and in which step."""
    ends = {end.rank: end for end in facts.exits}
    if not first.culprits:
        codes = ", ".join(f"rank {end.rank} {describe_exit(end.exit_code)}" for end in list(facts.exits)[:4])
        return codes or "no rank is left"
    rank = first.culprits[0]
    trace = facts.traces.get(rank)
    told = describe_exit(ends[rank].exit_code) if rank in ends else "died"
    if trace is not None and trace.exception:
        told = f"raised {_quoted(trace.exception)}"
    others = len(first.culprits) - 1
    more = f" (and {others} other rank{'s' * (others > 1)} the same)" if others else ""
    where = _where(trace.snapshot if trace is not None else None)
    return f"rank {rank} on {facts.node} {told}{where}{more}"


def asked(notice: Mapping[str, Any]) -> str:
    """Say who asked the job to leave, and why, from the event of the notice."""
    told = str(notice.get("source"))
    if notice.get("reason"):
        told += f": {notice['reason']}"
    return told + (f" (asked by {notice['by']})" if notice.get("by") else "")


def _known_error(facts: Facts, first: FirstDeath) -> KnownError | None:
    for rank in first.culprits:
        trace = facts.traces.get(rank)
        if trace is not None and trace.exception:
            found = fingerprint(trace.exception)
            page = trace.snapshot
            step = page.step if page is not None and page.step_is_global else None
            return KnownError(found.type, found.message, found.user_frame, step)
    return None


def _culprit(rank: int, facts: Facts) -> Culprit:
    trace = facts.traces.get(rank)
    page = trace.snapshot if trace is not None else None
    exception: Mapping[str, Any] = (trace.exception if trace is not None else None) or {}
    frames = exception.get("frames")
    stack = tuple(str(frame) for frame in frames[:_MOST_FRAMES]) if isinstance(frames, list) else ()
    open_sections = page.main_lane.stack if page is not None else ()
    section = open_sections[-1].name if open_sections else None
    node = next((peer.name for peer in facts.peers if rank in peer.ranks), facts.node)
    return Culprit(rank, node, page.step if page is not None else None, section, stack)


def _order_evidence(facts: Facts) -> list[Evidence]:
    told = []
    if len(facts.exits) > 1:
        order = ", ".join(map(_told_exit, list(facts.exits)[:16]))
        told.append(Evidence("order", f"seen in this order: {order}"))
    if facts.unkillable:
        pids = ", ".join(map(str, facts.unkillable))
        text = f"processes {pids} outlived SIGKILL: they sit in the kernel (driver or storage)"
        told.append(Evidence("proc", text))
    return told


def _told_exit(end: RankExit) -> str:
    by_us = " (ended by the launcher)" if end.ended_by_us else ""
    return f"rank {end.rank} {describe_exit(end.exit_code)}{by_us}"


def _where(page: RankSnapshot | None) -> str:
    if page is None or page.step is None:
        return ""
    sections = page.main_lane.stack
    inside = f", in section {sections[-1].name!r}" if sections and sections[-1].kind != "heartbeat" else ""
    step = f"step {page.step}" if page.step_is_global else f"step {page.step} of this attempt"
    return f" at {step}{inside}"


def _quoted(exception: Mapping[str, Any]) -> str:
    message = str(exception.get("message", "")).splitlines()
    first_line = message[0][:200] if message else ""
    place = exception.get("user_frame")
    at = f" at {place}" if isinstance(place, str) else ""
    kind = exception.get("type", "an exception")
    return f"{kind}: {first_line}{at}" if first_line else f"{kind}{at}"
