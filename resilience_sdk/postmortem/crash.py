"""The crash of an attempt: from what it left behind to what is said and decided about it. Pure.

The launcher hands in the exits in the order it saw them and the traces of the ranks; out come the end of the
attempt for `restart_policy` and the crash incident for `incidents`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from resilience_sdk.attribution.exceptions import fingerprint, is_raised_by_program, is_users_frame
from resilience_sdk.attribution.exits import (
    EXCLUDE_NODE,
    PORT,
    Classification,
    classification,
    describe_exit,
    failed_resource,
)
from resilience_sdk.attribution.first_death import (
    ABORT_AT_EXIT,
    VAGUE,
    Death,
    FirstDeath,
    find_first_death,
    only_measured,
    weigh,
)
from resilience_sdk.attribution.taxonomy import lookup
from resilience_sdk.core.journal import Event
from resilience_sdk.goodput.memory import ranks_of
from resilience_sdk.hang.evidence import crash_frames
from resilience_sdk.incidents import CURE, Culprit, Evidence, Incident, step_words
from resilience_sdk.incidents.record import in_short, ranks_words
from resilience_sdk.postmortem.facts import (
    STOP,
    AttemptEnd,
    AttemptFacts,
    EndingRequest,
    KnownError,
    RankExit,
    RankTrace,
    ServerEnd,
)
from resilience_sdk.recorder.page_reader import RankSnapshot
from resilience_sdk.system import hostinfo

if TYPE_CHECKING:
    from resilience_sdk.attribution.diagnosis import LogFindings

_CURE_OF_ABORT = "call torch.distributed.destroy_process_group()"
_CURE_OF_PORT = (
    'end the process that holds the port, or use another port; with init_method="env://" and no --master-port, '
    "`resilience run` gives the ranks of one node a free port in each attempt"
)
_SURE_OF_ABORT = 0.9
_SURE_OF_SERVER = 0.9
_SURE_OF_WATCH = 0.9
_NO_ANSWER = "has not returned within"  # of a call of the driver: the probe may have been short of processor time
_SURE_OF_MEMORY = 0.8  # the counter is that of the whole job
_MOST_FRAMES = 50
_DIRECT_CAUSE = "\nThe above exception was the direct cause of the following exception:\n"
_MOST_ENDS = 16
_OF_MEMORY = ("host_oom_kill", "host_oom_alloc", "cuda_oom")
_SURELY_BEGUN_S = 60.0  # a script without a sign of progress may have been training after so long


def first_death(facts: AttemptFacts) -> FirstDeath:
    """Tell the culprits of the attempt from their victims, and what is to be done: nothing to a node by words alone.

    Words count as far as something measured says the same: the kernel, a look at the node, or what the watch of its
    health has seen while the job ran.
    """
    looked = (*(facts.look.found if facts.look is not None else ()), *_watched(facts))
    seen = facts.look.seen if facts.look is not None else ""
    found = _first_death(facts)
    raised = [trace.exception for rank in found.culprits if (trace := facts.traces.get(rank)) is not None]
    is_own = bool(raised) and all(one is not None and is_raised_by_program(one) for one in raised)
    return only_measured(found, looked, is_asked=_is_asked(facts), seen=seen, is_own=is_own)


def blames_by_words(facts: AttemptFacts) -> bool:
    """Tell whether the attempt would leave a node out for nothing but what a program says, so that a look is due."""
    known = _first_death(facts).classification
    return known.leaves_node_out and not known.measured and not _is_asked(facts) and not _watched(facts)


def looked(text: str) -> Evidence:
    """Return what a look at the node has found as evidence."""
    return Evidence("look", text)


def _is_asked(facts: AttemptFacts) -> bool:
    requests = [trace.request for trace in facts.traces.values() if trace.request is not None]
    return any(one.action == EXCLUDE_NODE for one in requests)


def _watched(facts: AttemptFacts) -> tuple[Classification, ...]:
    """Return what the watch has measured on this node in this attempt that leaves a node out."""
    found = []
    for event in facts.told_of(Event.HEALTH):
        cause, here = event.get("cause"), event.get("host") == hostinfo.host_name()
        timed_out = _NO_ANSWER in str(event.get("why"))
        if not here or timed_out or event.get("status") != "failed":
            continue
        if isinstance(cause, str) and lookup(cause).cause == cause:
            known = classification(
                cause, _SURE_OF_WATCH, looked(f"{event.get('what')}: {event.get('why')}"), measured=True
            )
            if known.leaves_node_out:
                found.append(known)
    return tuple(found)


def _first_death(facts: AttemptFacts) -> FirstDeath:
    """Tell the culprits of the attempt from their victims.

    An exception dates from when it was raised, not from when its process was gone: teardown can take longer
    than the peers need to notice.
    """
    if facts.lost_server is not None:
        return FirstDeath((), tuple(sorted(end.rank for end in facts.exits)), _server_killed(facts, facts.lost_server))
    deaths = []
    for end in facts.exits:
        trace = facts.traces.get(end.rank)
        at_ns = end.at_ns
        if trace is not None and trace.exception_ns is not None:
            at_ns = min(at_ns, trace.exception_ns)
        exception = trace.exception if trace is not None else None
        told = tuple(facts.told.get(end.rank, ()))
        told = tuple(known for known in told if not _contradicts(known, trace))
        page = trace.snapshot if trace is not None else None
        group_left = page.group_left if page is not None and page.exit_state == "clean" else None
        deaths.append(Death(end.rank, end.exit_code, exception, at_ns, facts.cgroup_oom, told, group_left))
    first = find_first_death(deaths, ending_ns=facts.ending_ns, node_told=facts.node_told)
    if facts.job_told is not None and _is_about(facts.job_told, first, facts):
        node_told = (*facts.node_told, facts.job_told.known)
        first = find_first_death(deaths, ending_ns=facts.ending_ns, node_told=node_told)
    return first


def _contradicts(known: Classification, trace: RankTrace | None) -> bool:
    """Tell whether a log speaks of the end of the interpreter where the rank had not come to it, or had failed before.

    A script that left with a code of its own has failed by that, whatever followed.
    """
    page = None if trace is None else trace.snapshot
    return known.cause == ABORT_AT_EXIT and page is not None and page.script_exit_code != 0


def _server_killed(facts: AttemptFacts, server: ServerEnd) -> Classification:
    how = f"the fork server (pid {server.pid}) {describe_exit(server.code)}"
    told = Evidence("exit", f"{how}, and the kernel ended the ranks that it had started; none of them had failed")
    known = weigh(classification("fork_server_lost", _SURE_OF_SERVER, told), facts.server_told)
    if server.code == -signal.SIGKILL and facts.cgroup_oom and known.cause == "fork_server_lost":
        memory = Evidence("cgroup", "the job's control group counted a kill for memory")
        return classification("host_oom_kill", _SURE_OF_MEMORY, told, memory)
    return known


def _is_about(told: LogFindings, first: FirstDeath, facts: AttemptFacts) -> bool:
    """Tell whether the log of all ranks may say why the culprits died: not where that is known, nor of others."""
    known = first.classification
    if any(_contradicts(told.known, facts.traces.get(rank)) for rank in first.culprits):
        return False
    is_open = known.confidence <= VAGUE or known.cause in lookup(told.known.cause).explains
    return is_open and (not told.ranks or not told.ranks.isdisjoint(first.culprits))


def attempt_end(facts: AttemptFacts, first: FirstDeath) -> AttemptEnd:
    """Return what `restart_policy.decide` needs to know about the attempt."""
    snapshots = [trace.snapshot for trace in facts.traces.values()]
    known = first.classification
    resource = failed_resource(known.cause, (item.text for item in known.evidence))
    # The next attempt has another one: nothing is to be waited for, and no rank is at fault.
    is_our_port = resource is not None and resource.kind == PORT and resource.name == str(facts.own_port)
    return AttemptEnd(
        attempt=facts.attempt,
        ended_by=facts.ended_by,
        exit_codes={end.rank: end.exit_code for end in facts.exits if end.exit_code is not None},
        error=_known_error(facts, first),
        category=known.category,
        cause=known.cause,
        action=known.action,
        confidence=known.confidence,
        completed_a_step=completed_a_step(snapshots, facts.lasted_s),
        checkpoint_before=facts.checkpoint_before,
        checkpoint_after=facts.checkpoint_after,
        stop_agreed=facts.stop_agreed,
        free=facts.lost_server is not None or is_our_port,
        aborted=tuple(sorted(end.rank for end in facts.exits if end.aborted_at_exit)),
        all_done=bool(snapshots) and all(page is not None and page.done for page in snapshots),
        resource=None if is_our_port else resource,
        requested=_requested(facts, first),
        reached=_reached(page for page in snapshots if page is not None),
        lines=users_lines(_culprit(rank, facts) for rank in first.culprits),
    )


def users_lines(culprits: Iterable[Culprit]) -> tuple[str, ...]:
    """Return the program's innermost line of each of these ranks, each once."""
    found = (next(filter(is_users_frame, culprit.stack), None) for culprit in culprits)
    return tuple(sorted({line for line in found if line is not None}))


