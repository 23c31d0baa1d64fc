"""The bus between nodes: a thread of its own carries what they tell one another through the store of the rendezvous.

It carries what the monitors tell (about hangs, a stop, durations), the write-once words of a stop, and how an attempt
ended on each node. All of it is opaque here but for two fields: `attempt`, and `urgent`, which asks the others to read
it now.

Every node writes its own key; only the `leader` reads them all. Two who gather at once do no harm.

A word is what `compare_set` made it first. Each is also appended to one list, so that a node finds what was decided
elsewhere with a single question. What a word means is known to those who wish (`preemption.agreement`), not here.

Counts, not times: clocks of two hosts are not compared. Used by the relay's thread, read by the launcher's.

The thread has a client of its own: a store that is slow or gone delays nothing and nobody else. Its loss is evidence,
said once, and never fatal.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from resilience_sdk.cluster.leader import SignedLead
from resilience_sdk.cluster.membership import DURATIONS, HANGS, STOPS, Channel
from resilience_sdk.core.atomic_write import ReplacedFile, write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.preemption.agreement import StopDecision, make_link, read_link, wish_path, word_path
from resilience_sdk.straggler.window_messages import MOST_BYTES, pace_s

_MOST_BYTES = 4 << 20


class _Files:
    """The two files of a channel in one attempt: what our monitor has to say, and what it is told of the others."""

    def __init__(self, pages: Path, channel: Channel, attempt: int, most_bytes: int) -> None:
        """What was gathered in an attempt before is removed."""
        self._own = ReplacedFile(pages / channel.own, most_bytes)
        self._peers = pages / channel.peers
        self._attempt = attempt
        with contextlib.suppress(OSError):
            self._peers.unlink()

    def news(self) -> tuple[bytes, dict[str, Any]] | None:
        """Return what our monitor has written since the last call, as text and as JSON."""
        try:
            text = self._own.news() or b"null"
            data: dict[str, Any] = json.loads(text)
            return (text, data) if data["attempt"] == self._attempt else None
        except (ValueError, KeyError, TypeError):
            return None

    def tell(self, texts: Mapping[int, bytes], **facts: object) -> None:
        """Write down for our monitor what the others have told."""
        nodes = {str(number): text.decode("utf-8", "replace") for number, text in texts.items()}
        try:
            write_whole(self._peers, json.dumps({"attempt": self._attempt, **facts, "nodes": nodes}))
        except OSError as error:
            say_once(self._peers.name, f"the monitor cannot be told about the other nodes: {error}")


class Exchange:
    """Carries this node's file of a channel, and gathers those of the others. The relay's thread only.

    Raises what the store raises.
    """

    def __init__(self, pages: Path, channel: Channel, *, attempt: int, keys: Mapping[int, str], node: int) -> None:
        """`keys`: those of the store, by node."""
        self._files = _Files(pages, channel, attempt, _MOST_BYTES)
        self._key = keys[node]
        self._others = {number: key for number, key in keys.items() if number != node}
        self._untold: tuple[bytes, dict[str, Any]] | None = None
        self._texts: dict[int, bytes] = {}
        self.has_told = False
        """Whether this node has told anything in this attempt."""

    def publish(self, store: Any) -> bool:
        """Publish what our monitor has written, if it is new; tell whether the others should read it at once."""
        self._untold = self._files.news() or self._untold
        if self._untold is None:
            return False
        text, data = self._untold
        store.set(self._key, text)
        self._untold, self.has_told = None, True
        return bool(data.get("urgent"))

    def fetch(self, store: Any) -> None:
        """Write down for our monitor what the others have told."""
        found = present(store, self._others)
        if found and found != self._texts:
            self._texts = found
            self._files.tell(found)


def present(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return the values of the keys that exist. A get of one that does not would wait for it."""
    if not keys:
        return {}
    if not store.check(list(keys.values())):
        keys = {number: key for number, key in keys.items() if store.check([key])}
    values: Sequence[bytes] = store.multi_get(list(keys.values())) if keys else []
    return dict(zip(keys, values, strict=True))


