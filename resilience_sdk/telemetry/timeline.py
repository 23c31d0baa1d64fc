"""The time of a run by the monotonic clocks of its journal: a wall clock that is set is no time that has passed."""

from __future__ import annotations

import attrs

from resilience_sdk.telemetry.plain import clean_time

_NANO = 1e9
_MOST_NS = 1 << 63


@attrs.define
class Timeline:
    """Tells Unix times as a wall clock would that nobody sets: the first one of each boot counts, and time from there.

    Between two boots there is only the wall clock.
    """

    _began: dict[str, float] = attrs.field(factory=dict)
    """Of each boot, at which Unix time its monotonic clock was 0."""

    def at(self, wall_s: float, mono_ns: object, boot_id: object) -> float:
        """Return when something was; all of one host."""
        wall_s = clean_time(wall_s)
        if not isinstance(mono_ns, int) or abs(mono_ns) >= _MOST_NS or not isinstance(boot_id, str) or not boot_id:
            return wall_s
        mono_s = mono_ns / _NANO
        return clean_time(self._began.setdefault(boot_id, wall_s - mono_s) + mono_s)
