"""The end of an incident.

Each rank of the next attempt has completed a heartbeat; and hangs that stood when ranks were ended from outside.

A hang that was only reported may end by itself: then every rank of the same attempt has completed another one.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.incidents.stalls import WENT_ON
from resilience_sdk.recorder.page_reader import RankSnapshot

_LEAVE_IT_S = 5.0  # to the node of rank 0, which closes what is open


class _Standing:
    """A hang that was reported, and how far each rank process (rank and pid) was then."""

    def __init__(self, beats: dict[tuple[int, int], int]) -> None:
        """Count new heartbeats from `beats`; a rank that is not among them was not there."""
        self._beats = beats
        self.over_ns: int | None = None
        """When every rank was first seen to have moved."""

    def moved_ns(self, page: RankSnapshot) -> int | None:
        """Return when a rank completed its newest step, or its training; None while it has done neither since."""
        pid, beats = _done(page)
        if beats > self._beats.get((page.rank, pid), 0):
            return page.main_lane.beat_ns or page.main_lane.last_ns
        return page.main_lane.last_ns if page.done or page.exit_state == "clean" else None


class RecoveryWatch:
    """Closes the open incidents of earlier attempts, once per attempt."""

    def __init__(self, store: IncidentStore, journal: Journal, *, began: float | None = None) -> None:
        """Watch over the incidents of `store`.

        `began`: Unix seconds since when this job runs, None where that is not known. Attempts count from 0 in each
        job, so what an earlier job left open is over with the first attempt that runs again, whatever its number.
        """
        self._store = store
        self._began = began
        self._journal = journal
        self._first_beats: set[tuple[int, int]] = set()
        self._global_steps: set[tuple[int, int]] = set()
        self._first_steps: dict[int, int] = {}
        self._closed: int | None = None
        self._complete: tuple[int, float] | None = None
        self._seen: tuple[int, int] | None = None  # of the folder of incidents, when it was last read
        self._standing: dict[str, _Standing] = {}

    def look(
        self,
        attempt: int | None,
        ranks: Sequence[RankSnapshot],
        expected: list[int] | None,
        elsewhere: Sequence[RankSnapshot] | None = None,
    ) -> None:
        """Note first beats, and close what is open when all have come.

        Args:
            attempt: The attempt that runs now.
            ranks: Its pages on this node.
            expected: Its ranks on this node, None for the whole world.
            elsewhere: Last known pages on other nodes, their times moved to our clock; None with one node.
        """
        if attempt is None:
            return
        self._look_at_standing(attempt, ranks, expected, elsewhere)
        if self._closed == attempt:
            return
        for snapshot in ranks:
            if _has_begun(snapshot) and (snapshot.rank, snapshot.pid) not in self._first_beats:
                self._first_beats.add((snapshot.rank, snapshot.pid))
                self._first_steps[snapshot.rank] = first_step(snapshot)
                step = None if snapshot.step is None else first_step(snapshot)
                since_ns = snapshot.first_beat_ns or time.monotonic_ns()
                ago_s = round(max(0, time.monotonic_ns() - since_ns) / 1e9, 3)
                self._journal.emit(Event.FIRST_BEAT, rank=snapshot.rank, step=step, ago_s=ago_s)
            if snapshot.step_is_global and (snapshot.rank, snapshot.pid) not in self._global_steps:
                # Before it there may have been pulses, which tell no step of the run: loading an optimizer's state
                # may make a step of its own.
                self._global_steps.add((snapshot.rank, snapshot.pid))
                self._first_steps[snapshot.rank] = first_step(snapshot)
        if elsewhere is not None:
            self._first_steps.update({page.rank: first_step(page) for page in elsewhere})
            leads, ranks, expected = any(page.rank == 0 for page in ranks), [*ranks, *elsewhere], None
        wanted = set(expected if expected is not None else range(ranks[0].world_size if ranks else 1))
        beaten = {page.rank for page in ranks if _has_begun(page)}
        if not wanted or not wanted <= beaten:
            return
        if elsewhere is not None and not leads and not self._has_waited(attempt):
            return
        self._closed = attempt
        newest_ns = max(page.first_beat_ns or 0 for page in ranks)
        at = time.time() - (time.monotonic_ns() - newest_ns) / 1e9
        is_global = all(page.step_is_global for page in ranks)
        resumed_at = min((self._first_steps[rank] for rank in wanted), default=0) if is_global else None
        for incident in self._store.open_recoveries():
            if incident.id is not None and self._is_over(incident, attempt):
                self._close(incident, at, resumed_at)

    # -- hangs of this attempt that were only reported

    def _look_at_standing(
        self,
        attempt: int,
        ranks: Sequence[RankSnapshot],
        expected: list[int] | None,
        elsewhere: Sequence[RankSnapshot] | None,
    ) -> None:
        """Close the hangs of this attempt that went on by themselves: every rank has completed a step since.

        The node of rank 0 does it, or any other one some seconds later. A world of which ranks are unseen stays open.
        """
        all_ranks = [*ranks, *(elsewhere or ())]
        self._find_standing(attempt, all_ranks)
        if not self._standing:
            return
        wanted = set(expected if expected is not None and elsewhere is None else _world(all_ranks))
        for known, standing in list(self._standing.items()):
            moved_ns = {page.rank: standing.moved_ns(page) for page in all_ranks}
            times = [at_ns for rank in wanted if (at_ns := moved_ns.get(rank)) is not None]
            if not wanted or len(times) < len(wanted):
                continue
            standing.over_ns = standing.over_ns or time.monotonic_ns()
            leads = elsewhere is None or any(page.rank == 0 for page in ranks)
            if leads or time.monotonic_ns() - standing.over_ns > _LEAVE_IT_S * 1e9:
                del self._standing[known]
                at = time.time() - (time.monotonic_ns() - max(times)) / 1e9
                self._close_standing(known, at)

    def _find_standing(self, attempt: int, ranks: Sequence[RankSnapshot]) -> None:
        """Read the incidents again where there are new ones, and note how far each rank was at a new hang."""
        seen = _stamp(self._store.path)
        if seen is None or (attempt, seen) == self._seen:
            return
        self._seen = attempt, seen
        found: dict[str, _Standing] = {}
        with contextlib.suppress(OSError):
            for incident in self._store.all():
                mine = incident.attempt == attempt and not self._is_over(incident, attempt)
                if mine and incident.id is not None and is_reported_only(incident):
                    at_first = {page.rank: _done(page) for page in ranks}
                    written = _pages_of(self._store, incident.id)
                    known = {(rank, pid): beats for rank, (pid, beats) in {**at_first, **written}.items()}
                    found[incident.id] = self._standing.get(incident.id) or _Standing(known)
        self._standing = found

    def _close_standing(self, incident_id: str, at: float) -> None:
        with contextlib.suppress(OSError, KeyError):
            incident = self._store.get(incident_id)
            if is_reported_only(incident):  # nobody has ended it, and no other node was faster
                _mark(
                    self._store, self._journal, incident, max(at, incident.detected_at or at), None, None, why=WENT_ON
                )

    def _is_over(self, incident: Incident, attempt: int) -> bool:
        """Tell whether an attempt that runs comes after the one in which the incident happened."""
        if self._began is not None and incident.detected_at is not None and incident.detected_at < self._began:
            return True
        return incident.attempt is not None and incident.attempt < attempt

    def _has_waited(self, attempt: int) -> bool:
        """Tell whether the node of rank 0 has had the time to close what is open."""
        if self._complete is None or self._complete[0] != attempt:
            self._complete = attempt, time.monotonic()
        return time.monotonic() - self._complete[1] > _LEAVE_IT_S

    def _close(self, incident: Incident, at: float, resumed_at: int | None) -> None:
        reached = self._reached(str(incident.id)) if resumed_at is not None else None
        lost = None if reached is None or resumed_at is None else max(0, reached - resumed_at)
        _mark(self._store, self._journal, incident, at, lost, resumed_at)

    def _reached(self, incident_id: str) -> int | None:
        """Return how many steps were complete when the incident happened, if they were global."""
        reached: list[int] = []
        for path in (self._store.path / incident_id / "pages").glob("rank-*.json"):
            try:
                page = json.loads(read_text(path))
                lane = next((lane for lane in page["lanes"] if lane["beats"]), None)
                if lane is None:
                    continue
                if not lane["step_is_global"]:
                    return None
                inside = any(section["kind"] in ("heartbeat", "pulse") for section in lane["stack"])
                reached.append(int(lane["step"]) + (not inside))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        # A step is complete when every rank has completed it; a heartbeat that an exception ended counts on its own.
        return min(reached, default=None)


_MAX_PREPARATION = 20
"""Collectives, as they are sampled: behind that many they are taken for steps, whatever else there is."""


def _has_begun(page: RankSnapshot) -> bool:
    """Tell whether a rank is behind its start-up, in which wrapping a model may take collectives.

    Where an optimizer was made, its steps are to be expected, or heartbeats of the script.
    """
    if page.first_beat_ns is None:
        return False
    is_sampled = page.trains and page.beat_source == "collectives"
    return not is_sampled or page.main_lane.beats > _MAX_PREPARATION


def close_warnings(store: IncidentStore, journal: Journal, *, since: float) -> None:
    """Close the incidents of bad numbers after which the training went on: it has ended well, so they are over.

    So are hangs since then (Unix seconds) that were only reported.
    """
    with contextlib.suppress(OSError, KeyError):
        for incident in store.all():
            if (
                is_reported_only(incident) and (incident.detected_at or 0.0) >= since
            ):  # when it went on, nobody has seen
                store.update(str(incident.id), recovered_at=time.time())
                journal.emit(Event.RECOVERED, id=incident.id, recovery_s=None, lost_steps=None, why=WENT_ON)
            elif (incident.kind, incident.action, incident.recovered_at) == ("numerics", "none", None):
                _mark(store, journal, incident, time.time(), None, None)


def _mark(
    store: IncidentStore,
    journal: Journal,
    incident: Incident,
    at: float,
    lost: int | None,
    resumed_at: int | None,
    **why: str,
) -> None:
    try:
        closed = store.mark_recovered(str(incident.id), at, lost_steps=lost)
    except (OSError, KeyError) as error:
        say_once("recovery", f"cannot note the recovery in incident {incident.id}: {error}")
        return
    told: dict[str, Any] = {
        "id": incident.id,
        "recovery_s": closed.recovery_s,
        "lost_steps": lost,
        "resumed_at": resumed_at,
        **why,
    }
    journal.emit(Event.RECOVERED, **told)


def is_reported_only(incident: Incident) -> bool:
    """Tell whether an incident is a hang that nobody has ended, and of which it is not known that it went on."""
    return (incident.kind, incident.action, incident.recovered_at) == ("hang", "none", None)


def _pages_of(store: IncidentStore, incident_id: str) -> dict[int, tuple[int, int]]:
    """Return pid and completed heartbeats of each rank as its page had them when the incident was written."""
    found = {}
    for path in (store.path / incident_id / "pages").glob("rank-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            page = json.loads(read_text(path))
            found[int(page["rank"])] = int(page["pid"]), int(page["beats"])
    return found


def _done(page: RankSnapshot) -> tuple[int, int]:
    return page.pid, page.beats


def _world(ranks: Sequence[RankSnapshot]) -> range:
    return range(ranks[0].world_size if ranks else 0)


def _stamp(path: Path) -> int | None:
    """Return what changes when something is made in a folder; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def first_step(page: RankSnapshot) -> int:
    """Return the step with which a rank began, from what its page shows after the first beats."""
    lane = page.main_lane
    return max(0, (lane.step or 0) - lane.beats + (not lane.is_in_step))
