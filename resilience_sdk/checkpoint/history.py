"""The journal's word on checkpoints.

Setbacks and rollbacks of earlier attempts, and what a checkpointer journals itself.

Three questions: how often does this job fail (for the interval between saves), how long does a save take (for one that
has to fit into the time that is left), and after which checkpoints has the job failed soon again and again (so that a
resume had better take an older one).
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

import resilience_sdk
from resilience_sdk.core.journal import CURVES, Event, Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import InjectedFaults

# What is assumed of a job that nothing is known of: one failure in this time, as if it had been seen.
PRIOR_MTTF_S = 3 * 3600.0
# A failure counts against the checkpoint that the attempt began with if it came within this time after the
# resume, and before the attempt had saved another one.
SOON_S = 300.0
FAILURES_FOR_QUARANTINE = 2

_FAULTS = frozenset({"crash", "hang", "numerics"})
# What is known to have come from outside says nothing about a checkpoint, and an error in the script is repaired there.
_CATEGORIES_FROM_OUTSIDE = frozenset({"hardware", "host", "network", "scheduler", "storage", "user"})
_CAUSES_FROM_OUTSIDE = frozenset({"rank_killed_sigkill"})


@attrs.frozen
class CheckpointId:
    """One checkpoint: its name, and when it was written (Unix seconds), since a step can be saved again."""

    name: str
    created_at: float


@attrs.frozen
class Setbacks:
    """How often a run failed soon after it had been resumed from a checkpoint, and the newest incident."""

    count: int
    incident: str | None


def mean_time_to_failure_s(events: Iterable[Mapping[str, Any]], prior_s: float = PRIOR_MTTF_S) -> float:
    """Return the expected time between two failures in seconds, from journal events in order of time.

    That is (prior + time seen running) / (1 + failures seen): the posterior mean of the rate's inverse where the
    prior counts as one failure. With nothing seen it is the prior; it follows what is seen within a few failures.
    Preemptions with a notice are no failures, as they lose nothing, nor is what an injected fault led to.
    """
    begun: dict[tuple[Any, Any, Any], list[float]] = {}
    failures: set[tuple[Any, ...]] = set()
    injected = InjectedFaults()
    life = 0
    for event in events:
        if event.get("event") == Event.RUN_START.value:
            life += 1  # a requeued job has the same key and counts its attempts from 0 again
        attempt = (life, event.get("job"), event.get("attempt"))
        span = begun.setdefault(attempt, [float(event["t"]), 0.0])
        span[1] = float(event["t"])
        if not injected.led_to(event) and _is_fault(event):
            failures.add((*attempt, event.get("id")))
    running_s = sum(max(0.0, last - first) for first, last in begun.values())
    return (prior_s + running_s) / (1 + len(failures))


def newest_save_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Return how many seconds the newest checkpoint took until it was committed; 0 where there is none."""
    seconds = 0.0
    for event in events:
        taken = event.get("seconds")
        if event.get("event") == Event.CKPT_COMMIT.value and isinstance(taken, (int, float)):
            seconds = float(taken)
    return seconds


def find_setbacks(events: Iterable[Mapping[str, Any]]) -> dict[CheckpointId, Setbacks]:
    """Return the failures soon after a resume, by checkpoint, from journal events in order of time.

    One attempt counts once, whatever was reported of it. A failure that is known to have come from outside
    (hardware, network, storage, a SIGKILL) does not count.
    """
    resumed: dict[tuple[Any, Any], tuple[CheckpointId, float]] = {}
    found: dict[CheckpointId, list[str | None]] = defaultdict(list)
    for event in events:
        attempt = (event.get("job"), event.get("attempt"))
        name = event.get("event")
        if name == Event.RUN_START.value:
            resumed.clear()  # a requeued job has the same key and counts its attempts from 0 again
        elif name == Event.RESUME.value:
            checkpoint, created_at = event.get("checkpoint"), event.get("created_at")
            if isinstance(checkpoint, str) and isinstance(created_at, (int, float)):
                resumed[attempt] = (CheckpointId(checkpoint, float(created_at)), float(event["t"]))
        elif name == Event.CKPT_COMMIT.value:
            resumed.pop(attempt, None)
        elif _is_fault(event) and not _is_from_outside(event) and attempt in resumed:
            identity, since = resumed.pop(attempt)
            if float(event["t"]) - since <= SOON_S:
                incident = event.get("id")
                found[identity].append(incident if isinstance(incident, str) else None)
    return {identity: Setbacks(len(ids), ids[-1]) for identity, ids in found.items()}


def find_quarantined(events: Iterable[Mapping[str, Any]]) -> dict[CheckpointId, str]:
    """Return the checkpoints that a resume passes over while there is an older one, each with the reason."""
    return {
        identity: f"the run failed soon after it was resumed from it, {seen.count} times"
        + (f" (last: {seen.incident})" if seen.incident else "")
        for identity, seen in find_setbacks(events).items()
        if seen.count >= FAILURES_FOR_QUARANTINE
    }


