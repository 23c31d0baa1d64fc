"""From what an attempt left behind to what is said and decided about it. Pure.

The launcher hands in the exits in the order it saw them and the traces of the ranks; out come the end of the
attempt for `decision` and the crash incident for `incidents`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.corroboration import VAGUE
from resilience_sdk.attribution.exits import Classification, describe_exit
from resilience_sdk.attribution.fingerprint import fingerprint
from resilience_sdk.attribution.first_death import Death, FirstDeath, find_first_death
from resilience_sdk.attribution.log_tail import LogFindings
from resilience_sdk.attribution.resource import failed_resource
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.hang.stacks import main_frames, parse_faulthandler
from resilience_sdk.incidents import Culprit, Evidence, Incident, step_words
from resilience_sdk.incidents.report import in_short
from resilience_sdk.launcher.attempt_files import RankTrace
from resilience_sdk.launcher.decision import AttemptEnd, EndedBy, KnownError
from resilience_sdk.launcher.peers import Peer
from resilience_sdk.launcher.ranks import RankExit
from resilience_sdk.rank_page import RankSnapshot

_MOST_FRAMES = 50
_MOST_ENDS = 16
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
    began_at: float = 0.0  # Unix seconds of this host: a requeued job has the attempt numbers of the one before
    events: Callable[[], Sequence[Mapping[str, Any]]] = tuple  # what all of its processes have journalled so far
    told: Mapping[int, Sequence[Classification]] = attrs.field(factory=dict)  # by rank: its log, the kernel
    node_told: Sequence[Classification] = ()  # what the kernel says of no process
    job_told: LogFindings | None = None  # the log that all ranks write into


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
        told = tuple(facts.told.get(end.rank, ()))
        deaths.append(Death(end.rank, end.exit_code, exception, at_ns, facts.cgroup_oom, told))
    first = find_first_death(deaths, ending_ns=facts.ending_ns, node_told=facts.node_told)
    if facts.job_told is not None and _is_about(facts.job_told, first):
        node_told = (*facts.node_told, facts.job_told.known)
        first = find_first_death(deaths, ending_ns=facts.ending_ns, node_told=node_told)
    return first


def _is_about(told: LogFindings, first: FirstDeath) -> bool:
    """Tell whether the log of all ranks may say why the culprits died: not where that is known, nor of others."""
    known = first.classification
    is_open = known.confidence <= VAGUE or known.cause in lookup(told.known.cause).explains
    return is_open and (not told.ranks or not told.ranks.isdisjoint(first.culprits))


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
        resource=failed_resource(known.cause, (item.text for item in known.evidence)),
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
        evidence=(*known.evidence, *_order_evidence(facts, first)),
    )


def first_traceback(facts: Facts, first: FirstDeath) -> str | None:
    """Return the traceback of the first rank to fail, where what others printed after it hides it from view."""
    raised = [rank for rank, trace in facts.traces.items() if trace.exception]
    if not first.culprits or len(raised) < 2 or first.culprits[0] not in raised:
        return None
    text = (facts.traces[first.culprits[0]].exception or {}).get("traceback")
    if not isinstance(text, str) or not text:
        return None
    return f"the first to fail was rank {first.culprits[0]}:\n{text.rstrip()}"


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
    if not stack and trace is not None and trace.stacks:  # written by the handler of the signal that it died of
        stack = main_frames(parse_faulthandler(trace.stacks))[:_MOST_FRAMES]
    open_sections = page.main_lane.stack if page is not None else ()
    section = open_sections[-1].name if open_sections else None
    node = next((peer.name for peer in facts.peers if rank in peer.ranks), facts.node)
    step, is_global = (None, None) if page is None else (page.step, page.step_is_global)
    return Culprit(rank, node, step, section, stack, is_global)


def _order_evidence(facts: Facts, first: FirstDeath) -> list[Evidence]:
    """Return what of the order the classification has not told, in one account with it.

    Processes are not gone in the order in which they failed: one that raised first may take longest to end.
    """
    told = []
    others = [end for end in facts.exits if end.rank not in first.culprits]
    ends = ", ".join(map(_told_exit, others[:_MOST_ENDS])) + (", ..." if len(others) > _MOST_ENDS else "")
    if others and not first.culprits and len(others) > 1:
        told.append(Evidence("order", f"seen in this order: {ends}"))
    elif others and first.culprits:
        was_early = facts.exits[0].rank not in first.culprits
        late = " (some of these were gone before it: its process took longer to end)" if was_early else ""
        told.append(Evidence("order", f"the others after it: {ends}{late}"))
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
    return f" at {step_words(page.step, page.step_is_global)}{inside}"


def _quoted(exception: Mapping[str, Any]) -> str:
    message = in_short(str(exception.get("message", "")))
    place = exception.get("user_frame")
    at = f" at {place}" if isinstance(place, str) else ""
    kind = exception.get("type", "an exception")
    return f"{kind}: {message}{at}" if message else f"{kind}{at}"