def _reached(pages: Iterable[RankSnapshot]) -> int | None:
    """Return how many steps the rank with the fewest has completed: of the training, or of this attempt.

    Where collectives stand in for steps they are sampled: how many were seen is not the same in two equal attempts.
    """
    counted = [page for page in pages if page.beats and page.beat_source != "collectives"]
    done = [page.beats if page.completed_steps is None else page.completed_steps for page in counted]
    return min(done, default=None)


def _requested(facts: AttemptFacts, first: FirstDeath) -> EndingRequest | None:
    """Return what a rank wants done, a culprit before a victim, and an end of the job before one of its node alone."""
    made = {rank: trace.request for rank, trace in facts.traces.items() if trace.request is not None}
    of_culprits = [made[rank] for rank in first.culprits if rank in made]
    return min(of_culprits or made.values(), key=lambda one: one.action != STOP, default=None)


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


def crash_incident(facts: AttemptFacts, first: FirstDeath, detected_at: float, latency_s: float | None) -> Incident:
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
        evidence=(
            *known.evidence,
            *_port_evidence(facts, first),
            *_memory_evidence(facts, first),
            *_chain_evidence(facts, first),
            *_order_evidence(facts, first),
        ),
    )


def _memory_evidence(facts: AttemptFacts, first: FirstDeath) -> Iterator[Evidence]:
    """Yield how much memory the culprits had where that is what they died of, as their node said last."""
    if first.classification.cause not in _OF_MEMORY:
        return
    newest = {one.rank: one for event in facts.told_of(Event.MEMORY) for one in ranks_of(event)}
    for rank in first.culprits[:_MOST_ENDS]:
        if rank in newest and (words := newest[rank].words()):
            grows = newest[rank].growth_words()
            yield Evidence("memory", f"rank {rank} had {words}" + (f"; {grows}" if grows else ""))


