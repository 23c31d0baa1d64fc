"""The summary of a node's ranks, as it is told to the other nodes.

Merged by each of them, and missed where one falls silent. Pure.

Bounded: a rank's page, where its process stands, its deadlines as its own node has learned them, and, of a close
look, the main thread's frames and the end of its flight record.

Clocks of two hosts are never compared. How old a summary is, is known from what it had *heard*: it was written
after our own summary that it names, and when we wrote that one our own clock tells.

Silence alone proves nothing: the words between monitors go another way than the training's, whose ranks may do well.
So a node counts as lost only while the job stands still here (the judge sees to that), and not while what its ranks
were busy with when the node was last heard may still take its time: an evaluation, or the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from resilience_sdk.core.json_records import from_text, to_text
from resilience_sdk.hang.activity import Activity
from resilience_sdk.hang.evidence import FlightRecord, GroupRecord
from resilience_sdk.hang.timeouts import LearnedTimeouts
from resilience_sdk.hang.timers import CollectivePosition, Due, HangRules, RankState, RunningTimer, verdict_due, watch
from resilience_sdk.incidents import Evidence
from resilience_sdk.recorder.page_reader import RankSnapshot

VERSION = 2
MOST_BYTES = 4 << 20
_MOST_FRAMES = 64
_MOST_GROUPS = 16
_MOST_FACTS = 32
_ENTRIES_AROUND = 8  # of a group's entries, before and after the last that is complete


@attrs.frozen
class HangVerdict:
    """What the node that wrote the incident has found; the others act on it and write none."""

    incident: str | None
    culprits: tuple[int, ...]
    cause: str | None
    headline: str
    free: bool = False
    """Whether this ending costs no restart of the budget."""
    final: str | None = None
    """Why no further attempt is made, in one sentence; None: one may be."""
    places: tuple[str, ...] = ()
    """Where the job has been ended, for what all nodes remember of places."""


@attrs.frozen
class RankSummary:
    """One rank, as `RankState` has it, and the evidence of a close look."""

    rank: int
    alive: bool = True
    process_state: str = ""
    traced: bool = False
    reads_terminal: bool = False
    snapshot: RankSnapshot | None = None
    collectives: Mapping[str, CollectivePosition] | None = None
    in_collective: bool | None = None
    slow_work: str | None = None
    activity: Activity | None = None
    place: str = ""
    endings: int = 0
    cpu_share: float | None = None
    role: str = ""
    timers: tuple[RunningTimer, ...] = ()
    past: bool = False
    due: Due | None = None
    frames: tuple[str, ...] = ()
    asked: bool = False
    """Whether it was asked for its flight record, so that having none means something."""
    flight: FlightRecord | None = None


@attrs.frozen
class NodeSummary:
    """One node at one moment. Times are of that node's own clock and mean nothing elsewhere."""

    attempt: int
    node: int
    name: str
    now_ns: int
    """When this was written; also tells one summary from the next."""
    ranks: tuple[RankSummary, ...] = ()
    heard: Mapping[int, int] = attrs.field(factory=dict)
    """By node: `now_ns` of the newest summary that had come from it, which dates this one for that node."""
    wants: bool = False
    """Whether a rank here is late, so that all others are asked for a close look."""
    urgent: bool = False
    """Whether the others should read this now and not at leisure."""
    looked: bool = False
    """Whether `ranks` hold the evidence of a recent close look."""
    ending: bool = False
    """Whether the launcher ends this attempt here."""
    verdict: HangVerdict | None = None
    facts: tuple[Evidence, ...] = ()
    version: int = VERSION


def encode(summary: NodeSummary) -> str:
    """Return a summary as text."""
    return to_text(summary)


def decode(text: str | bytes) -> NodeSummary | None:
    """Return the summary in a text; None for what is none, of another version, or too large."""
    if len(text) > MOST_BYTES:
        return None
    summary = from_text(NodeSummary, text)
    return summary if summary is not None and summary.version == VERSION else None


def summarize(
    states: Sequence[RankState],
    book: LearnedTimeouts,
    rules: HangRules,
    now_ns: int,
    frames: Mapping[int, Sequence[str]],
    flight: Mapping[int, FlightRecord | None],
) -> tuple[RankSummary, ...]:
    """Return the ranks of this node with their deadlines and what a close look has brought, if there was one."""
    return tuple(_summary_of(state, book, rules, now_ns, frames, flight) for state in states)


def _summary_of(
    state: RankState,
    book: LearnedTimeouts,
    rules: HangRules,
    now_ns: int,
    frames: Mapping[int, Sequence[str]],
    flight: Mapping[int, FlightRecord | None],
) -> RankSummary:
    watched = watch(state, book, now_ns)
    record = flight.get(state.rank)
    return RankSummary(
        rank=state.rank,
        alive=state.alive,
        process_state=state.process_state,
        traced=state.traced,
        reads_terminal=state.reads_terminal,
        snapshot=state.snapshot,
        collectives=None if state.collectives is None else dict(state.collectives),
        in_collective=state.in_collective,
        slow_work=state.slow_work,
        activity=state.activity,
        place=state.place,
        endings=state.endings,
        cpu_share=state.cpu_share,
        role=state.role,
        timers=watched.timers,
        past=watched.past(book),
        due=verdict_due(watched, book, rules),
        frames=tuple(frames.get(state.rank, ())[:_MOST_FRAMES]),
        asked=state.rank in flight,
        flight=None if record is None else digest(record),
    )


