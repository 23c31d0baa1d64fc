"""What the nodes of an attempt tell one another right after they have met."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import attrs

_INTRODUCE_S = 60.0
_KEY = "resilience/attempt"


class NodeMissingError(Exception):
    """A node that had come to the rendezvous did not say a word after it."""


@attrs.frozen
class Peer:
    """A node of an attempt: how it is called, and its global ranks.

    `preflight` is a name of its own for this meeting where the node asks for a preflight across nodes, else empty;
    `cleared` tells that it has been through one.
    """

    name: str
    ranks: tuple[int, ...]
    preflight: str = ""
    cleared: bool = False


def introduce(store: Any, node: int, nodes: int, attempt: int, me: Peer) -> tuple[int, tuple[Peer, ...]]:
    """Return the attempt's number, the highest that any node counts, and all nodes by their numbers.

    So nodes that come late take the number over. Nodes are called by their host, and by `host#number` where several
    launchers run on one. One that has come and says nothing is waited for for a minute: with it gone, no attempt
    can begin, so `NodeMissingError` is raised.
    """
    if nodes == 1:
        return attempt, (me,)
    keys = [f"{_KEY}/{number}" for number in range(nodes)]
    store.set(keys[node], json.dumps([attempt, me.name, me.ranks, me.preflight, me.cleared]))
    try:
        store.wait(keys, timedelta(seconds=_INTRODUCE_S))
    except RuntimeError:
        missing = ", ".join(str(number) for number, key in enumerate(keys) if not store.check([key]))
        raise NodeMissingError(f"node {missing} of {nodes} came to the rendezvous and then said nothing") from None
    words = [json.loads(store.get(key)) for key in keys]
    names = [str(name) for _, name, *_ in words]
    peers = tuple(
        Peer(
            name if names.count(name) == 1 else f"{name}#{number}",
            tuple(map(int, ranks)),
            str(preflight),
            bool(cleared),
        )
        for number, (_, name, ranks, preflight, cleared) in enumerate(words)
    )
    return max(int(number) for number, *_ in words), peers