def aborted_incident(facts: AttemptFacts, at: float) -> Incident | None:
    """Return the incident of ranks that were aborted when their scripts had ended; None where there are none."""
    aborted = sorted((end for end in facts.exits if end.aborted_at_exit), key=lambda end: end.rank)
    if not aborted:
        return None
    pages = [trace.snapshot for end in aborted if (trace := facts.traces.get(end.rank)) is not None]
    left = all(page is not None and page.group_left for page in pages)
    told = [
        Evidence("exit", f"rank {end.rank} died by SIGABRT after its script had ended with code {end.exit_code}")
        for end in aborted[:_MOST_ENDS]
    ]
    if left:
        told.append(Evidence("page", "torch's process group was still there when the script had ended"))
        told.append(Evidence(CURE, f"{_CURE_OF_ABORT} at the end of the script"))
    known = classification(ABORT_AT_EXIT, _SURE_OF_ABORT if left else VAGUE)
    return Incident(
        kind="crash",
        attempt=facts.attempt,
        detected_at=at,
        culprits=tuple(_culprit(end.rank, facts) for end in aborted),
        category=known.category,
        cause=known.cause,
        action="none",
        confidence=known.confidence,
        evidence=tuple(told),
        lost_steps=0,
    )


def aborted_words(facts: AttemptFacts) -> str:
    """Say for the screen what became of those ranks, and what to do."""
    ranks = ranks_words(end.rank for end in facts.exits if end.aborted_at_exit)
    who = f"{ranks}, whose scripts were" if ranks.startswith("ranks") else f"{ranks}, whose script was"
    return (
        f"{who} done, died by SIGABRT while Python shut down (torch's own thread does that); nothing is lost: "
        f"{_CURE_OF_ABORT} at the end of the script"
    )