def digest(record: FlightRecord) -> FlightRecord:
    """Return the end of a flight record: what is pending, and a little of what came before."""
    # Groups in which the rank stands come first, should there be too many.
    names = sorted(record.groups, key=lambda name: not record.groups[name].position.blocked)[:_MOST_GROUPS]
    return attrs.evolve(record, groups={name: _shortened(record.groups[name]) for name in names})


def _shortened(group: GroupRecord) -> GroupRecord:
    first, last = group.completed - _ENTRIES_AROUND, group.completed + _ENTRIES_AROUND
    return attrs.evolve(group, entries={seq: e for seq, e in group.entries.items() if first < seq <= last})


def bounded_facts(facts: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """Return as many facts as a summary takes."""
    return tuple(facts[:_MOST_FACTS])


FRESH_S = 3.0  # a few intervals of an urgent exchange
_NANO = 1e9


def age_bound_s(summary: NodeSummary, me: int, now_ns: int) -> float:
    """Return the age in seconds that a summary has at most; infinite when it had not heard of us yet."""
    heard_ns = summary.heard.get(me)
    if heard_ns is None or heard_ns > now_ns:  # the future has not been heard: not of this boot, or made up
        return float("inf")
    return (now_ns - heard_ns) / _NANO


def is_fresh(summary: NodeSummary, me: int, attempt: int, now_ns: int) -> bool:
    """Tell whether a judgement may rest on a summary: provably recent, of this attempt, after a close look."""
    if summary.attempt != attempt or summary.node == me or summary.ending or not summary.looked:
        return False
    return age_bound_s(summary, me, now_ns) <= FRESH_S


def states_of_peers(
    summaries: Iterable[NodeSummary], me: int, attempt: int, now_ns: int, own: Iterable[int]
) -> list[RankState]:
    """Return the ranks of the other nodes whose summaries are fresh; all others stay unseen.

    Deadlines are those that their nodes saw when they wrote: no time is added for the way, so that a rank is
    late only if it was late there. A rank that two nodes claim (or that is ours) belongs to the first.
    """
    taken = set(own)
    states: list[RankState] = []
    for summary in sorted(summaries, key=lambda summary: summary.node):
        if not is_fresh(summary, me, attempt, now_ns):
            continue
        for rank in summary.ranks:
            if rank.rank not in taken:
                taken.add(rank.rank)
                states.append(_state(summary, rank))
    return states


def _state(summary: NodeSummary, rank: RankSummary) -> RankState:
    return RankState(
        rank=rank.rank,
        node=summary.name,
        alive=rank.alive,
        process_state=rank.process_state,
        traced=rank.traced,
        reads_terminal=rank.reads_terminal,
        snapshot=rank.snapshot,
        collectives=rank.collectives,
        now_ns=summary.now_ns,
        in_collective=rank.in_collective,
        slow_work=rank.slow_work,
        activity=rank.activity,
        place=rank.place,
        endings=rank.endings,
        cpu_share=rank.cpu_share,
        role=rank.role,
        timers=rank.timers,
        past=rank.past,
        due=rank.due,
    )


def evidence_of_peers(
    summaries: Iterable[NodeSummary], ranks: Iterable[int]
) -> tuple[dict[int, tuple[str, ...]], dict[int, FlightRecord | None]]:
    """Return frames and flight records of those ranks, as the ladder takes them."""
    wanted = set(ranks)
    found = [rank for summary in summaries for rank in summary.ranks if rank.rank in wanted]
    frames = {rank.rank: rank.frames for rank in found if rank.frames}
    return frames, {rank.rank: rank.flight for rank in found if rank.asked}


_BUSY_S = 1.0  # in one section: it is more than what a rank passes through at any moment
SILENT_S = 15.0  # a node tells every two seconds, and its monitor is replaced within a few
_NODES_FOR_CALM = 32  # from here on the relay reads less often


def lost_states(
    summaries: Mapping[int, NodeSummary],
    heard_ns: Mapping[int, int],
    attempt: int,
    nodes: int,
    now_ns: int,
    known: Iterable[int],
) -> list[RankState]:
    """Return the ranks of lost nodes, with nothing in their states but how long their node has been silent.

    Args:
        summaries: The newest of each node that was heard in this attempt; of others nothing is known, not even silence.
        heard_ns: By our clock, when each of these came.
        attempt: The current attempt.
        nodes: How many nodes there are.
        now_ns: A reading of our clock.
        known: Ranks of which there is better knowledge.
    """
    taken = set(known)
    least_s = SILENT_S * max(1.0, nodes / _NODES_FOR_CALM)
    states = []
    for number, summary in sorted(summaries.items()):
        silent_s = (now_ns - heard_ns[number]) / 1e9
        if summary.attempt != attempt or summary.ending or silent_s < least_s:
            continue
        if any(_may_be_busy(rank, silent_s) for rank in summary.ranks):
            continue
        for rank in summary.ranks:
            if rank.rank not in taken:
                taken.add(rank.rank)
                states.append(RankState(rank=rank.rank, node=summary.name, process_state="", silent_s=silent_s))
    return states


def _may_be_busy(rank: RankSummary, silent_s: float) -> bool:
    """Tell whether a rank was busy with something, when it was last heard of, that is still within its deadline.

    One that has finished is through for good.
    """
    page = rank.snapshot
    if page is not None and (page.paused is not None or page.done or page.exit_state == "clean"):
        return True
    stays = [timer for timer in rank.timers if timer.limit is not None and timer.elapsed_s >= _BUSY_S]
    return any(not attrs.evolve(timer, elapsed_s=timer.elapsed_s + silent_s).expired for timer in stays)