def _is_fault(event: Mapping[str, Any]) -> bool:
    """Tell whether it is an incident that ended an attempt; a run that was only warned of bad numbers went on."""
    is_warning = event.get("kind") == "numerics" and event.get("action") == "none"
    return event.get("event") == Event.INCIDENT.value and event.get("kind") in _FAULTS and not is_warning


def _is_from_outside(event: Mapping[str, Any]) -> bool:
    return event.get("category") in _CATEGORIES_FROM_OUTSIDE or event.get("cause") in _CAUSES_FROM_OUTSIDE


_LEFT = ("rollback", "restart")  # what the rank did that emitted it: `restart` reads the same batches again
_CLOCKS_APART_S = 600.0  # by which the clocks of two nodes may differ


@attrs.frozen
class Rollback:
    """One way back: the step whose numbers were bad, and when its attempt was over.

    `until` (Unix seconds of rank 0's node, which writes the manifests) is infinite where no attempt has followed yet.
    """

    step: int
    what: str
    until: float
    skip_batches: int

    def why_bad(self, step: int, created_at: float) -> str | None:
        """Return why the checkpoint after `step` completed steps, written then, is not to be resumed; or None."""
        if step <= self.step or created_at >= self.until:
            return None
        return f"it was saved after step {self.step}, at which {self.what}"


def find_rollbacks(events: Iterable[Mapping[str, Any]]) -> tuple[Rollback, ...]:
    """Return the rollbacks among journal events in order of time; a step that is no global one says nothing."""
    events = tuple(events)
    starts = [e for e in events if e.get("event") == Event.RANK_START.value and e.get("rank") == 0]
    return tuple(
        Rollback(
            event["step"],
            f"{event.get('what')} was {event.get('found')}",
            min((float(start["t"]) for start in starts if _follows(start, event)), default=float("inf")),
            _count(event.get("skip_batches")),
        )
        for event in events
        if _is_rollback(event)
    )


def skipped_steps(rollbacks: Iterable[Rollback]) -> list[int]:
    """Return the numbers of the steps whose batches are left out, sorted."""
    return sorted({step for back in rollbacks for step in range(back.step, back.step + back.skip_batches)})


def _is_rollback(event: Mapping[str, Any]) -> bool:
    return (
        event.get("event") == Event.NUMERICS.value
        and event.get("action") in _LEFT
        and event.get("is_global") is True
        and isinstance(event.get("step"), int)
    )


def _follows(start: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Tell whether rank 0 started after the rollback; its clock may be another one, so attempts count first."""
    ahead_s = float(start["t"]) - float(event["t"])
    attempt, before = start.get("attempt"), event.get("attempt")
    is_of_job = start.get("job") == event.get("job")
    if is_of_job and isinstance(attempt, int) and isinstance(before, int) and attempt > before:
        return ahead_s > -_CLOCKS_APART_S
    return ahead_s > 0


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000 else 0


@attrs.frozen
class JournalPlace:
    """Where a rank journals what concerns one run directory."""

    journal: Journal
    is_own: bool = False
    """Nobody else writes to `journal`: it is closed with the record."""
    elsewhere: Path | None = None
    """The journal directory of the job, where that is another one: incidents are journalled there."""


class CheckpointRecord:
    """The events about checkpoints of one run directory, on one rank.

    They go to the journal that was given, else to the rank's own; nowhere in a process that records nothing. Which one
    that is, is asked at the first event of each process: a rank may be forked after its checkpointer was made.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        journal: Journal | None,
        find: Callable[[RunDirectory], JournalPlace | None] | None = None,
    ) -> None:
        """Record in `journal`; without one, where `find` says: by default what the session of this process says."""
        self._run_dir = run_dir
        self._find = find or _find_place
        self._given = None if journal is None else JournalPlace(journal)
        self._found: JournalPlace | None = None
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
        known = read_journal(self._run_dir.journal, without=CURVES).events
        if place is None or place.elsewhere is None:
            return known
        elsewhere = read_journal(place.elsewhere, without=CURVES).events
        return tuple(sorted([*known, *elsewhere], key=lambda event: float(event["t"])))

    def _place(self) -> JournalPlace | None:
        if self._given is not None:
            return self._given
        if self._found is None or self._found_by != os.getpid():
            self._found, self._found_by = self._find(self._run_dir), os.getpid()
            if self._found is not None and self._found.is_own:  # a sweep makes many checkpointers, each with a file
                weakref.finalize(self, self._found.journal.close).atexit = False
        return self._found


def _find_place(run_dir: RunDirectory) -> JournalPlace | None:
    own = resilience_sdk._own_checkpoints()
    return None if own is None else cast(JournalPlace | None, own.find_place(run_dir))
