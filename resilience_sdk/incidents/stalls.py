"""The stall that stood when a job was ended from outside, as the monitors' notices tell it. Pure.

A monitor tells that nothing progresses (`stall`) long before it calls that a hang, and that it is over (`stall_end`).
Where somebody ends the ranks in between, the stall is what went wrong, and the signal only what came of it. As with all
that is read from a journal, an event of another version or shape says what it says, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.incidents.record import (
    STALL,
    Culprit,
    Evidence,
    Incident,
    compact_ranks,
    number_of,
    text_of,
    whole_of,
)

WENT_ON, VERDICT = "went on", "verdict"
"""`why` of the event `stall_end`; `ended` says that the attempt was ended meanwhile."""
EXIT = "exit"
"""The `kind` of an event `stall` about a process that does not end: its training is over and does not stand still."""
ENDING = "ending"
"""The source of the evidence that tells who ended a job that stood still."""
# Activity -> (category, cause, confidence of a stall that lasts, which is less than that of a verdict).
# The first that was seen names the cause.
_NAMED: Mapping[str, tuple[str, str, float]] = {
    "stopped": ("hang", "hang_rank_stopped", 0.85),
    "stuck": ("hang", "hang_rank_stuck", 0.7),
    "spinning": ("hang", "hang_rank_spinning", 0.5),
    "polling": ("hang", "hang_rank_spinning", 0.5),
    "unknown": ("unknown", "unknown", 0.4),
}
_SAVE = ("storage", "checkpoint_stall", 0.7)
_NETWORK = ("network", "network_partition", 0.4)
_NOBODY = ("unknown", "unknown", 0.3)
_LATE = ("hang", "hang_rank_late", 0.6)
_HALF_SURE_S = 30.0  # after so long a stall is believed half as much as it ever will be
_WORDS = {
    "stopped": "is stopped",
    "stuck": "is stuck",
    "spinning": "spins",
    "polling": "polls",
    "waiting": "waits",
    "busy": "is busy",
}
_MOST_RANKS = 8


@attrs.frozen
class StalledRank:
    """A rank that everybody waits for, as the monitor of its node has seen it."""

    rank: int
    node: str | None = None
    step: int | None = None
    step_is_global: bool | None = None
    section: str | None = None
    activity: str = "unknown"
    still_s: float | None = None
    frame: str | None = None
    stack: tuple[str, ...] = ()
    detail: str | None = None
    cause: str | None = None
    """What the monitor calls it, where that is more than what it does: a save that stalls."""
    wait_ends: float | None = None
    """When the wait that it is in ends by itself (Unix seconds), where it is granted that."""
    storage: str | None = None
    """Into what it saves, and whether that place answers."""


@attrs.frozen
class Proof:
    """What the ranks' own records prove of a stall, however it ends: that they call different collectives."""

    category: str
    cause: str
    confidence: float
    culprits: tuple[int, ...]
    evidence: tuple[Evidence, ...]


@attrs.frozen
class Stall:
    """A time without progress. Times are Unix seconds of the host that told it."""

    since: float
    told_at: float
    ranks: tuple[StalledRank, ...]
    waiting: tuple[int, ...] = ()
    proof: Proof | None = None

    def hang(self, attempt: int | None, at: float, by: str) -> Incident:
        """Return the incident of the stall, which is not written yet: it stood at time `at`, when `by` ended it."""
        for_s = max(0.0, at - self.since)
        category, cause, sure = self._verdict
        proof = self.proof
        blamed = {one.rank for one in self.ranks if one.activity in _NAMED or self._is_late}
        blamed = blamed if proof is None else set(proof.culprits)
        named = tuple(one for one in self.ranks if one.rank in blamed)
        rest = {one.rank for one in self.ranks} - {one.rank for one in named}
        waited = "the others waited for " if self.waiting else ""
        shown = ", ".join(map(_told, self.ranks[:_MOST_RANKS])) + (", ..." if len(self.ranks) > _MOST_RANKS else "")
        return Incident(
            kind="hang",
            attempt=attempt,
            detected_at=at,
            detection_latency_s=for_s,
            culprits=tuple(map(_culprit, named)),
            victims=tuple(sorted(rest.union(self.waiting))),
            category=category if proof is None else proof.category,
            cause=cause if proof is None else proof.cause,
            action="restart",
            confidence=(
                round(sure * (0.5 + 0.5 * for_s / (for_s + _HALF_SURE_S)), 2) if proof is None else proof.confidence
            ),
            evidence=(
                *(() if proof is None else proof.evidence),
                Evidence(STALL, f"no rank made progress for {for_s:.0f} s: {waited}{shown}"),
                *(Evidence("activity", f"rank {one.rank}: {one.detail}") for one in self.ranks if one.detail),
                *(Evidence("storage", f"rank {r.rank} saves into {r.storage}") for r in self.ranks if r.storage),
                Evidence(ENDING, f"then it was ended: {by}"),
            ),
        )

    @property
    def _is_late(self) -> bool:
        """Whether its ranks only did what others could not wait for."""
        return bool(self.ranks) and all(one.activity == "busy" for one in self.ranks)

    @property
    def _verdict(self) -> tuple[str, str, float]:
        seen = {one.activity for one in self.ranks}
        if self.ranks and all(one.cause == _SAVE[1] for one in self.ranks):
            return _SAVE
        if self._is_late:
            return _LATE
        for activity, verdict in _NAMED.items():
            if activity in seen:
                return verdict
        inside = [one for one in self.ranks if any("torch/distributed/" in frame for frame in one.stack)]
        return _NETWORK if len(inside) > 1 and len(inside) == len(self.ranks) else _NOBODY

    @property
    def stacks(self) -> dict[int, str]:
        """The stacks that were seen, by rank, as an incident keeps them."""
        return {one.rank: "\n".join(("innermost first:", *one.stack, "")) for one in self.ranks if one.stack}


