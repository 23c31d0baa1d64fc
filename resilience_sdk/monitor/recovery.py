"""When an incident is over: every rank of the next attempt has completed its first heartbeat."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence

from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.journal import Journal
from resilience_sdk.rank_page import RankSnapshot

_LEAVE_IT_S = 5.0  # to the node of rank 0, which closes what is open


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
        if attempt is None or self._closed == attempt:
            return
        for snapshot in ranks:
            if snapshot.first_beat_ns is not None and (snapshot.rank, snapshot.pid) not in self._first_beats:
                self._first_beats.add((snapshot.rank, snapshot.pid))
                self._first_steps[snapshot.rank] = first_step(snapshot)
                self._journal.emit(Event.FIRST_BEAT, rank=snapshot.rank, step=snapshot.step)
            if snapshot.step_is_global and (snapshot.rank, snapshot.pid) not in self._global_steps:
                # Before it there may have been pulses, which tell no step of the run: loading an optimizer's state
                # may make a step of its own.
                self._global_steps.add((snapshot.rank, snapshot.pid))
                self._first_steps[snapshot.rank] = first_step(snapshot)
        if elsewhere is not None:
            self._first_steps.update({page.rank: first_step(page) for page in elsewhere})
            leads, ranks, expected = any(page.rank == 0 for page in ranks), [*ranks, *elsewhere], None
        wanted = set(expected if expected is not None else range(ranks[0].world_size if ranks else 1))
        beaten = {page.rank for page in ranks if page.first_beat_ns is not None}
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
                page = json.loads(path.read_text())
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


def close_warnings(store: IncidentStore, journal: Journal) -> None:
    """Close the incidents of bad numbers after which the training went on: it has ended well, so they are over."""
    with contextlib.suppress(OSError):
        for incident in store.all():
            if (incident.kind, incident.action, incident.recovered_at) == ("numerics", "none", None):
                _mark(store, journal, incident, time.time(), None, None)


def _mark(
    store: IncidentStore, journal: Journal, incident: Incident, at: float, lost: int | None, resumed_at: int | None
) -> None:
    try:
        closed = store.mark_recovered(str(incident.id), at, lost_steps=lost)
    except (OSError, KeyError) as error:
        say_once("recovery", f"cannot note the recovery in incident {incident.id}: {error}")
        return
    journal.emit(Event.RECOVERED, id=incident.id, recovery_s=closed.recovery_s, lost_steps=lost, resumed_at=resumed_at)


def first_step(page: RankSnapshot) -> int:
    """Return the step with which a rank began, from what its page shows after the first beats."""
    lane = page.main_lane
    inside = any(section.kind in ("heartbeat", "pulse") for section in lane.stack)
    return max(0, (lane.step or 0) - lane.beats + (not inside))
