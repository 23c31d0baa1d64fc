"""Carries words between the nodes of a job, through the store of the rendezvous.

What the monitors tell one another (`exchange`, about hangs and about a stop; `gathering`, about durations), the
write-once words of a stop (`board`), and how an attempt ended on each node (`ends`). A thread of its own with a client
of its own: a store that is slow or gone delays nothing and nobody else. Its loss is evidence, said once, and never
fatal.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.board import Board
from resilience_sdk.launcher.exchange import Exchange, present
from resilience_sdk.launcher.gathering import Gathering
from resilience_sdk.launcher.lifesigns import LifeSigns
from resilience_sdk.monitor import nodes as hang_words
from resilience_sdk.monitor import stop_nodes as stop_words

_TURN_S = 0.05  # a look at our files costs a few system calls
_ASK_S = 0.1  # a look at the store costs one request; with many nodes it is done less often
_ASK_PER_NODE_S = 0.001
_CALM_S = 2.0
_TIMEOUT_S = 2.0
_LAST_WORDS_S = 1.0
_RETRY_S = 5.0


class NodeRelay:
    """The relay of one node; started and stopped with each attempt. Main thread, except for its own thread."""

    def __init__(self, pages: Path | None, journal: Journal) -> None:
        """Carry what is in `pages`; without a page directory only how attempts end."""
        self._pages = pages
        self._journal = journal
        self._round: _Round | None = None

    @property
    def active(self) -> bool:
        """Whether there are other nodes in this attempt."""
        return self._round is not None

    def start(self, store: Any, attempt: int, node: int, nodes: int) -> None:
        """Begin to relay for an attempt; a no-op with one node. Blocks for no answer of the store."""
        self.stop()
        if nodes > 1 and store is not None:
            self._round = _Round(store, attempt, node, nodes, self._pages, self._lost)

    def stop(self) -> None:
        """Say what is left to say, and end."""
        if self._round is not None:
            self._round.stop()
            self._round = None

    def note_fault(self) -> None:
        """Take a number: the order in which nodes saw a rank fail, which no clock could tell."""
        if self._round is not None:
            self._round.note_fault()

    def tell_end(self, end: Mapping[str, Any]) -> None:
        """Tell the other nodes how the attempt ended here; may be told again with more."""
        if self._round is not None:
            self._round.tell_end(end)

    def wait_for_ends(
        self, decide: Callable[[Mapping[int, Mapping[str, Any]], int, float], bool], timeout_s: float
    ) -> dict[int, Mapping[str, Any]]:
        """Wait until `decide(ends by node, faults seen, seconds waited)` or the time is over; return the ends."""
        return self._round.wait_for_ends(decide, timeout_s) if self._round is not None else {}

    @property
    def silent_s(self) -> Mapping[int, float]:
        """For how long each other node has given no sign of life, as far as was looked since our end was told."""
        return self._round.signs.silent_s() if self._round is not None else {}

    @property
    def store_is_lost(self) -> bool:
        """Whether the store has not answered at the last try."""
        return self._round is not None and self._round.store_is_lost

    def _lost(self, error: Exception) -> None:
        text = str(error).splitlines()
        why = f"{type(error).__name__}: {text[0] if text else ''}"
        told = "hangs across nodes are told late, and no stop can be agreed meanwhile"
        if say_once("relay", f"the store between the nodes does not answer ({why}); {told}"):
            self._journal.emit(Event.DEGRADED, what="relay", why=why)


class _Round:
    """One attempt: the thread, and what it has to say and has heard, under one lock."""

    def __init__(
        self,
        store: Any,
        attempt: int,
        node: int,
        nodes: int,
        pages: Path | None,
        lost: Callable[[Exception], None],
    ) -> None:
        self._shared = store
        self._attempt, self._node, self._nodes = attempt, node, nodes
        self._lost = lost
        self._prefix = f"resilience/{attempt}"
        self._others = [number for number in range(nodes) if number != node]
        self._board = None if pages is None else Board(pages, attempt, self._prefix)
        self._hangs = self._exchange(pages, hang_words.OWN, hang_words.PEERS, "node")
        self._stops = self._exchange(pages, stop_words.OWN, stop_words.PEERS, "stop")
        self._gathering = None if pages is None else Gathering(pages, attempt, node, nodes, self._prefix)
        self.signs = LifeSigns(self._prefix, node, nodes)
        self.store_is_lost = False
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._fault: int | None = None  # 0: to be numbered
        self._end: dict[str, Any] | None = None
        self._end_told = True
        self._ends: dict[int, Mapping[str, Any]] = {}
        self._faults = 0
        self._news = -1
        self._fetched_at = self._asked_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="resilience-relay", daemon=True)
        self._thread.start()

    def _exchange(self, pages: Path | None, own: str, peers: str, key: str) -> Exchange | None:
        if pages is None:
            return None
        keys = {number: f"{self._prefix}/{key}/{number}" for number in range(self._nodes)}
        return Exchange(pages, own, peers, attempt=self._attempt, keys=keys, node=self._node)

    # -- main thread

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(_LAST_WORDS_S)

    def note_fault(self) -> None:
        with self._changed:
            if self._fault is None:
                self._fault = 0
        self._wake.set()

    def tell_end(self, end: Mapping[str, Any]) -> None:
        with self._changed:
            self._end, self._end_told = dict(end), False
        self._wake.set()

    def wait_for_ends(
        self, decide: Callable[[Mapping[int, Mapping[str, Any]], int, float], bool], timeout_s: float
    ) -> dict[int, Mapping[str, Any]]:
        began = time.monotonic()
        with self._changed:
            while (waited := time.monotonic() - began) < timeout_s and not decide(self._ends, self._faults, waited):
                self._changed.wait(min(_ASK_S, timeout_s - waited))
            return dict(self._ends)

    # -- the thread

    def _run(self) -> None:
        store: Any = None
        while not self._stopping.is_set():
            try:
                store = store if store is not None else own_client(self._shared)
                self._turn(store)
                self.store_is_lost = False
            except Exception as error:  # noqa: BLE001 - whatever it is, the ranks run
                if not self._is_told():  # who has told its end needs nobody, and the store leaves with its node
                    self._lost(error)
                store, self.store_is_lost = None, True
                self._stopping.wait(_RETRY_S)
            self._wake.wait(_TURN_S)
            self._wake.clear()
        with contextlib.suppress(Exception):
            if store is not None:
                self._turn(store)

    def _is_told(self) -> bool:
        with self._changed:
            return self._end is not None and self._end_told

    def _turn(self, store: Any) -> None:
        now = time.monotonic()
        self.signs.give(store)
        if self._gathering is not None:
            self._gathering.look(store)
        if self._end is not None:
            self.signs.look(store)
        urgent = self._publish(store)
        if urgent:
            store.add(f"{self._prefix}/news", 1)
        ask_s = _TURN_S if self._stops is not None and self._stops.has_told else _ASK_S
        if not urgent and now - self._asked_at < ask_s + _ASK_PER_NODE_S * self._nodes:
            return
        self._asked_at = now
        news = int(store.add(f"{self._prefix}/news", 0))
        calm_s = _CALM_S * max(1.0, self._nodes / 32)
        if news == self._news and now - self._fetched_at < calm_s:
            return
        self._news, self._fetched_at = news, now
        self._fetch(store)

    def _publish(self, store: Any) -> bool:
        """Publish what is new here; tell whether the others should read it at once."""
        urgent = self._publish_end(store)
        if self._hangs is not None and self._stops is not None and self._board is not None:
            was_asked = self._stops.has_told
            urgent |= self._hangs.publish(store) | self._stops.publish(store) | self._board.publish(store)
            if self._stops.has_told and not was_asked:
                store.add(f"{self._prefix}/asked", 1)
        return urgent

    def _fetch(self, store: Any) -> None:
        if self._hangs is not None and self._stops is not None and self._board is not None:
            self._hangs.fetch(store)
            if int(store.add(f"{self._prefix}/asked", 0)):
                self._stops.fetch(store)
                self._board.fetch(store)
        self._fetch_ends(store)

    def _publish_end(self, store: Any) -> bool:
        with self._changed:
            number = self._fault == 0
            end = None if self._end_told or self._end is None else dict(self._end)
        if number:
            self._fault = int(store.add(f"{self._prefix}/faults", 1))
        if end is not None:
            end["order"] = self._fault
            text = json.dumps(end)
            store.set(f"{self._prefix}/end/{self._node}", text)
            with self._changed:
                self._ends[self._node] = json.loads(text)
                if self._end is not None and {**self._end, "order": self._fault} == end:
                    self._end_told = True
                self._changed.notify_all()
        return number or end is not None

    def _fetch_ends(self, store: Any) -> None:
        faults = int(store.add(f"{self._prefix}/faults", 0))
        keys = {n: f"{self._prefix}/end/{n}" for n in self._others} if faults or self._end is not None else {}
        ends: dict[int, Mapping[str, Any]] = {}
        for number, text in present(store, keys).items():
            with contextlib.suppress(ValueError):
                data = json.loads(text)
                if isinstance(data, dict):
                    ends[number] = data
        with self._changed:
            self._faults = faults
            self._ends.update(ends)
            self._changed.notify_all()


def own_client(store: Any) -> Any:
    """Return a client of the same store for the calling thread, with a short timeout."""
    if hasattr(store, "clone"):
        client = store.clone()
    else:  # torch before it had clone(): a client of the server below, whose keys then lack the prefix
        from torch.distributed import TCPStore

        below = store
        while hasattr(below, "underlying_store"):
            below = below.underlying_store
        client = TCPStore(below.host, below.port, is_master=False, timeout=timedelta(seconds=_TIMEOUT_S))
    client.set_timeout(timedelta(seconds=_TIMEOUT_S))
    return client