class Gathering:
    """One node's part in it, for one attempt. The relay's thread only; raises what the store raises."""

    def __init__(self, pages: Path, attempt: int, node: int, nodes: int, prefix: str) -> None:
        """Use the files in `pages` and keys of the store below `prefix`."""
        self._files = _Files(pages, DURATIONS, attempt, MOST_BYTES)
        self._node = node
        self._prefix = f"{prefix}/durations"
        self._pace_s = pace_s(nodes)
        self._lead = SignedLead(node, self._pace_s, time.monotonic())
        self._untold: bytes | None = None
        self._has_told = False
        self._looked_at = float("-inf")
        self._count = 0

    def look(self, store: Any) -> None:
        """Publish what our monitor has written, and gather what all have if it is our turn; at its own pace."""
        now = time.monotonic()
        self._publish(store)
        if now - self._looked_at < self._pace_s:
            return
        self._looked_at = now
        key = f"{self._prefix}/lead"
        gathered = self._lead.is_ours
        if self._node:
            word = store.get(key).decode("ascii", "replace") if store.check([key]) else None
            if not self._lead.poll(word, now):
                if gathered:
                    self._files.tell({}, gathers=False)
                return
        self._count += 1
        store.set(key, f"{self._node}:{self._count}")
        self._files.tell(self._gathered(store), gathers=self._lead.is_ours)

    def _publish(self, store: Any) -> None:
        if (news := self._files.news()) is not None:
            self._untold, _ = news
        if self._untold is None:
            return
        store.set(f"{self._prefix}/{self._node}", self._untold)
        if not self._has_told:  # one list of who tells: of thousands, asking for each would take thousands of requests
            store.append(f"{self._prefix}/nodes", f"{self._node} ")
        self._untold, self._has_told = None, True

    def _gathered(self, store: Any) -> dict[int, bytes]:
        names = f"{self._prefix}/nodes"
        told = store.get(names).decode("ascii", "replace").split() if store.check([names]) else []
        keys = {int(name): f"{self._prefix}/{name}" for name in told if name.isdecimal() and int(name) != self._node}
        return present(store, keys)


_NAME = re.compile(r"[a-z]{1,16}-\d{1,6}", re.ASCII)
_VALUE = re.compile(r"[a-z0-9]{1,32}", re.ASCII)


class Board:
    """The words of one attempt, on one node. The relay's thread only; raises what the store raises."""

    def __init__(self, pages: Path, attempt: int, prefix: str) -> None:
        """Use keys of the store below `prefix`."""
        self._pages = pages
        self._attempt = attempt
        self._prefix = prefix
        self._log = f"{prefix}/words"
        self._known: dict[str, str] = {}
        self._wishes = wish_path(pages, attempt, "").name

    @property
    def known(self) -> dict[str, str]:
        """All words that are known to stand, by name."""
        return self._known

    def publish(self, store: Any) -> bool:
        """Carry the wishes that are new; tell whether there were any."""
        wishes = [(name, value) for name, value in self._wishes_left() if name not in self._known]
        for name, value in wishes:
            word = store.compare_set(f"{self._prefix}/word/{name}", "", value).decode("ascii", "replace")
            store.append(self._log, f"{name}={word}\n")
            self._take(name, word)
        return bool(wishes)

    def fetch(self, store: Any) -> None:
        """Take the words that others have made."""
        if store.check([self._log]):
            for line in store.get(self._log).decode("ascii", "replace").splitlines():
                name, _, word = line.partition("=")
                if name not in self._known:
                    self._take(name, word)

    def _wishes_left(self) -> Iterator[tuple[str, str]]:
        with contextlib.suppress(OSError):
            for found in os.listdir(self._pages):
                name = found.removeprefix(self._wishes)
                if name != found and _NAME.fullmatch(name):
                    value = read_link(self._pages / found)
                    if value is not None and _VALUE.fullmatch(value):
                        yield name, value

    def _take(self, name: str, word: str) -> None:
        if not (_NAME.fullmatch(name) and _VALUE.fullmatch(word)):
            return  # what stands in the store is not to be trusted with our files
        path = word_path(self._pages, self._attempt, name)
        with contextlib.suppress(OSError):
            if not make_link(path, word) and read_link(path) == StopDecision.ALONE and word == StopDecision.VOID:
                _replace_link(path, word)  # it was decided here alone, and so by all
        self._known[name] = word


