"""What one node makes of the summaries of the others. Pure.

Clocks of two hosts are never compared. How old a summary is, is known from what it had *heard*: it was written
after our own summary that it names, and when we wrote that one our own clock tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from resilience_sdk.hang import FlightRecord, RankState
from resilience_sdk.monitor.summary import NodeSummary, RankSummary

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
        activity=rank.activity,
        cpu_share=rank.cpu_share,
        role=rank.role,
        timers=rank.timers,
        past=rank.past,
    )


def evidence_of_peers(
    summaries: Iterable[NodeSummary], ranks: Iterable[int]
) -> tuple[dict[int, tuple[str, ...]], dict[int, FlightRecord | None]]:
    """Return frames and flight records of those ranks, as the ladder takes them."""
    wanted = set(ranks)
    found = [rank for summary in summaries for rank in summary.ranks if rank.rank in wanted]
    frames = {rank.rank: rank.frames for rank in found if rank.frames}
    return frames, {rank.rank: rank.flight for rank in found if rank.asked}


def succession(culprits: Sequence[int], ranks_of: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the nodes in the order in which they are to write the incident.

    The node of the lowest culprit comes first, without a culprit that of the lowest rank: equal on all nodes
    that have the same evidence. The others follow, each to step in only if those before it stay silent.
    """
    nodes = sorted(ranks_of, key=lambda node: (min(ranks_of[node], default=1 << 62), node))
    of_culprit = {rank: node for node in reversed(nodes) for rank in ranks_of[node] if rank in set(culprits)}
    first = of_culprit[min(of_culprit)] if of_culprit else None
    return tuple(sorted(nodes, key=lambda node: (node != first, nodes.index(node))))
