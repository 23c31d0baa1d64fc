"""TODO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.attribution.exits import classification
from resilience_sdk.attribution.first_death import FirstDeath
from resilience_sdk.cluster.membership import Peer
from resilience_sdk.core.json_records import to_values
from resilience_sdk.hang.detect import ranks_text
from resilience_sdk.incidents import Evidence

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
    free: bool = False
    """Whether that costs nothing of the budget."""
    final: str | None = None
    """Why no other attempt is to follow it."""
    stood: str | None = None
    """What stood still when the job was asked to leave."""
    fault: bool = False
    """Whether the fault is this node's though no rank is to blame for it: its fork server was killed."""
    joins: bool = False
    """Whether the ranks were ended because another node wants to join, which is no fault."""

    @property
    def is_cause(self) -> bool:
        """Whether this node knows why the attempt ended, so that no other one need tell."""
        return bool(self.culprits) or self.fault or self.hang or self.joins

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return to_values(self)


def read_end(node: int, data: Mapping[str, Any]) -> NodeEnd:
    """Return what a node has told; what does not fit counts as not told."""
    order, culprits = data.get("order"), data.get("culprits")
    headline, incident = data.get("headline"), data.get("incident")
    final, stood = data.get("final"), data.get("stood")
    return NodeEnd(
        node=node,
        culprits=tuple(rank for rank in culprits if isinstance(rank, int)) if isinstance(culprits, list) else (),
        order=order if isinstance(order, int) and order > 0 else None,
        headline=headline if isinstance(headline, str) else "",
        incident=incident if isinstance(incident, str) else None,
        hang=data.get("hang") is True,
        free=data.get("free") is True,
        final=final if isinstance(final, str) and final else None,
        stood=stood if isinstance(stood, str) and stood else None,
        fault=data.get("fault") is True,
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
    real = [end for end in ends.values() if end.culprits or end.fault]
    return min(real, key=lambda end: (end.order is None, end.order or 0, end.node), default=None)


def patience_s(faults: int, told: int, term_grace_s: float) -> float:
    """Return how long to wait for more words: longer while a node that saw a fault has not come to its end."""
    return term_grace_s + AFTER_FAULT_S if faults > told else ALONE_S


SILENT_S = 5.0  # a node gives a sign every second


PATIENCE_S = 8.0  # how long to look for signs; where nodes do not come back, the rendezvous takes longer anyway


CAUSE = "network_node_unreachable"


_CONFIDENCE = 0.75


_STORE_CONFIDENCE = 0.6  # the nodes cannot tell one another: whose host the store is on, was lost for certain


def all_settled(nodes: int, told: Mapping[int, object], silent_s: Mapping[int, float]) -> bool:
    """Tell whether each node has told how the attempt ended, or has been silent for long enough to be gone."""
    return all(node in told or silent_s.get(node, 0.0) >= SILENT_S for node in range(nodes))


def gone_nodes(
    peers: Sequence[Peer], told: Mapping[int, object], silent_s: Mapping[int, float], store_host: str | None
) -> tuple[Peer, ...]:
    """Return the nodes that are gone. `store_host`: where the store was, if it does not answer any more."""
    missing = {node: peer for node, peer in enumerate(peers) if node not in told}
    if store_host is None:
        return tuple(peer for node, peer in missing.items() if silent_s.get(node, 0.0) >= SILENT_S)
    hosts = [peer for peer in missing.values() if peer.name.partition("#")[0] == store_host]
    if len(hosts) == 1 or len(missing) == 1:
        return tuple(hosts[:1] or missing.values())
    return ()


def blame(first: FirstDeath, gone: Sequence[Peer], store_host: str | None) -> FirstDeath:
    """Return the verdict with the ranks of these nodes as culprits; what was seen before stays as evidence."""
    ranks = tuple(sorted(rank for peer in gone for rank in peer.ranks))
    why = "no sign of life since the connections broke"
    if store_host is not None:
        why = f"the store of the rendezvous at {store_host} does not answer either"
    told = Evidence("relay", f"{nodes_text(gone)} gone: {why}")
    confidence = _CONFIDENCE if store_host is None else _STORE_CONFIDENCE
    known = classification(CAUSE, confidence, told, *first.classification.evidence)
    victims = tuple(rank for rank in (*first.victims, *first.culprits) if rank not in ranks)
    return FirstDeath(ranks, tuple(sorted(victims)), attrs.evolve(known, action="restart"))


def headline_of_lost(gone: Sequence[Peer]) -> str:
    """Say in one line which node went away."""
    return f"{nodes_text(gone)} gone: it died, or the network to it is cut"


def nodes_text(gone: Sequence[Peer]) -> str:
    """Return `host2 (rank 2) is` or `host1 (rank 1), host2 (ranks 2, 3) are`."""
    named = ", ".join(f"{peer.name} ({ranks_text(peer.ranks)})" for peer in gone[:4])
    return f"{named} {'is' if len(gone) == 1 else 'are'}"
