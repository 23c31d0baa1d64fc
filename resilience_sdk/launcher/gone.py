"""What is said of an attempt that ended because a whole node went away. Pure.

The ranks that are left only see lost connections. Their launchers know more: which nodes were there, which of them
have told how it ended, and which have given no sign of life since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.attribution.exits import classification
from resilience_sdk.attribution.first_death import FirstDeath
from resilience_sdk.hang.judge import ranks_text
from resilience_sdk.incidents import Evidence
from resilience_sdk.launcher.peers import Peer

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


def headline(gone: Sequence[Peer]) -> str:
    """Say in one line which node went away."""
    return f"{nodes_text(gone)} gone: it died, or the network to it is cut"


def nodes_text(gone: Sequence[Peer]) -> str:
    """Return `host2 (rank 2) is` or `host1 (rank 1), host2 (ranks 2, 3) are`."""
    named = ", ".join(f"{peer.name} ({ranks_text(peer.ranks)})" for peer in gone[:4])
    return f"{named} {'is' if len(gone) == 1 else 'are'}"
