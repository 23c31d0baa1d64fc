"""One file of each node, carried to all others: what a monitor writes, the monitors of the other nodes read.

Opaque here but for two fields: `attempt`, and `urgent`, which asks the others to read it now.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.console import say_once
from resilience_sdk.whole_file import write_whole

_MOST_BYTES = 4 << 20


class Exchange:
    """Carries the file `own` of this node, and gathers those of the others in `peers`. The relay's thread only.

    Raises what the store raises.
    """

    def __init__(self, pages: Path, own: str, peers: str, *, attempt: int, keys: Mapping[int, str], node: int) -> None:
        """`keys`: those of the store, by node. What was gathered in an attempt before is removed."""
        self._own, self._peers = pages / own, pages / peers
        self._attempt = attempt
        self._key = keys[node]
        self._others = {number: key for number, key in keys.items() if number != node}
        self._seen: tuple[int, int] | None = None
        self._texts: dict[int, bytes] = {}
        with contextlib.suppress(OSError):
            self._peers.unlink()

    @property
    def has_told(self) -> bool:
        """Whether this node has told anything in this attempt."""
        return self._seen is not None

    def publish(self, store: Any) -> bool:
        """Publish what our monitor has written, if it is new; tell whether the others should read it at once."""
        try:
            info = self._own.stat()
            if (seen := (info.st_ino, info.st_mtime_ns)) == self._seen or info.st_size > _MOST_BYTES:
                return False
            text = self._own.read_bytes()
            data = json.loads(text)
            if data["attempt"] != self._attempt:
                return False
            urgent = bool(data["urgent"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        store.set(self._key, text)
        self._seen = seen
        return urgent

    def fetch(self, store: Any) -> None:
        """Write down for our monitor what the others have told."""
        found = present(store, self._others)
        if not found or found == self._texts:
            return
        self._texts = found
        texts = {str(number): text.decode("utf-8", "replace") for number, text in found.items()}
        try:
            write_whole(self._peers, json.dumps({"attempt": self._attempt, "nodes": texts}))
        except OSError as error:
            say_once("peers", f"the monitor cannot be told about the other nodes: {error}")


def present(store: Any, keys: Mapping[int, str]) -> dict[int, bytes]:
    """Return the values of the keys that exist. A get of one that does not would wait for it."""
    if not keys:
        return {}
    if not store.check(list(keys.values())):
        keys = {number: key for number, key in keys.items() if store.check([key])}
    values: Sequence[bytes] = store.multi_get(list(keys.values())) if keys else []
    return dict(zip(keys, values, strict=True))