def _replace_link(path: Path, value: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    os.symlink(value, temporary)
    os.replace(temporary, path)


_SIGN_S = 1.0
_LOOK_S = 0.5


class LifeSigns:
    """The signs of this node and of the others in one attempt, by one steady clock. Raises what the store raises."""

    def __init__(self, prefix: str, node: int, nodes: int) -> None:
        """Use keys under `prefix`."""
        self._key = f"{prefix}/alive/{node}"
        self._others = {number: f"{prefix}/alive/{number}" for number in range(nodes) if number != node}
        self._gave_at = self._looked_at = float("-inf")
        self._counts: dict[int, tuple[int, float]] = {}

    def give(self, store: Any, now: float) -> None:
        """Give a sign, about once a second."""
        if now - self._gave_at >= _SIGN_S:
            self._gave_at = now
            store.add(self._key, 1)

    def look(self, store: Any, now: float) -> None:
        """Look at the counts of the others, about twice a second."""
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for number, key in self._others.items():
            count = int(store.add(key, 0))
            if number not in self._counts or self._counts[number][0] != count:
                self._counts = {**self._counts, number: (count, now)}

    def silent_s(self, now: float) -> Mapping[int, float]:
        """Return for how many seconds each node's count has stood still; a node that was not looked at is left out."""
        return {number: now - since for number, (_, since) in self._counts.items()}


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
            self._round = _Round(store, attempt, node, nodes, self._pages, self._journal)

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
        return self._round.signs.silent_s(time.monotonic()) if self._round is not None else {}

    @property
    def store_is_lost(self) -> bool:
        """Whether the store has not answered at the last try."""
        return self._round is not None and self._round.store_is_lost


class _Round:
    """One attempt: the thread, and what it has to say and has heard, under one lock."""

    def __init__(self, store: Any, attempt: int, node: int, nodes: int, pages: Path | None, journal: Journal) -> None:
        self._shared = store
        self._attempt, self._node, self._nodes = attempt, node, nodes
        self._journal = journal
        self._prefix = f"resilience/{attempt}"
        self._others = [number for number in range(nodes) if number != node]
        self._board = None if pages is None else Board(pages, attempt, self._prefix)
        self._hangs = self._exchange(pages, HANGS, "node")
        self._stops = self._exchange(pages, STOPS, "stop")
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

    def _exchange(self, pages: Path | None, channel: Channel, key: str) -> Exchange | None:
        if pages is None:
            return None
        keys = {number: f"{self._prefix}/{key}/{number}" for number in range(self._nodes)}
        return Exchange(pages, channel, attempt=self._attempt, keys=keys, node=self._node)

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

    def _lost(self, error: Exception) -> None:
        text = str(error).splitlines()
        why = f"{type(error).__name__}: {text[0] if text else ''}"
        told = "hangs across nodes are told late, and no stop can be agreed meanwhile"
        if say_once("relay", f"the store between the nodes does not answer ({why}); {told}"):
            self._journal.emit(Event.DEGRADED, what="relay", why=why)

    def _turn(self, store: Any) -> None:
        now = time.monotonic()
        self.signs.give(store, now)
        if self._gathering is not None:
            self._gathering.look(store)
        if self._end is not None:
            self.signs.look(store, now)
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
