"""`Record`: where a checkpointer journals what it does, and what the journal says of the attempts before."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

import resilience_sdk
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal, read_journal
from resilience_sdk.run_directory import RunDirectory


@attrs.frozen
class Place:
    """Where a rank journals what concerns one run directory."""

    journal: Journal
    is_own: bool = False
    """Nobody else writes to `journal`: it is closed with the record."""
    elsewhere: Path | None = None
    """The journal directory of the job, where that is another one: incidents are journalled there."""


class Record:
    """The events about checkpoints of one run directory, on one rank.

    They go to the journal that was given, else to the rank's own; nowhere in a process that records nothing. Which one
    that is, is asked at the first event of each process: a rank may be forked after its checkpointer was made.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        journal: Journal | None,
        find: Callable[[RunDirectory], Place | None] | None = None,
    ) -> None:
        """Record in `journal`; without one, where `find` says: by default what the session of this process says."""
        self._run_dir = run_dir
        self._find = find or _find_place
        self._given = None if journal is None else Place(journal)
        self._found: Place | None = None
        self._found_by: int | None = None

    def emit(self, event: Event, step: int, **fields: Any) -> None:
        """Journal an event, if there is a journal. Never raises. Any thread."""
        place = self._place()
        if place is not None:
            place.journal.emit(event, step=step, **fields)

    def degraded(self, what: str, why: str) -> None:
        """Journal what the SDK could not do, if there is a journal. Never raises."""
        place = self._place()
        if place is not None:
            place.journal.emit(Event.DEGRADED, what=what, why=why)

    def events(self) -> tuple[Mapping[str, Any], ...]:
        """Return all events of the run directory by time, with those of this job where its journal is elsewhere."""
        place = self._place()
        known = read_journal(self._run_dir.journal).events
        if place is None or place.elsewhere is None:
            return known
        return tuple(sorted([*known, *read_journal(place.elsewhere).events], key=lambda event: float(event["t"])))

    def _place(self) -> Place | None:
        if self._given is not None:
            return self._given
        if self._found is None or self._found_by != os.getpid():
            self._found, self._found_by = self._find(self._run_dir), os.getpid()
            if self._found is not None and self._found.is_own:  # a sweep makes many checkpointers, each with a file
                weakref.finalize(self, self._found.journal.close).atexit = False
        return self._found


def _find_place(run_dir: RunDirectory) -> Place | None:
    own = resilience_sdk._own_checkpoints()
    return None if own is None else cast("Place | None", own.find_place(run_dir))
