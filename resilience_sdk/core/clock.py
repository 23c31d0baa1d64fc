"""Time, as an argument.

Durations come from the monotonic clock, stamps for people from the wall clock. Readings of the monotonic
clock never leave the host; durations may.
"""

from __future__ import annotations

import time
from typing import Protocol

NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """What decides by time takes one of these, so that tests can move the hands themselves."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary start, never going back, equal in all processes of a host."""
        ...

    def wall_s(self) -> float:
        """Return Unix time in seconds."""
        ...


class SystemClock:
    """The machine's clocks (CLOCK_MONOTONIC and CLOCK_REALTIME)."""

    def monotonic_ns(self) -> int:
        """Return `time.monotonic_ns()`."""
        return time.monotonic_ns()

    def wall_s(self) -> float:
        """Return `time.time()`."""
        return time.time()
