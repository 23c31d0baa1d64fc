"""Intervals in which a rank had nothing open, seen through polls of its page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resilience_sdk.rank_page import RankSnapshot

_NANO = 1e9


class GapWatch:
    """Watches one rank and yields its completed out-of-section intervals.

    A page tells when its lane last left a block and when the open ones were entered, so a gap is exact when a
    poll falls into the block after it, and else short by at most one poll. Gaps between two polls are missed;
    they are shorter than any deadline.
    """

    def __init__(self) -> None:
        self._began_ns: int | None = None
        self._seen_s = 0.0

    def look(self, snapshot: RankSnapshot, now_ns: int) -> list[float]:
        """Return the gaps, in seconds, that ended since the last look; start-up and pauses do not count."""
        lane = snapshot.main_lane
        counts = snapshot.beats > 0 and not snapshot.done and snapshot.paused is None
        if not counts or lane.last_ns <= 0:
            self._began_ns = None
            return []
        ended: list[float] = []
        began = self._began_ns
        if lane.stack:
            entered = lane.stack[0].entered_ns
            if lane.last_ns <= entered and lane.last_ns == began:
                ended.append((entered - began) / _NANO)
            elif began is not None:
                ended.append(self._seen_s)
            self._began_ns = None
        else:
            if began is not None and began != lane.last_ns:
                ended.append(self._seen_s)
            self._began_ns = lane.last_ns
            self._seen_s = max(0.0, (now_ns - lane.last_ns) / _NANO)
        return ended
