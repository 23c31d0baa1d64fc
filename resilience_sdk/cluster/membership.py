"""Membership.

Which node of the job this is, what nodes tell one another when they have met, and the files in which our launcher
brings it.

There are several kinds of such words (hangs, stops, durations), each a file of its own that is replaced as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import ReplacedFile

_INTRODUCE_S = 60.0
_KEY = "resilience/attempt"
_MOST_BYTES = 1 << 30  # our launcher writes it, from files of nodes that it has bounded


@attrs.frozen
class Channel:
    """Two files in a page directory, by which the bus carries what monitors have to say to one another."""

    own: str
    """This node's, which its monitor writes."""
    peers: str
    """That of all others, which the bus writes."""


HANGS = Channel("node.json", "peers.json")
STOPS = Channel("stop.json", "stops.json")
DURATIONS = Channel("straggler.json", "stragglers.json")


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


@attrs.frozen
class NodePlace:
    """Number of this node among `count`, and its name."""

    me: int
    count: int
    name: str

    @classmethod
    def of(cls, announcement: Mapping[str, Any], host: str) -> NodePlace:
        """Return the place that our launcher has announced; alone and named by its host where it has not."""
        name = announcement.get("node_name")
        return cls(
            me=_integer(announcement.get("node"), 0),
            count=max(1, _integer(announcement.get("nodes"), 1)),
            name=name if isinstance(name, str) and name else host,
        )


@attrs.frozen
class Heard:
    """What the file holds: a text of each node, and whether the launcher says that this node gathers for all."""

    texts: Sequence[str]
    gathers: bool


class PeerFile:
    """The file with the words of one kind. The monitor's only thread."""

    def __init__(self, path: Path) -> None:
        """Read from `path`; there may be no such file yet."""
        self._file = ReplacedFile(path, _MOST_BYTES)

    def news(self, attempt: int) -> Heard | None:
        """Return what has come since the last call, None = nothing. Costs one stat then. Distrusts the content."""
        try:
            data = json.loads(self._file.news() or b"null")
            texts = list(data["nodes"].values()) if data["attempt"] == attempt else []
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return Heard([text for text in texts if isinstance(text, str)], data.get("gathers") is True)


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
