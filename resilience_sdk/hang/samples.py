"""Durations of one name: a sliding window for its quantile, and a longer memory for its peaks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

WINDOW = 2048
"""Durations, pooled over ranks, that the quantile is taken of."""
BLOCK = 128
BLOCKS = 32
REMEMBERED = BLOCK * BLOCKS
"""How many occurrences *per rank* a peak is remembered."""
_STORED = 128


class Samples:
    """Durations of one name, in seconds.

    Two memories, because two things are legitimate. The window forgets quickly and its high quantile does not
    feel a single outlier. The peaks are block maxima over REMEMBERED occurrences per rank: a checkpoint every
    1000 steps inside a section is rarer than one in a hundred, so no quantile shows it, and it must not be
    called a hang; nor may one bad day inflate a deadline for ever, so a block is dropped when it is old.
    """

    def __init__(self, pool: int = 1) -> None:
        """`pool` is the number of ranks whose durations are added here."""
        self._block_size = BLOCK * max(1, pool)
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._sorted: list[float] | None = []  # None: to be made when somebody asks
        self._peaks: deque[float] = deque(maxlen=BLOCKS)
        self._block_left = 0
        self.added = 0

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, duration_s: float) -> None:
        """Add one duration; what is no duration (negative, not finite) is ignored."""
        self.extend((duration_s,))

    def extend(self, durations_s: Iterable[float]) -> None:
        """Add durations in their order; a monitor of many ranks adds thousands a second."""
        fresh = [duration for duration in durations_s if 0.0 <= duration < math.inf]
        if not fresh:
            return
        self.added += len(fresh)
        self._recent.extend(fresh)
        self._sorted = None
        while fresh:
            if not self._block_left:
                self._block_left = self._block_size
                self._peaks.append(0.0)
            here, fresh = fresh[: self._block_left], fresh[self._block_left :]
            self._block_left -= len(here)
            self._peaks[-1] = max(self._peaks[-1], max(here))

    def quantile(self, q: float) -> float:
        """Return the nearest-rank quantile of the window: the maximum while there are few. Needs a sample."""
        ordered = self._in_order()
        return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

    def peak(self) -> float:
        """Return the longest duration that is still remembered. Needs a sample."""
        return max(self._peaks)

    def to_json(self) -> dict[str, Any]:
        """Return a digest: evenly spaced order statistics of the window with its maximum, and the peaks."""
        ordered = self._in_order()
        last = len(ordered) - 1
        count = min(_STORED, len(ordered))
        step = last / (count - 1) if count > 1 else 0.0
        return {
            "window": [_rounded(ordered[round(step * n)]) for n in range(count)],
            "peaks": [_rounded(peak) for peak in self._peaks],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Add what `to_json` described; anything misshapen in it is skipped."""
        self.extend(numbers(data.get("window")))
        self._peaks.extend(numbers(data.get("peaks")))
        self._block_left = 0
        self.added = 0

    def _in_order(self) -> list[float]:
        if self._sorted is None:
            self._sorted = sorted(self._recent)
        return self._sorted


def numbers(value: Any) -> Iterable[float]:
    """Yield the durations in a list of JSON values, at most WINDOW of them; the rest is skipped."""
    if not isinstance(value, list):
        return
    for item in value[:WINDOW]:
        # Also refuses integers that are too large for a float, which JSON may hold.
        if isinstance(item, (int, float)) and not isinstance(item, bool) and 0 <= item < 1e12:
            yield float(item)


def _rounded(duration_s: float) -> float:
    return float(f"{duration_s:.6g}")
