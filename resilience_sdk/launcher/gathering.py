"""Brings what the nodes tell about durations to the one that judges: the lowest-numbered one that is there.

Every node writes its own key; only one reads them all. It signs with a word that it changes each time. Who finds that
word unchanged for long takes over; two who gather at once do no harm, and the higher-numbered one leaves it.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from resilience_sdk.console import say_once
from resilience_sdk.launcher.exchange import present
from resilience_sdk.monitor.straggler_nodes import OWN, PEERS
from resilience_sdk.straggler.pieces import MOST_BYTES, pace_s
from resilience_sdk.whole_file import write_whole

_SILENT_PACES = 5.0  # without a sign of who gathers, before the next node does
_TURN_PACES = 0.5  # more for each further node


class Turn:
    """Whether it is for this node to gather. Pure; times are of one steady clock, in seconds."""

    def __init__(self, node: int, pace: float, now: float) -> None:
        """Node 0 gathers unless it is gone."""
        self._node = node
        self._pace = pace
        self._word: str | None = None
        self._changed_at = now
        self.gathers = node == 0

    def look(self, word: str | None, now: float) -> bool:
        """Take the word that stands, `node:count`, and tell whether this node gathers."""
        if word != self._word:
            self._word, self._changed_at = word, now
            who = (word or "").partition(":")[0]
            if who.isdecimal() and int(who) < self._node:
                self.gathers = False
        elif now - self._changed_at > self._pace * (_SILENT_PACES + _TURN_PACES * self._node):
            self.gathers = True
        return self.gathers


class Gathering:
    """One node's part in it, for one attempt. The relay's thread only; raises what the store raises."""

    def __init__(self, pages: Path, attempt: int, node: int, nodes: int, prefix: str) -> None:
        """Use the files in `pages` and keys of the store below `prefix`."""
        self._own, self._peers = pages / OWN, pages / PEERS
        self._attempt, self._node = attempt, node
        self._prefix = f"{prefix}/durations"
        self._pace_s = pace_s(nodes)
        self._turn = Turn(node, self._pace_s, time.monotonic())
        self._seen: tuple[int, int] | None = None
        self._looked_at = float("-inf")
        self._count = 0
        with contextlib.suppress(OSError):
            self._peers.unlink()

    def look(self, store: Any) -> None:
        """Publish what our monitor has written, and gather what all have if it is our turn; at its own pace."""
        now = time.monotonic()
        self._publish(store)
        if now - self._looked_at < self._pace_s:
            return
        self._looked_at = now
        lead = f"{self._prefix}/lead"
        gathered = self._turn.gathers
        if self._node:
            word = store.get(lead).decode("ascii", "replace") if store.check([lead]) else None
            if not self._turn.look(word, now):
                if gathered:
                    self._write({})
                return
        self._count += 1
        store.set(lead, f"{self._node}:{self._count}")
        self._write(self._gathered(store))

    def _publish(self, store: Any) -> None:
        try:
            info = self._own.stat()
            if (seen := (info.st_ino, info.st_mtime_ns)) == self._seen or info.st_size > MOST_BYTES:
                return
            text = self._own.read_bytes()
            if json.loads(text)["attempt"] != self._attempt:
                return
        except (OSError, ValueError, KeyError, TypeError):
            return
        store.set(f"{self._prefix}/{self._node}", text)
        if self._seen is None:  # one list of who tells: of thousands, asking for each would take thousands of requests
            store.append(f"{self._prefix}/nodes", f"{self._node} ")
        self._seen = seen

    def _gathered(self, store: Any) -> dict[int, bytes]:
        names = f"{self._prefix}/nodes"
        told = store.get(names).decode("ascii", "replace").split() if store.check([names]) else []
        keys = {int(name): f"{self._prefix}/{name}" for name in told if name.isdecimal() and int(name) != self._node}
        return present(store, keys)

    def _write(self, texts: dict[int, bytes]) -> None:
        nodes = {str(number): text.decode("utf-8", "replace") for number, text in texts.items()}
        try:
            write_whole(
                self._peers,
                json.dumps({"attempt": self._attempt, "gathers": self._turn.gathers, "nodes": nodes}),
            )
        except OSError as error:
            say_once("durations", f"the monitor cannot be told how fast the other nodes are: {error}")
