"""One rank's side: what starts at the first use and lasts to the end of the process."""

from resilience_sdk.session.base import Session
from resilience_sdk.session.lifecycle import (
    bootstrap_worker,
    current,
    ensure_started,
    record_exception,
    start_recording,
)

__all__ = [
    "Session",
    "bootstrap_worker",
    "current",
    "ensure_started",
    "record_exception",
    "start_recording",
]
