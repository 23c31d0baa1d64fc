"""Whether a notice that is still listed has to be obeyed again: pure functions.

Clouds list maintenance for as long as it lies ahead, up to hours. A job that saved and stopped for it, and was started
on the same machine all the same, would be stopped again at once, for ever. So one notice stops the jobs of one run
directory on one machine when it comes, and once more when a save just fits before its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.events import Event
from resilience_sdk.preemption.cloud_http import Notice

_START_S = 5.0  # a job that starts takes longer: less time than this is not worth a second stop


@attrs.frozen
class Heeded:
    """A start of the job that stopped for a notice. Times are Unix seconds of this machine."""

    at: float
    end: float
    """When the ranks would have been ended, as far as it was known at `at`."""


def still_stands(notice: Notice, heeded: Sequence[Heeded], now: float, lead_s: float) -> bool:
    """Tell whether `notice` stops the job that runs at `now` (Unix seconds). `lead_s`: seconds that a save needs."""
    if not heeded:
        return True
    ends = [one.end for one in heeded] + ([] if notice.deadline_unix is None else [notice.deadline_unix])
    last_call = min(ends) - lead_s
    return now >= last_call and all(last_call - one.at > _START_S for one in heeded)


def heeded_before(events: Iterable[Mapping[str, Any]], notice: Notice, boot_id: str) -> list[Heeded]:
    """Return which starts have stopped for `notice` on the machine with this boot id, from the journal's events.

    One that was told and whose ranks agreed on no stop (they crashed first) does not count.
    """
    here = [event for event in events if event.get("boot_id") == boot_id]
    stops = [event["t"] for event in here if event["event"] == Event.STOP_AGREED.value]
    last_stop = max(stops, default=float("-inf"))
    return [
        Heeded(event["t"], event["t"] + float(event.get("time_left_s") or 0.0))
        for event in here
        if event["event"] == Event.PREEMPT_NOTICE.value
        and (event.get("source"), event.get("reason")) == (notice.source, notice.reason)
        and event["t"] <= last_stop
    ]
