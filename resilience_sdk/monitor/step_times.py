"""The monitor's sums of what its ranks' steps took, journalled now and then and when the ranks are gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.goodput.step_time import RankSteps, node_facts
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.recorder.page_reader import LanePasses

_FIRST_AFTER_S = 10.0
_TIMES = 1.5
"""Each pause between two events beside the one before: a short run tells soon, a long one seldom."""
_MOST_S = 300.0


class StepTimeWatch:
    """Adds up, and tells the sums of the attempt so far. The monitor's only thread."""

    def __init__(self, journal: Journal) -> None:
        """Begin with nothing."""
        self._journal = journal
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._ranks: dict[Path, tuple[int, RankSteps]] = {}
        self._due_at: float | None = None
        self._pause_s = _FIRST_AFTER_S
        self._told_steps = 0

    def look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now: float) -> None:
        """Take what each rank has completed since the last look; `now` is a steady clock's, in seconds."""
        for watched, passes in completed:
            if watched.stem not in self._ranks:
                self._ranks[watched.stem] = watched.rank, RankSteps()
            page = watched.snapshot
            self._ranks[watched.stem][1].take(passes, page.beats, page.main_lane.beat_ns)
        if self._due_at is None:
            self._due_at = now + self._pause_s
        is_over = bool(completed) and not any(watched.alive for watched, _ in completed)
        if is_over or now >= self._due_at:
            self._pause_s = min(_MOST_S, self._pause_s * _TIMES)
            self._due_at = now + self._pause_s
            self._tell()

    def _tell(self) -> None:
        facts = node_facts(dict(self._ranks.values()))
        if facts is not None and facts["steps"] > self._told_steps:
            self._told_steps = facts["steps"]
            self._journal.emit(Event.STEP_TIME, **facts)
