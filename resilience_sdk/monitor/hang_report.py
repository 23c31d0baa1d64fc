"""The incident of a confirmed hang, and the lines that a person reads about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from resilience_sdk.attribution.exceptions import is_our_frame, is_users_frame
from resilience_sdk.hang.culprit import CulpritFinding
from resilience_sdk.hang.detect import Judgement, LateRank
from resilience_sdk.hang.notices import wait_words
from resilience_sdk.hang.saves import STALL
from resilience_sdk.hang.timers import RankState
from resilience_sdk.incidents import Culprit, Evidence, Incident

SILENT_NODE = "network_node_unreachable"  # not a rank that stands still: its whole node is not heard
_DOES = {
    "hang_rank_stopped": "is stopped",
    "hang_rank_spinning": "makes no progress",
    "hang_rank_late": "is busy for too long",
    STALL: "stands in a save",
}
_NEXT = {
    "restart": "  next: the ranks are restarted",
    "kill": "  next: the stuck ranks are ended, so that the launcher's restart policy acts",
    "report": "  next: nothing is done to it; `resilience run --on-hang restart` would start the ranks again, "
    "RESILIENCE_ON_HANG=kill would end them for another launcher to do so",
}


def hang_incident(
    judgement: Judgement,
    finding: CulpritFinding,
    states: Sequence[RankState],
    frames: Mapping[int, Sequence[str]],
    facts: Iterable[Evidence],
    *,
    attempt: int | None,
    on_hang: str,
    now_ns: int,
    now: float,
) -> Incident:
    """Return the incident. `now_ns` is the monotonic clock of this host, `now` is Unix time in seconds."""
    by_rank = {state.rank: state for state in states}
    blamed = [by_rank[rank] for rank in finding.culprits or judgement.waited_for if rank in by_rank]
    late = {suspect.rank: suspect for suspect in judgement.suspects}
    stuck_s = [s for state in blamed if (s := _stuck_s(state, late.get(state.rank), now_ns)) is not None]
    if blamed and not stuck_s:  # of a silent node nothing is known: those who wait for it tell
        stuck_s = [suspect.elapsed_s for suspect in judgement.suspects]
    return Incident(
        attempt=attempt,
        detected_at=now,
        detection_latency_s=max(stuck_s, default=None),
        culprits=tuple(_culprit(by_rank.get(rank), rank, frames) for rank in finding.culprits),
        victims=finding.victims,
        category=finding.category,
        cause=finding.cause,
        action="restart" if on_hang != "report" else "none",
        confidence=finding.confidence,
        evidence=(
            *finding.evidence,
            *_waits(blamed, now),
            *_rule(judgement),
            *map(_suspect_evidence, judgement.suspects),
            *facts,
        ),
    )


def _waits(blamed: Sequence[RankState], now: float) -> Iterable[Evidence]:
    """Yield until when ranks wait, or waited, whose waits end by themselves."""
    for state in blamed:
        words = wait_words(state.activity, now) if state.activity is not None else None
        if words is not None:
            yield Evidence("wait", f"rank {state.rank}: {words}")


def _rule(judgement: Judgement) -> tuple[Evidence, ...]:
    """Return by which rule the job is called hung."""
    if judgement.due is None:
        return (Evidence("rule", judgement.detail),)
    return (Evidence("rule", f"called hung by {'the setting ' if judgement.due.is_set else ''}{judgement.due.rule}"),)


def hang_lines(incident: Incident, on_hang: str, run_dir: str) -> list[str]:
    """Return what a person is told when a hang is confirmed: who, where, why, and what happens next."""
    if incident.cause == SILENT_NODE:
        lines = [f"HANG: {headline(incident)}"]
    elif incident.culprits:
        lines = []
        for culprit in incident.culprits:
            lines.append(f"HANG: {who(culprit, incident.cause)} ({incident.cause})")
            lines += [f"  at {frame}" for frame in shown_frames(culprit.stack)]
    else:
        lines = [f"HANG: no single rank is to blame ({incident.category}: {incident.cause})"]
    if incident.victims:
        lines.append(f"  waiting for it: {len(incident.victims)} rank(s), {_some(incident.victims)}")
    first = 1 if incident.cause == SILENT_NODE else 0
    reasons = [evidence for evidence in incident.evidence[first:2] if evidence.source not in ("rule", "storage")]
    lines += [f"  why: {evidence.text}" for evidence in reasons]
    lines += [f"  storage: {evidence.text}" for evidence in incident.evidence if evidence.source == "storage"][:1]
    lines += [f"  rule: {evidence.text}" for evidence in incident.evidence if evidence.source == "rule"]
    if incident.id is not None:
        lines.append(f"  report: {run_dir}/incidents/{incident.id}/report.md")
    lines.append(_NEXT[on_hang])
    return lines


def headline(incident: Incident) -> str:
    """Say in a few words who hangs, for the screens of other nodes."""
    if incident.cause == SILENT_NODE and incident.evidence:
        return f"{incident.evidence[0].text} ({incident.cause})"
    if not incident.culprits:
        return f"no single rank is to blame ({incident.category}: {incident.cause})"
    return "; ".join(who(culprit, incident.cause) for culprit in incident.culprits[:4]) + f" ({incident.cause})"


def shown_frames(stack: Sequence[str]) -> list[str]:
    """Return the few frames that a person wants: innermost first, ours left out, a line of the user's among them."""
    frames = [frame for frame in stack if not is_our_frame(frame)] or list(stack)
    shown = frames[:3]
    if any(map(is_users_frame, shown)):
        return shown
    return frames[:2] + list(filter(is_users_frame, frames))[:1] or shown


def who(culprit: Culprit, cause: str | None) -> str:
    """Say what which rank does, and where."""
    where = f" in section '{culprit.section}'" if culprit.section else " outside of any section"
    step = f" at {culprit.told_step}" if culprit.told_step else ""
    return f"rank {culprit.rank} on {culprit.node} {_DOES.get(cause or '', 'stands still')}{step}{where}"


def _culprit(state: RankState | None, rank: int, frames: Mapping[int, Sequence[str]]) -> Culprit:
    if state is None:
        return Culprit(rank=rank, node=None, step=None, section=None, stack=())
    page = state.snapshot
    step, is_global = (None, None) if page is None else (page.step, page.step_is_global)
    stack = tuple(frames.get(rank, ()))
    return Culprit(rank=rank, node=state.node, step=step, section=state.section, stack=stack, step_is_global=is_global)


def _stuck_s(state: RankState, suspect: LateRank | None, now_ns: int) -> float | None:
    """Return for how long a rank has been stuck, by the clock that its page's times are of.

    One that still moved after its deadline (in inner sections, say) does not stand still: it counts from the
    entry into what it does not come out of.
    """
    snapshot = state.snapshot
    if snapshot is None:
        return None
    read_ns = now_ns if state.now_ns is None else state.now_ns
    still_s = (read_ns - max(snapshot.created_ns, snapshot.main_lane.last_ns)) / 1e9
    if suspect is not None and suspect.deadline_s is not None and still_s < suspect.elapsed_s - suspect.deadline_s:
        return suspect.elapsed_s
    return still_s


def _suspect_evidence(suspect: LateRank) -> Evidence:
    limit = "no deadline" if suspect.deadline_s is None else f"deadline {suspect.deadline_s:.2f} s"
    return Evidence("deadline", f"rank {suspect.rank}: {suspect.name} for {suspect.elapsed_s:.2f} s ({limit})")


def _some(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
