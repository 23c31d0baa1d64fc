"""Nodes that have fallen silent, and from when on their ranks may be blamed. Pure.

Silence alone proves nothing: the words between monitors go another way than the training's, whose ranks may do well.
So a node counts as lost only while the job stands still here (the judge sees to that), and not while what its ranks
were busy with when the node was last heard may still take its time: an evaluation, or the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from resilience_sdk.hang import RankState
from resilience_sdk.monitor.summary import NodeSummary, RankSummary

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
