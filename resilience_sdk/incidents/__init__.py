"""Incidents: what went wrong, one directory each under `RUN_DIR/incidents`, for programs and for people.

In come records of whoever saw a fault: launcher, monitor or rank. `record` decides what an incident holds and what
`report.md` says, `store` that each fault has one directory whoever writes first, `stalls` what stood still when a job
was ended from outside.
"""

from resilience_sdk.incidents.record import (
    ACTIONS,
    CURE,
    KINDS,
    STALL,
    Culprit,
    Evidence,
    Incident,
    InjectedFaults,
    compact_ranks,
    count_words,
    event_fields,
    headline,
    step_words,
)
from resilience_sdk.incidents.stalls import Stall, StalledRank, stall_at, standing_words
from resilience_sdk.incidents.store import IncidentStore

__all__ = [
    "ACTIONS",
    "CURE",
    "KINDS",
    "STALL",
    "Culprit",
    "Evidence",
    "Incident",
    "IncidentStore",
    "InjectedFaults",
    "Stall",
    "StalledRank",
    "compact_ranks",
    "count_words",
    "event_fields",
    "headline",
    "stall_at",
    "standing_words",
    "step_words",
]
