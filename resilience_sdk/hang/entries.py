"""What is known of how long one name takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.hang.samples import REMEMBERED, Samples, numbers

_ATTEMPTS = 32  # attempts whose first occurrences are remembered
_MAX_DOUBLINGS = 4
_FRESH_PARTS = 8
_ALWAYS_FRESH = 256


class Entry:
    """Durations of one name, in seconds: of first occurrences, of all others, and what was known before."""

    def __init__(self, pool: int) -> None:
        """`pool` is the number of ranks whose durations are added."""
        self._pool = pool
        self.samples = Samples(pool)
        self.firsts: deque[float] = deque(maxlen=_ATTEMPTS)
        """The slowest first occurrence of each earlier attempt."""
        self.prior: float | None = None
        """A deadline that was learned under other conditions."""
        self.doublings = 0
        self._quantile = (0, -1.0, 0.0)  # (samples added by then, q, value)
        self._doubled_until = 0
        self._first_now: float | None = None  # the slowest of this attempt
        self._attempt_max: float | None = None
        self._old_value: float | None = None  # rule nvrx: what earlier attempts ended with

    def add_first(self, duration_s: float) -> None:
        """Add a first occurrence; it counts from the next attempt on."""
        self._first_now = max(duration_s, self._first_now or 0.0)

    def extend(self, durations_s: Sequence[float]) -> None:
        """Add occurrences that are not first ones."""
        if not durations_s:
            return
        self.samples.extend(durations_s)
        self._attempt_max = max(max(durations_s), self._attempt_max or 0.0)
        if self.doublings and self.samples.added >= self._doubled_until:
            self.doublings = 0  # a long time of normal work: the doubt is over

    def quantile(self, q: float) -> float:
        """Return a quantile of the window; in a full one it is taken again only when an eighth of it is new.

        A longer duration than any before shows at once by `samples.peak()`. Needs a sample.
        """
        at, known, value = self._quantile
        stale = self.samples.added - at > len(self.samples) // _FRESH_PARTS
        if known != q or stale or len(self.samples) < _ALWAYS_FRESH:
            value = self.samples.quantile(q)
            self._quantile = (self.samples.added, q, value)
        return value

    def double(self) -> None:
        """Doubt the deadline: it fired and nothing was found."""
        self.doublings = min(self.doublings + 1, _MAX_DOUBLINGS)
        self._doubled_until = self.samples.added + REMEMBERED * self._pool

    def begin_attempt(self, factor: float) -> None:
        """Close what the last attempt taught."""
        if self._first_now is not None:
            self.firsts.append(self._first_now)
        self._first_now = None
        if self._attempt_max is not None:
            self._old_value = self.nvrx_value(factor)
        self._attempt_max = None

    def nvrx_value(self, factor: float) -> float | None:
        """Return NVRx's deadline: `factor` x maximum, averaged with what earlier attempts ended with."""
        if self._attempt_max is None:
            return self._old_value
        new = factor * self._attempt_max
        return new if self._old_value is None else 0.5 * new + 0.5 * self._old_value

    def demote(self, scale: float, deadline_s: float | None) -> None:
        """Make a mere prior of what was restored: the deadline that it gave, `scale` times."""
        self.samples = Samples(self._pool)
        self._quantile = (0, -1.0, 0.0)
        self.prior = None if deadline_s is None else deadline_s * scale
        self.firsts = deque((first * scale for first in self.firsts), maxlen=_ATTEMPTS)
        self._old_value = None if self._old_value is None else self._old_value * scale

    def to_json(self, factor: float) -> dict[str, Any]:
        """Return the entry as JSON values."""
        first_now = [] if self._first_now is None else [self._first_now]
        return {
            **self.samples.to_json(),
            "firsts": [*self.firsts, *first_now],
            "value": self.nvrx_value(factor),
            "doublings": self.doublings,
        }

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take what `to_json` described into an empty entry; anything misshapen is skipped."""
        self.samples.restore(data)
        self.firsts.extend(numbers(data.get("firsts")))
        self._old_value = next(iter(numbers([data.get("value")])), None)
        doublings = data.get("doublings")
        if isinstance(doublings, int) and doublings > 0:
            self.doublings = min(doublings, _MAX_DOUBLINGS)
            self._doubled_until = REMEMBERED * self._pool
