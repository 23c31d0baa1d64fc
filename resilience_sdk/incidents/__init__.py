"""Incidents: what went wrong, one directory each under `RUN_DIR/incidents`, for programs and for people."""

from resilience_sdk.incidents.record import ACTIONS, CURE, KINDS, Culprit, Evidence, Incident, event_fields
from resilience_sdk.incidents.report import compact_ranks, headline
from resilience_sdk.incidents.steps import count_words, step_words
from resilience_sdk.incidents.store import IncidentStore

__all__ = [
    "ACTIONS",
    "CURE",
    "KINDS",
    "Culprit",
    "Evidence",
    "Incident",
    "IncidentStore",
    "compact_ranks",
    "count_words",
    "event_fields",
    "headline",
    "step_words",
]
