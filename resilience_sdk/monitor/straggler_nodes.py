"""What the monitors of a job's nodes tell one another about durations.

Each node writes a file, `straggler.json`. Our launcher carries it into the store, and one node's launcher, that of the
lowest number which is there, brings those of all nodes into `stragglers.json`. Its monitor judges.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from resilience_sdk import console
from resilience_sdk.monitor.peers import PeerFile, Place
from resilience_sdk.straggler.kernels import KernelWindow
from resilience_sdk.straggler.pieces import NodePieces, Piece, chosen, decode, pace_s
from resilience_sdk.whole_file import write_whole

OWN = "straggler.json"
PEERS = "stragglers.json"
_PIECES_KEPT = 64
READ_AT_ONCE = 128  # messages: reading those of 2,048 nodes takes a second


class StragglerNodes:
    """What is told to and heard from the other nodes. The monitor's only thread."""

    def __init__(
        self, pages: Path, attempt: int, announcement: Mapping[str, Any], host: str, clock: Callable[[], float]
    ) -> None:
        """Use the files in `pages`; `announcement` is our launcher's and says which of how many nodes this is."""
        self._pages = pages
        self._clock = clock
        self._attempt = attempt
        place = Place.of(announcement, host)
        self.me, self.count, self.name = place.me, place.count, place.name
        self._peers = PeerFile(pages / PEERS)
        self._pieces: deque[Piece] = deque(maxlen=_PIECES_KEPT)
        self._turn = time.monotonic_ns()  # not that of a monitor before
        self._told_at = float("-inf")
        self._turns: dict[int, int] = {}
        self._texts: set[str] = set()
        self._unread: dict[str, None] = {}
        self._gathers = self.me == 0

    @property
    def gathers(self) -> bool:
        """Whether this node judges for all. Two may believe that of themselves for a while, which is harmless."""
        return self._gathers

    def message(
        self, pieces: Iterable[Piece], roles: Mapping[int, str], kernels: Mapping[int, KernelWindow]
    ) -> NodePieces:
        """Return what there is to be told of this node."""
        self._turn += 1
        return NodePieces(self._attempt, self.me, self.name, self._turn, tuple(pieces), roles, kernels)

    def is_due(self, pieces: list[Piece]) -> bool:
        """Keep what is new, and tell whether it is time to tell."""
        self._pieces.extend(pieces)
        return bool(self._pieces) and self._clock() - self._told_at >= pace_s(self.count)

    def tell(self, roles: Mapping[int, str], kernels: Mapping[int, KernelWindow]) -> None:
        """Tell the newest windows of this node."""
        self._told_at = self._clock()
        told = self.message(chosen(self._pieces, self.count), roles, kernels)
        self._pieces.clear()
        self._pieces.extend(told.pieces)
        try:
            write_whole(self._pages / OWN, told.to_text())
        except OSError as error:
            console.say_once("straggler", f"the other nodes are not told how fast this one is: {error}")

    def read(self) -> list[NodePieces]:
        """Return what has come from other nodes, some of it where it is much. Costs one stat while nothing has."""
        if self.count == 1:
            return []
        heard = self._peers.news(self._attempt)
        if heard is not None:
            self._gathers = self.me == 0 or heard.gathers
            texts = set(heard.texts)
            unread = {text: None for text in self._unread if text in texts}
            self._unread = unread | dict.fromkeys(text for text in heard.texts if text not in self._texts)
            self._texts = texts
        now = list(islice(self._unread, READ_AT_ONCE))
        for text in now:
            del self._unread[text]
        told = (decode(text) for text in now)
        news = [n for n in told if n is not None and n.attempt == self._attempt and self._turns.get(n.node) != n.turn]
        self._turns.update((node.node, node.turn) for node in news)
        return [node for node in news if node.node != self.me]