def stall_at(
    told: Sequence[Mapping[str, Any]],
    at: float,
    *,
    ended: Mapping[int, float] | None = None,
    moved: Mapping[int, float] | None = None,
    late_counts: bool = False,
) -> Stall | None:
    """Return the stall of an attempt that stood at the time `at` (Unix seconds) when somebody began to end it.

    Args:
        told: The attempt's events, by time.
        at: When a rank was killed, or a signal came.
        ended: When ranks ended. One that was gone before the stall was told is no rank that stands still.
        moved: When ranks last completed a step, where their pages tell: a monitor that died tells of no end.
        late_counts: Whether ranks that were busy while the others waited for them are told, too: nobody ended the job
            from outside, those who waited gave up.
    """
    stood: list[Stall] = []
    for tellings in _by_host(told, at).values():
        newest = [stall for stall in tellings if stall.told_at <= at][-1:] or tellings[:1]
        proof = next((stall.proof for stall in reversed(tellings) if stall.proof is not None), None)
        for stall in newest:
            if stall.since <= at and not _has_moved(stall, at, moved or {}):
                left = tuple(_at(one, at) for one in _left(stall, told, ended or {}))
                stood.append(attrs.evolve(stall, ranks=left, proof=proof))
    stood = [stall for stall in stood if stall.ranks]
    if not stood:
        return None
    ranks = {one.rank: one for stall in stood for one in stall.ranks}
    for_s = max(stall.told_at - stall.since for stall in stood)
    in_order = tuple(ranks[rank] for rank in sorted(ranks))
    standing = _standing(in_order, for_s)
    if not standing and any(stall.proof is not None for stall in stood):
        standing = in_order  # a monitor that was just replaced has not watched them for long; the records stay
    if not standing and late_counts and any(stall.waiting for stall in stood):
        standing = tuple(one for one in in_order if one.activity == "busy")
    if not standing:
        return None
    named = {one.rank for one in standing}
    waiting = sorted({rank for stall in stood for rank in stall.waiting} - named)
    since, told_at = max(stall.since for stall in stood), max(stall.told_at for stall in stood)
    proof = next((stall.proof for stall in reversed(stood) if stall.proof is not None), None)
    return Stall(since, told_at, standing, tuple(waiting), proof)


def standing_words(hang: Incident, at: float | None = None) -> str:
    """Return what stood still, for how long until `at`, and where, as the begin of a sentence."""
    for_s = hang.detection_latency_s
    if for_s is not None and at is not None and hang.detected_at is not None:
        for_s += max(0.0, at - hang.detected_at)
    lasted = "" if for_s is None else f" for {for_s:.0f} s"
    incident = f" ({hang.id}: {hang.cause})" if hang.id else f" ({hang.cause})"
    if not hang.culprits:
        return f"no rank made progress{lasted}{incident}"
    first = hang.culprits[0]
    several = len(hang.culprits) > 1
    who = f"rank{'s' * several} {compact_ranks(culprit.rank for culprit in hang.culprits)}"
    node = f" on {first.node}" if first.node and not several else ""
    step = f" at {first.told_step}" if first.told_step else ""
    section = f" in section '{first.section}'" if first.section else ""
    return f"{who}{node} made no progress{lasted}{step}{section}{incident}"


