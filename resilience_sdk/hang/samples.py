"""Durations of one name: a sliding window for its quantile, and a longer memory for its peaks."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
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
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self._peaks: deque[float] = deque(maxlen=BLOCKS)
        self._block_left = 0
        self.added = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, duration_s: float) -> None:
        """Add one duration; what is no duration (negative, not finite) is ignored."""
        if not 0.0 <= duration_s < math.inf:
            return
        self.added += 1
        if len(self._recent) >= WINDOW:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(duration_s)
        insort(self._sorted, duration_s)
        if self._block_left:
            self._block_left -= 1
            self._peaks[-1] = max(self._peaks[-1], duration_s)
        else:
            self._block_left = self._block_size - 1
            self._peaks.append(duration_s)

    def quantile(self, q: float) -> float:
        """Return the nearest-rank quantile of the window: the maximum while there are few. Needs a sample."""
        return self._sorted[max(0, math.ceil(q * len(self._sorted)) - 1)]

    def peak(self) -> float:
        """Return the longest duration that is still remembered. Needs a sample."""
        return max(self._peaks)

    def to_json(self) -> dict[str, Any]:
        """Return a digest: evenly spaced order statistics of the window with its maximum, and the peaks."""
        last = len(self._sorted) - 1
        count = min(_STORED, len(self._sorted))
        step = last / (count - 1) if count > 1 else 0.0
        return {
            "window": [_rounded(self._sorted[round(step * n)]) for n in range(count)],
            "peaks": [_rounded(peak) for peak in self._peaks],
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Add what `to_json` described; anything misshapen in it is skipped."""
        for duration in numbers(data.get("window")):
            self.add(duration)
        self._peaks.extend(numbers(data.get("peaks")))
        self._block_left = 0
        self.added = 0


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
