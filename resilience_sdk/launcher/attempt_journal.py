"""What has been journalled since an attempt began, by all of its processes on all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.journal import journal_sizes, read_journal


class AttemptJournal:
    """Reads what follows its making, each part of it once.

    An attempt's events are told by their place in the files, not by their time: clocks of hosts differ, and a requeued
    job has the key and the attempt numbers of the one before. And the journal of a long run is large.
    """

    def __init__(self, directory: Path, job: str, attempt: int) -> None:
        """Note how far the files in `directory` have come; events are those of `attempt` of `job`."""
        self._directory = directory
        self._job = job
        self._attempt = attempt
        self._read_to: Mapping[str, int] = journal_sizes(directory)
        self._events: list[Mapping[str, Any]] = []

    def events(self) -> Sequence[Mapping[str, Any]]:
        """Return the attempt's events up to now, by time. Never raises."""
        new = read_journal(self._directory, since=self._read_to)
        self._read_to = {**self._read_to, **new.read_to}
        ours = [event for event in new.events if (event.get("job"), event.get("attempt")) == (self._job, self._attempt)]
        if ours:
            self._events = sorted([*self._events, *ours], key=lambda event: float(event["t"]))
        return self._events