def first_traceback(facts: AttemptFacts, first: FirstDeath) -> str | None:
    """Return the traceback of the first rank to fail, where what others printed after it hides it from view.

    Ranks that raised the same have printed the same: then it stands there already.
    """
    raised = {rank for rank, trace in facts.traces.items() if trace.exception}
    if not first.culprits or raised <= set(first.culprits) or first.culprits[0] not in raised:
        return None
    text = (facts.traces[first.culprits[0]].exception or {}).get("traceback")
    if not isinstance(text, str) or not text:
        return None
    return f"the first to fail was rank {first.culprits[0]}:\n{text.rstrip()}"


def headline(facts: AttemptFacts, first: FirstDeath) -> str:
    """Say in one line what ended the attempt: which rank, how, and in which step."""
    ends = {end.rank: end for end in facts.exits}
    if facts.lost_server is not None:
        how = describe_exit(facts.lost_server.code)
        return f"the launcher's fork server on {facts.node} {how}, and the ranks were ended with it; no rank had failed"
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


def _known_error(facts: AttemptFacts, first: FirstDeath) -> KnownError | None:
    for rank in first.culprits:
        trace = facts.traces.get(rank)
        if trace is not None and trace.exception:
            found = fingerprint(trace.exception)
            page = trace.snapshot
            step = page.step if page is not None and page.step_is_global else None
            return KnownError(found.type, found.message, found.user_frame, step)
    return None


def _culprit(rank: int, facts: AttemptFacts) -> Culprit:
    trace = facts.traces.get(rank)
    page = trace.snapshot if trace is not None else None
    exception: Mapping[str, Any] = (trace.exception if trace is not None else None) or {}
    frames = exception.get("frames")
    stack = tuple(str(frame) for frame in frames[:_MOST_FRAMES]) if isinstance(frames, list) else ()
    if not stack and trace is not None and trace.stacks:  # written by the handler of the signal that it died of
        stack = crash_frames(trace.stacks)[:_MOST_FRAMES]
    section = None if page is None else page.main_lane.section
    node = next((peer.name for peer in facts.peers if rank in peer.ranks), facts.node)
    step, is_global = (None, None) if page is None else (page.step, page.step_is_global)
    return Culprit(rank, node, step, section, stack, is_global)


def _chain_evidence(facts: AttemptFacts, first: FirstDeath) -> list[Evidence]:
    """Return what the exception of the first rank was raised from: mostly the fact that the program puts in its words.

    Only what `raise ... from` names. An exception that came up while another was handled says nothing of its cause.
    """
    trace = facts.traces.get(first.culprits[0]) if first.culprits else None
    text = (trace.exception or {}).get("traceback") if trace is not None else None
    root = _root_of_chain(text) if isinstance(text, str) else None
    return [] if root is None else [Evidence("chain", f"raised from {in_short(root)}")]


def _port_evidence(facts: AttemptFacts, first: FirstDeath) -> list[Evidence]:
    """Return who held the port that the first rank could not have, as that rank saw it, and what to do."""
    trace = facts.traces.get(first.culprits[0]) if first.culprits else None
    holder = _port_holder(trace.exception or {}) if trace is not None else ""
    return [Evidence("proc", holder), Evidence(CURE, _CURE_OF_PORT)] if holder else []


def _port_holder(exception: Mapping[str, Any]) -> str:
    holder = exception.get("port_holder")
    return in_short(holder) if isinstance(holder, str) else ""


def _root_of_chain(text: str) -> str | None:
    """Return the first exception of a traceback that tells a chain: what follows the frames of its first block."""
    block, led_to, _ = text.partition(_DIRECT_CAUSE)
    lines = block.splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    if not led_to or not frames:
        return None
    return next((line for line in lines[frames[-1] + 1 :] if line and not line[0].isspace()), None)


def _order_evidence(facts: AttemptFacts, first: FirstDeath) -> list[Evidence]:
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
    inside = "" if page.main_lane.section is None else f", in section {page.main_lane.section!r}"
    return f" at {step_words(page.step, page.step_is_global)}{inside}"


def _quoted(exception: Mapping[str, Any]) -> str:
    message = in_short(str(exception.get("message", "")))
    place = exception.get("user_frame")
    at = f" at {place}" if isinstance(place, str) else ""
    kind = exception.get("type", "an exception")
    holder = f" ({known})" if (known := _port_holder(exception)) else ""
    return f"{kind}: {message}{at}{holder}" if message else f"{kind}{at}{holder}"