def _by_host(told: Iterable[Mapping[str, Any]], at: float) -> dict[str | None, list[Stall]]:
    """Return, by the host that told them, the notices of the stall that was not over at the time `at`."""
    tellings: dict[str | None, list[Stall]] = {}
    over: set[str | None] = set()
    for event in told:
        host = text_of(event.get("host"))
        if event["event"] == Event.STALL.value and host not in over:
            if (stall := _read(event)) is not None:
                tellings.setdefault(host, []).append(stall)
        elif event["event"] == Event.STALL_END.value and tellings.get(host):
            # A verdict has an incident of its own. One that goes on only after the signal stood until then: Slurm
            # continues what is stopped before it signals it.
            why = event.get("why")
            if why == VERDICT or (why == WENT_ON and event["t"] <= at):
                tellings[host] = []
            else:
                over.add(host)
    return tellings


def _at(one: StalledRank, at: float) -> StalledRank:
    """Return the rank as it stood at a time: one whose wait was yet to end by itself did what it was to do."""
    return attrs.evolve(one, activity="busy") if one.wait_ends is not None and one.wait_ends > at else one


def _has_moved(stall: Stall, at: float, moved: Mapping[int, float]) -> bool:
    return any(stall.told_at < moved.get(one.rank, 0.0) <= at for one in stall.ranks)


def _left(stall: Stall, told: Sequence[Mapping[str, Any]], ended: Mapping[int, float]) -> tuple[StalledRank, ...]:
    """Return the ranks of a stall without those that were gone before it, and that came to the agreed stop after it."""
    went_on = {
        rank
        for event in told
        if event["event"] == Event.STOP_AGREED.value and event["t"] > stall.since
        if (rank := whole_of(event.get("rank"))) is not None
    }
    return tuple(
        one for one in stall.ranks if one.rank not in went_on and ended.get(one.rank, stall.told_at) >= stall.told_at
    )


def _standing(ranks: tuple[StalledRank, ...], for_s: float) -> tuple[StalledRank, ...]:
    """Return those of the awaited ranks that stand still; none where all that is known is that one is busy."""
    by = {one.rank: one for one in ranks if one.activity in ("stopped", "stuck", "spinning", "polling")}
    if any(one.activity == "busy" for one in ranks):  # who polls waits for it
        return tuple(one for one in by.values() if one.activity != "polling")
    if by:
        return tuple(by.values())
    return tuple(one for one in ranks if one.activity == "waiting" or 2 * (one.still_s or 0.0) >= for_s > 0)


def _told(one: StalledRank) -> str:
    node = f" on {one.node}" if one.node else ""
    place = f" at {one.frame}" if one.frame else ""
    return f"rank {one.rank}{node}, which {_WORDS.get(one.activity, 'stands still')}{place}"


def _culprit(one: StalledRank) -> Culprit:
    return Culprit(one.rank, one.node, one.step, one.section, one.stack, one.step_is_global)


def _read(event: Mapping[str, Any]) -> Stall | None:
    since, told_at = number_of(event.get("since")), float(event["t"])
    ranks, waiting = (items if isinstance(items := event.get(key), list) else None for key in ("ranks", "waiting"))
    if since is None or ranks is None or event.get("kind") == EXIT:
        return None
    return Stall(
        since=min(since, told_at),
        told_at=told_at,
        ranks=tuple(one for item in ranks if (one := _read_rank(item)) is not None),
        waiting=tuple(rank for item in waiting or () if (rank := whole_of(item)) is not None),
        proof=_read_proof(event.get("proof")),
    )


def _read_proof(data: object) -> Proof | None:
    if not isinstance(data, Mapping):
        return None
    category, cause, sure = text_of(data.get("category")), text_of(data.get("cause")), number_of(data.get("confidence"))
    culprits, told = (items if isinstance(items := data.get(key), list) else [] for key in ("culprits", "evidence"))
    if category is None or cause is None or sure is None:
        return None
    evidence = Incident.from_json({"evidence": told}).evidence
    return Proof(
        category, cause, sure, tuple(rank for item in culprits if (rank := whole_of(item)) is not None), evidence
    )


def _read_rank(data: object) -> StalledRank | None:
    if not isinstance(data, Mapping) or (rank := whole_of(data.get("rank"))) is None:
        return None
    stack, is_global = data.get("stack"), data.get("step_is_global")
    activity = text_of(data.get("activity"))
    return StalledRank(
        rank=rank,
        node=text_of(data.get("node")),
        step=whole_of(data.get("step")),
        step_is_global=is_global if isinstance(is_global, bool) else None,
        section=text_of(data.get("section")),
        activity=activity if activity in _WORDS else "unknown",
        still_s=number_of(data.get("still_s")),
        frame=text_of(data.get("frame")),
        stack=tuple(line for line in (stack if isinstance(stack, list) else ()) if isinstance(line, str)),
        detail=text_of(data.get("detail")),
        cause=text_of(data.get("cause")),
        wait_ends=number_of(data.get("wait_ends")),
        storage=text_of(data.get("storage")),
    )
