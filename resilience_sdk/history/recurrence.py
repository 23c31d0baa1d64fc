"""The recurrence of an incident: what the index says of the same thing before, for the pages about one run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.core import environ
from resilience_sdk.core.words import one_line, when
from resilience_sdk.history.exclusion import database_of
from resilience_sdk.history.questions import History
from resilience_sdk.incidents import Incident
from resilience_sdk.incidents.record import signature


def recurrences(run_dir: Path, incidents: Sequence[Incident]) -> dict[str, dict[str, Any]]:
    """Return by incident what the index says of the same thing before, for `why`; nothing where there is no index.

    Never raises: it is an addition to what the run itself tells.
    """
    path = run_dir.resolve()
    named = database_of(path, environ.environment())
    if named is None or ("://" not in named and not os.path.exists(named)):
        return {}
    found = {}
    with contextlib.suppress(Exception):
        history = History(named)
        try:
            for incident in incidents:
                if incident.id and incident.detected_at is not None and incident.kind != "preemption":
                    again = history.recurrence(signature(incident), str(path), incident.detected_at)
                    found.update({incident.id: again} if again is not None else {})
        finally:
            history.close()
    return found


def recurrence_words(again: dict[str, Any]) -> str:
    """Return one such answer in words."""
    number = again["times"]
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    first = f"first {when(again['first_at'])} in {Path(again['first_run']).name}"
    return one_line(f"{number}{ending} time in {again['runs']} of {again['of_runs']} runs, {first}")
