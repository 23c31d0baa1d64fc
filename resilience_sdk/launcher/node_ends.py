"""How an attempt ended on every node, and which of them writes the crash incident. Pure.

A rank's death shows on other nodes as lost connections. Each launcher tells the others what it saw: the node
where a rank died of its own reports, all others leave it at that. The order in which faults were seen comes from
a counter in the store, because clocks of two hosts are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

ALONE_S = 2.0  # how long a node without a culprit waits for the word of another
AFTER_FAULT_S = 5.0  # beyond the time that ending ranks may take, when another node has seen a fault


@attrs.frozen
class NodeEnd:
    """How one node's part of an attempt ended."""

    node: int
    culprits: tuple[int, ...] = ()
    """Ranks that died of their own; empty where only lost connections and the like were seen."""
    order: int | None = None
    """Place among the nodes in the order in which they saw a rank fail; None where no rank failed."""
    headline: str = ""
    incident: str | None = None
    hang: bool = False
    """Whether the monitors ended the attempt for a hang: the incident is theirs."""
    joins: bool = False
    """Whether the ranks were ended because another node wants to join, which is no fault."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return attrs.asdict(self)


def read_end(node: int, data: Mapping[str, Any]) -> NodeEnd:
    """Return what a node has told; what does not fit counts as not told."""
    order, culprits = data.get("order"), data.get("culprits")
    headline, incident = data.get("headline"), data.get("incident")
    return NodeEnd(
        node=node,
        culprits=tuple(rank for rank in culprits if isinstance(rank, int)) if isinstance(culprits, list) else (),
        order=order if isinstance(order, int) and order > 0 else None,
        headline=headline if isinstance(headline, str) else "",
        incident=incident if isinstance(incident, str) else None,
        hang=data.get("hang") is True,
        joins=data.get("joins") is True,
    )


def reporter(ends: Mapping[int, NodeEnd], nodes: int) -> int | None:
    """Return the node that reports the end of an attempt of that many nodes; None while that is open."""
    if any(end.hang or end.joins for end in ends.values()):
        return reporter_at_last(ends)
    first = _first_real(ends)
    if first is not None:
        # Whoever has a lower number may have seen the true cause before.
        earlier = sum(1 for end in ends.values() if first.order and end.order and end.order < first.order)
        return first.node if first.order is not None and earlier >= first.order - 1 else None
    return min(ends) if len(ends) >= nodes else None


def reporter_at_last(ends: Mapping[int, NodeEnd]) -> int | None:
    """Return the node that reports when nobody waits for more words; None when nothing was told."""
    hung = [end.node for end in ends.values() if end.hang]
    if hung:
        return min(hung)
    first = _first_real(ends)
    if first is not None:
        return first.node
    joins = [end.node for end in ends.values() if end.joins]
    return min(joins or ends, default=None)


def _first_real(ends: Mapping[int, NodeEnd]) -> NodeEnd | None:
    real = [end for end in ends.values() if end.culprits]
    return min(real, key=lambda end: (end.order is None, end.order or 0, end.node), default=None)


def patience_s(faults: int, told: int, term_grace_s: float) -> float:
    """Return how long to wait for more words: longer while a node that saw a fault has not come to its end."""
    return term_grace_s + AFTER_FAULT_S if faults > told else ALONE_S
