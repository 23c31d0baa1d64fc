"""Which nodes are still there: each counts up in the store, and whoever has to know looks whether a count moves.

Counts, not times: clocks of two hosts are not compared. Used by the relay's thread, read by the launcher's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

_SIGN_S = 1.0
_LOOK_S = 0.5


class LifeSigns:
    """The signs of this node and of the others in one attempt. Raises what the store raises."""

    def __init__(self, prefix: str, node: int, nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Use keys under `prefix`."""
        self._key = f"{prefix}/alive/{node}"
        self._others = {number: f"{prefix}/alive/{number}" for number in range(nodes) if number != node}
        self._clock = clock
        self._gave_at = self._looked_at = float("-inf")
        self._counts: dict[int, tuple[int, float]] = {}

    def give(self, store: Any) -> None:
        """Give a sign, about once a second."""
        if self._clock() - self._gave_at >= _SIGN_S:
            self._gave_at = self._clock()
            store.add(self._key, 1)

    def look(self, store: Any) -> None:
        """Look at the counts of the others, about twice a second."""
        if self._clock() - self._looked_at < _LOOK_S:
            return
        self._looked_at = self._clock()
        for number, key in self._others.items():
            count = int(store.add(key, 0))
            if number not in self._counts or self._counts[number][0] != count:
                self._counts = {**self._counts, number: (count, self._clock())}

    def silent_s(self) -> Mapping[int, float]:
        """Return for how many seconds each node's count has stood still; a node that was not looked at is left out."""
        return {number: self._clock() - since for number, (_, since) in self._counts.items()}
