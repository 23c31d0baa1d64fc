"""What a node tells the others about its ranks. Pure.

Bounded: a rank's page, where its process stands, its deadlines as its own node has learned them, and, of a close
look, the main thread's frames and the end of its flight record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.hang import CollectivePosition, DeadlineBook, FlightRecord, RankState
from resilience_sdk.hang.flight import GroupRecord
from resilience_sdk.hang.timers import Timer, watch
from resilience_sdk.incidents import Evidence
from resilience_sdk.rank_page import RankSnapshot
from resilience_sdk.wire import from_text, to_text

VERSION = 1
MOST_BYTES = 4 << 20
_MOST_FRAMES = 64
_MOST_GROUPS = 16
_MOST_FACTS = 32
_ENTRIES_AROUND = 8  # of a group's entries, before and after the last that is complete


@attrs.frozen
class Verdict:
    """What the node that wrote the incident has found; the others act on it and write none."""

    incident: str | None
    culprits: tuple[int, ...]
    cause: str | None
    headline: str


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
    activity: str | None = None
    cpu_share: float | None = None
    role: str = ""
    timers: tuple[Timer, ...] = ()
    past: bool = False
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
    verdict: Verdict | None = None
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
    book: DeadlineBook,
    now_ns: int,
    frames: Mapping[int, Sequence[str]],
    flight: Mapping[int, FlightRecord | None],
) -> tuple[RankSummary, ...]:
    """Return the ranks of this node with their deadlines and what a close look has brought, if there was one."""
    return tuple(_summary_of(state, book, now_ns, frames, flight) for state in states)


def _summary_of(
    state: RankState,
    book: DeadlineBook,
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
        activity=state.activity,
        cpu_share=state.cpu_share,
        role=state.role,
        timers=watched.timers,
        past=watched.past(book),
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
