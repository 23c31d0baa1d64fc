"""What the monitors of a job's nodes tell one another while the job is asked to leave.

As with `nodes`, each writes a file, reads one, and our launcher carries between them. It is a word of its own,
because it changes with every check and must not make the evidence about a hang look newer than it is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import console
from resilience_sdk.monitor.peers import PeerFile, Place
from resilience_sdk.preemption.protocol import RankView, pace
from resilience_sdk.whole_file import write_whole
from resilience_sdk.wire import from_text, to_text

OWN = "stop.json"
PEERS = "stops.json"
_PACE_S = 0.1  # of counts; news are told at once
_FRESH_S = 2.0
_MOST_BYTES = 1 << 20


@attrs.frozen
class NodeStop:
    """One node of a job that was asked to leave, at one moment."""

    attempt: int
    node: int
    name: str
    turn: int
    """One more with each writing, so that a node that is gone can be told from one that has no news."""
    asked: str
    """Which node was asked first, and by whom."""
    left_s: float
    """Until the end, in seconds when this was written: no clock of one host means anything on another."""
    ranks: Mapping[int, RankView] = attrs.field(factory=dict)
    is_whole: bool = True
    """Whether all ranks of this node live."""
    failed: bool = False
    """Whether one of them has died of its own."""
    urgent: bool = True

    @property
    def news(self) -> object:
        """What must not wait: all but how far everybody is."""
        acknowledged = {rank: (view.acknowledged, view.count > 0) for rank, view in self.ranks.items()}
        return acknowledged, self.is_whole, self.failed


@attrs.frozen
class _Heard:
    stop: NodeStop
    at_s: float  # of our monotonic clock, when its newest word was read


class StopNodes:
    """What is told to and heard from the other nodes about a stop. The monitor's only thread."""

    def __init__(self, pages: Path, attempt: int, announcement: Mapping[str, Any], host: str) -> None:
        """Use the files in `pages`; `announcement` is our launcher's and says which of how many nodes this is."""
        self._pages = pages
        self._attempt = attempt
        place = Place.of(announcement, host)
        self.me, self.count, self.name = place.me, place.count, place.name
        self._peers = PeerFile(pages / PEERS)
        self._heard: dict[int, _Heard] = {}
        self._told: NodeStop | None = None
        self._told_at = float("-inf")

    @property
    def others(self) -> list[NodeStop]:
        """The last word of each other node."""
        return [heard.stop for _, heard in sorted(self._heard.items())]

    def coordinates(self) -> bool:
        """Tell whether it is for this node to propose and decide: no node before it has spoken lately.

        Two nodes may believe that of themselves at once, which is harmless.
        """
        oldest = time.monotonic() - _FRESH_S * pace(self.count)
        return all(heard.at_s < oldest for node, heard in self._heard.items() if node < self.me)

    def read(self) -> None:
        """Take what has come. Costs one stat while nothing has."""
        if self.count == 1:
            return
        heard = self._peers.news(self._attempt)
        for text in heard.texts if heard is not None else ():
            stop = decode(text)
            if stop is None or stop.attempt != self._attempt or stop.node == self.me:
                continue
            known = self._heard.get(stop.node)
            if known is None or known.stop.turn != stop.turn:
                self._heard[stop.node] = _Heard(stop, time.monotonic())

    def tell(
        self, asked: str, left_s: float, ranks: Mapping[int, RankView], *, is_whole: bool, failed: bool = False
    ) -> None:
        """Tell how it stands here: news at once, all else now and then."""
        if self.count == 1:
            return
        turn = 1 + (self._told.turn if self._told is not None else time.monotonic_ns())  # not that of a monitor before
        stop = NodeStop(self._attempt, self.me, self.name, turn, asked, left_s, ranks, is_whole, failed)
        is_news = self._told is None or self._told.news != stop.news
        if not is_news and time.monotonic() - self._told_at < _PACE_S * pace(self.count):
            return
        self._told, self._told_at = stop, time.monotonic()
        try:
            write_whole(self._pages / OWN, to_text(stop))
        except OSError as error:
            console.say_once("stop", f"the other nodes cannot be told that this one is asked to leave: {error}")


def decode(text: str) -> NodeStop | None:
    """Return what a node has told, or None for what is no such word."""
    return from_text(NodeStop, text) if len(text) <= _MOST_BYTES else None
