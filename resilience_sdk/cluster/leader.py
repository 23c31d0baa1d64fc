"""The leader: which node does alone what every node of the job could do.

One rule serves all of it: who gathers durations, who proposes a stop, who writes the incident of a hang or a crash. All
nodes know one order, that of their numbers unless it says otherwise. The first node leads; each further one steps in
when those before it have been silent for long, a turn later for each place, so that nodes which see the same silence do
not step in together. Silence is measured on each node's own steady clock: clocks of two hosts are never compared.

Two nodes may believe for a moment that they lead. Whoever leads must make that harmless: what it decides is written
once (`preemption.agreement`), or is a record that the others look for first.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def by_culprit(culprits: Sequence[int], ranks_of: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the order in which nodes write the incident of these culprits (ranks).

    The node of the lowest culprit comes first, as it has the evidence; without a culprit that of the lowest rank. The
    order is equal on all nodes that have the same evidence, however it was gathered.
    """
    nodes = sorted(ranks_of, key=lambda node: (min(ranks_of[node], default=1 << 62), node))
    of_culprit = {rank: node for node in reversed(nodes) for rank in ranks_of[node] if rank in set(culprits)}
    first = of_culprit[min(of_culprit)] if of_culprit else None
    return tuple(sorted(nodes, key=lambda node: (node != first, nodes.index(node))))


def patience_s(order: Sequence[int], me: int, turn_s: float) -> float:
    """Return for how long node `me` leaves the lead to those before it, who have a turn each."""
    return order.index(me) * turn_s


def leads(me: int, heard_at_s: Mapping[int, float], silent_since_s: float) -> bool:
    """Tell whether no node of a lower number was heard since then; nodes that were never heard do not count.

    Args:
        me: Number of this node.
        heard_at_s: By node, when its newest word came, by our clock.
        silent_since_s: By the same clock; who was last heard before that is silent.
    """
    return all(at_s < silent_since_s for node, at_s in heard_at_s.items() if node < me)


_SILENT_PACES = 5.0  # without a sign of who leads, before the next node does
_TURN_PACES = 0.5


class SignedLead:
    """A lead that lasts: its holder signs it, `node:count`, with a count that grows. Times are of one steady clock."""

    def __init__(self, me: int, pace_s: float, now_s: float) -> None:
        """Node 0 leads unless it is gone; whoever leads signs every `pace_s`."""
        self._me = me
        self._patience_s = pace_s * _SILENT_PACES + patience_s(range(me + 1), me, pace_s * _TURN_PACES)
        self._signed: str | None = None
        self._changed_at_s = now_s
        self.is_ours = me == 0

    def poll(self, signed: str | None, now_s: float) -> bool:
        """Take what is signed now, and tell whether this node leads; one of a lower number takes its lead back."""
        if signed != self._signed:
            self._signed, self._changed_at_s = signed, now_s
            holder = (signed or "").partition(":")[0]
            if holder.isdecimal() and int(holder) < self._me:
                self.is_ours = False
        elif now_s - self._changed_at_s > self._patience_s:
            self.is_ours = True
        return self.is_ours
