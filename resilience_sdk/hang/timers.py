"""The running deadlines of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from resilience_sdk.hang.deadlines import OUT_OF_SECTION, STARTUP, DeadlineBook, Limit
from resilience_sdk.hang.states import RankState
from resilience_sdk.rank_page.layout import COLLECTIVES_EVERY_S

if TYPE_CHECKING:
    from resilience_sdk.rank_page import OpenSection, RankSnapshot

_NANO = 1e9
_BEATS = ("heartbeat", "pulse")


@attrs.frozen
class Timer:
    """One thing that a rank is in, since when, and how long it may be."""

    name: str
    kind: str
    """Kind of the section, else OUT_OF_SECTION or STARTUP."""
    elapsed_s: float
    limit: Limit | None
    first: bool = False
    """Whether it is the first occurrence of its name on the rank."""

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.limit is not None and self.elapsed_s >= self.limit.seconds

    @property
    def over_s(self) -> float:
        """Seconds past the deadline; negative before it."""
        return self.elapsed_s - self.limit.seconds if self.limit is not None else -float("inf")

    @property
    def in_first_budget(self) -> bool:
        """Whether this is a first occurrence that is still within the budget of one."""
        return self.first and self.limit is not None and not self.limit.is_set and not self.expired


@attrs.frozen
class Watch:
    """A rank and all its running timers, outermost first."""

    state: RankState
    timers: tuple[Timer, ...]

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.state.rank

    @property
    def expired(self) -> tuple[Timer, ...]:
        """Timers whose deadline has passed."""
        return tuple(timer for timer in self.timers if timer.expired)

    @property
    def worst(self) -> Timer | None:
        """The expired timer that is furthest over its deadline."""
        return max(self.expired, key=lambda timer: timer.over_s, default=None)

    def past(self, book: DeadlineBook) -> bool:
        """Tell whether the rank is past what may reasonably be granted to it, its own circumstances included.

        An expired deadline, inner or outer, is not enough while the innermost section is in its first
        occurrence and within that budget. Learned deadlines also do not count within the first heartbeat
        (warm-up), nor while the stack shows work that is known to be slow.
        """
        if self.state.past is not None:
            return self.state.past
        if not self.expired:
            return False
        if self.timers[-1].in_first_budget:
            return False
        if any(timer.limit is not None and timer.limit.is_set for timer in self.expired):
            return True
        if any(timer.kind in _BEATS and timer.in_first_budget for timer in self.timers):
            return False
        activity = self.state.activity
        return activity is None or self.timers[-1].elapsed_s >= book.for_activity(activity)


def watch(state: RankState, book: DeadlineBook, now_ns: int) -> Watch:
    """Return the timers of a rank. A paused or finished rank, and one without any signal, has none."""
    if state.timers is not None:
        return Watch(state, state.timers)
    snapshot = state.snapshot
    if snapshot is None or not state.running or snapshot.done or snapshot.paused is not None:
        return Watch(state, ())
    if not state.has_signal:
        return Watch(state, ())
    now = state.now_ns if state.now_ns is not None else now_ns
    timers = [_timer(snapshot, section, book.limit(section), now) for section in state.stack]
    around = _around(snapshot, timers, book, now)
    return Watch(state, (*around, *timers))


def _timer(snapshot: RankSnapshot, section: OpenSection, limit: Limit | None, now: int) -> Timer:
    """Return the timer of an open section.

    What is open around steps that complete (an epoch) comes on with each of them. It is late when they stay away, or
    when somebody has set how long all of it may take.
    """
    since = max(section.entered_ns, snapshot.resumed_ns or 0)  # nothing is older than a pause, whichever thread paused
    if limit is None or not limit.is_set:
        since = max(since, snapshot.main_lane.beat_ns)
    elapsed_s = max(0.0, _since(since, now) - _unseen_s(snapshot, section))
    return Timer(section.name, section.kind, elapsed_s, limit, first=section.occurrences == 0)


def _unseen_s(snapshot: RankSnapshot, section: OpenSection) -> float:
    """Return by how much an interval between completed collectives may look longer than it is: they are sampled."""
    is_sampled = section.kind == "pulse" and snapshot.beat_source == "collectives"
    return 1.25 * COLLECTIVES_EVERY_S if is_sampled else 0.0


def _around(snapshot: RankSnapshot, timers: list[Timer], book: DeadlineBook, now: int) -> tuple[Timer, ...]:
    """Return the timer of what surrounds the open sections, where that is not a heartbeat."""
    lane = snapshot.main_lane
    if not snapshot.beats and not any(timer.kind in _BEATS for timer in timers):
        # Completed sections are signs of life in a start-up, and all there is in a loop without heartbeats.
        since = max(snapshot.created_ns, lane.last_ns, snapshot.resumed_ns or 0)
        return (Timer(STARTUP, STARTUP, _since(since, now), book.startup_limit()),)
    if not timers:
        since = max(lane.last_ns, snapshot.created_ns, snapshot.resumed_ns or 0)
        return (Timer(OUT_OF_SECTION, OUT_OF_SECTION, _since(since, now), book.out_of_section_limit()),)
    if all(timer.limit is None for timer in timers):
        # A section without samples outside any heartbeat: nothing may be unbounded.
        return (Timer(OUT_OF_SECTION, OUT_OF_SECTION, timers[0].elapsed_s, book.out_of_section_limit()),)
    return ()


def _since(start_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - start_ns) / _NANO)
