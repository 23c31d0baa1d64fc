"""The monitor's part in the account of time: looks at the ranks, and journals what their time was spent on so far."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from resilience_sdk.core import console
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.goodput.rank_time import Doing, RankTime, node_spent
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.recorder.page_reader import LanePasses
from resilience_sdk.system import hostinfo

_FIRST_S, _POINTS, _MOST_S = 1.0, 60, 300.0
_LATE_POINTS, _SELDOM = 10, 30
_SLICE_NS = 250_000_000  # the kernel counts the time of a process in hundredths of a second
_STILL = 0.1  # of a processor
_STOPPED = ("T", "t")


def pause_s(age_s: float) -> float:
    """Return how long after one event the next one comes, in an attempt whose first step is so long ago."""
    return min(_MOST_S, max(_FIRST_S, age_s / _POINTS))


@attrs.define
class _Process:
    """A process as it was looked at last."""

    at_ns: int
    ticks: int
    doing: Doing | None = None


class TimeWatch:
    """Adds up what the time of a node's ranks is spent on. The monitor's only thread."""

    def __init__(self, journal: Journal) -> None:
        """Begin with nothing."""
        self._journal = journal
        self._has_failed = False
        self._ticks_per_s = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._ranks: dict[Path, RankTime] = {}
        self._processes: dict[Path, _Process] = {}
        self._told_ns: int | None = None
        self._late_ns: int | None = None
        self._is_over = False

    @property
    def is_late(self) -> bool:
        """Whether a step takes longer than usual, so that it matters what the processes do meanwhile."""
        return self._late_ns is not None

    def look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now_ns: int) -> None:
        """Take what each rank has completed since the last look, and tell of it where it is time.

        Never raises: a mistake here must not cost the job its watch.
        """
        if self._has_failed or not completed:
            return
        try:
            self._look(completed, now_ns)
        except Exception as error:  # noqa: BLE001 - see above
            self._has_failed = True
            self._journal.emit(Event.DEGRADED, what="time spent", why=repr(error))
            console.say_once("time spent", f"what the time is spent on is not recorded any more: {error!r}")

    def _look(self, completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]], now_ns: int) -> None:
        late = [
            watched
            for watched, _ in completed
            if watched.alive
            and not watched.snapshot.done
            and self._ranks.setdefault(watched.stem, RankTime()).is_late(watched.snapshot, now_ns)
        ]
        was_late = self.is_late
        is_long = any(self._ranks[watched.stem].is_long(watched.snapshot, now_ns) for watched in late)
        self._late_ns = (self._late_ns or now_ns) if is_long else None
        doing = {watched.stem: self._doing(watched, now_ns) for watched in late}
        for stem in [stem for stem in self._processes if stem not in doing]:
            del self._processes[stem]
        stands = Doing.STOPPED in doing.values() or Doing.BUSY not in doing.values()
        for watched, passes in completed:
            self._ranks.setdefault(watched.stem, RankTime()).look(
                watched.snapshot,
                passes,
                now_ns,
                is_alive=watched.alive,
                doing=doing.get(watched.stem),
                alone=not stands,
            )
        is_over = not any(watched.alive for watched, _ in completed)
        if (is_over and not self._is_over) or self._is_due(now_ns, changes=was_late != self.is_late):
            self._tell(completed, now_ns, is_over=is_over)
        self._is_over = is_over

    def _doing(self, watched: WatchedRank, now_ns: int) -> Doing | None:
        """Return what a process did since it was looked at last; of a short time it did what it did before."""
        fields = hostinfo.stat_fields(watched.snapshot.pid)
        try:
            state, ticks = fields[0], int(fields[11]) + int(fields[12])  # fields 14 and 15 of proc(5)
        except (IndexError, ValueError):
            return None
        before = self._processes.setdefault(watched.stem, _Process(now_ns, ticks))
        if state in _STOPPED:
            self._processes[watched.stem] = _Process(now_ns, ticks, Doing.STOPPED)
        elif now_ns - before.at_ns >= _SLICE_NS:
            used = (ticks - before.ticks) / self._ticks_per_s / ((now_ns - before.at_ns) / 1e9)
            # One that waits for a processor works, as far as it gets one.
            doing = Doing.STILL if used < _STILL and state != "R" else Doing.BUSY
            self._processes[watched.stem] = _Process(now_ns, ticks, doing)
        return self._processes[watched.stem].doing

    def _is_due(self, now_ns: int, *, changes: bool) -> bool:
        """Tell whether it is time to tell: sooner where a step has begun to last long, has ended, or lasts on."""
        began = [rank.began_ns for rank in self._ranks.values() if rank.began_ns is not None]
        if not began:
            return False
        after_s = pause_s((now_ns - min(began)) / 1e9)
        if changes or self._late_ns is not None:
            lasts_s = 0.0 if self._late_ns is None else (now_ns - self._late_ns) / 1e9
            # A job may have a long step again and again, for days.
            least_s = max(0.0 if changes else _FIRST_S, after_s / _SELDOM if after_s > _FIRST_S else 0.0)
            after_s = min(after_s, max(least_s, lasts_s / _LATE_POINTS))
        return (now_ns - (self._told_ns or min(began))) / 1e9 >= after_s

    def _tell(
        self,
        completed: Sequence[tuple[WatchedRank, Sequence[LanePasses]]],
        now_ns: int,
        *,
        is_over: bool,
    ) -> None:
        here = [self._ranks[watched.stem] for watched, _ in completed]
        ranks = [rank for rank in here if rank.began_ns is not None]
        if not ranks:
            return
        self._told_ns = now_ns
        since_s = max(rank.wall_s for rank in ranks)
        began_ns = min(rank.began_ns or 0 for rank in ranks)
        spent = node_spent(ranks)
        steps = [watched.snapshot.completed_steps for watched, _ in completed]
        self._journal.emit(
            Event.TIME_SPENT,
            step=min((step for step in steps if step is not None), default=None),
            age_s=round(max(0.0, (now_ns - began_ns) / 1e9 - since_s), 3),
            since_s=round(since_s, 3),
            is_over=is_over,
            is_late=self.is_late,
            completed=max(rank.completed for rank in ranks),
            brackets_steps=all(rank.brackets_steps for rank in ranks),
            seen=sorted({part.value for rank in ranks for part in rank.parts_seen}),
            **{name: round(seconds, 3) for name, seconds in attrs.asdict(spent).items()},
        )
