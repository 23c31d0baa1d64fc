"""The state of a rank, its running timers, and the patience with what it does before it may be called hung. Pure.

| activity | may be called hung after |
|---|---|
| stopped | `stuck_after` without movement |
| stuck | `stuck_after` without movement; 5 times that before its first step, or on a socket, pipe or idle child |
| stuck, its child is stopped | `stuck_after` without movement |
| stuck, in what ends by itself | also its end + 2 s, if that is within 10 x `stuck_after` of its last work |
| waiting | 5 x `stuck_after` without movement: all wait, and nobody works |
| spinning, polling, unknown | its own deadline, and at least 10 x learned and 10 x `stuck_after` |
| busy | `hang_cap` beyond its deadline |

The rank must also be in it for twice the usual step, and stillness last three times the longest stillness that a stuck
rank survived at that place. A place at which this job was ended before gets more. A deadline that somebody set is taken
literally, for all of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.timeouts import OUT_OF_SECTION, STARTUP, LearnedTimeouts, Limit
from resilience_sdk.hang.waits import On
from resilience_sdk.recorder.page_layout import COLLECTIVES_EVERY_S

if TYPE_CHECKING:
    from resilience_sdk.recorder.page_reader import OpenSection, RankSnapshot


@attrs.frozen
class CollectivePosition:
    """How far a rank came in one process group; numbers count from 1, 0 means none."""

    enqueued: int
    completed: int
    started: int | None = None
    """None where the backend does not say (gloo)."""
    members: tuple[int, ...] | None = None
    """Global ranks of the group, where the record says; a rank that never used a group does not list it."""
    is_world: bool = False

    @property
    def blocked(self) -> bool:
        """Whether the rank stands in a collective that is not complete.

        One that is enqueued but not started by the device is not stood in: the device is elsewhere.
        """
        return self.completed < self.enqueued and (self.started is None or self.started > self.completed)


@attrs.frozen
class RankState:
    """One rank at one moment, from its page and from /proc."""

    rank: int
    node: str = ""
    alive: bool = True
    process_state: str = "S"
    """As in /proc/<pid>/stat; empty where unknown."""
    traced: bool = False
    reads_terminal: bool = False
    snapshot: RankSnapshot | None = None
    """None where no page can be read: nothing is known then."""
    collectives: Mapping[str, CollectivePosition] | None = None
    """Positions by process group, from a *fresh* flight record; None where unknown."""
    now_ns: int | None = None
    """Reading of the clock that the snapshot's times are of, for a rank of another node; else the judge's."""
    in_collective: bool | None = None
    """Whether the main thread's stack is inside a collective; None where no stack was taken."""
    slow_work: str | None = None
    """What the stack is known to take long with (`evidence.busy_with`)."""
    activity: Activity | None = None
    """What the rank does, as seen from outside since it is late; None while it is in time, or where nobody looks."""
    place: str = ""
    """Where it is, for what is remembered of places: section and innermost frame of the user's."""
    survived_s: float = 0.0
    """The longest stillness after which a rank went on at this place."""
    is_expected: bool = False
    """Whether a first step is to be expected of it although it has promised none: it has made an optimizer, it is
    stopped, or others wait in a collective."""
    endings: int = 0
    """How often this job has been ended at this place by a rule of ours."""
    cpu_share: float | None = None
    """CPU time over wall time since the last look, of the whole process."""
    role: str = ""
    """Ranks of one role run the same code (pipeline stages do not)."""
    timers: tuple[RunningTimer, ...] | None = None
    """Running deadlines as the rank's own node sees them, which alone has learned them; None: ours apply."""
    silent_s: float | None = None
    """For how long nothing has been heard of the node of this rank, where that is too long; nothing else is known."""
    past: bool | None = None
    """Whether that node finds it past what may reasonably be granted; None where `timers` is."""
    due: Due | None = None
    """When that node would call it hung; None where `timers` is."""

    @property
    def running(self) -> bool:
        """Whether the process is there and has not said that it leaves."""
        page = self.snapshot
        return self.alive and (page is None or (page.exit_state == "running" and not page.is_over))

    @property
    def left_cleanly(self) -> bool:
        """Whether the rank has finished its program."""
        page = self.snapshot
        return page is not None and (page.exit_state == "clean" or (page.exit_state == "running" and page.is_over))

    @property
    def died(self) -> bool:
        """Whether the process ended, or is ending, without having finished its program."""
        return not self.running and not self.left_cleanly

    @property
    def has_signal(self) -> bool:
        """Whether the page shows any progress, or promises some."""
        snapshot = self.snapshot
        if snapshot is None:
            return False
        return self.is_expected or bool(snapshot.declared or snapshot.beats or snapshot.main_lane.stack)

    @property
    def stack(self) -> tuple[OpenSection, ...]:
        """Open sections of the lane that beats, outermost first."""
        return self.snapshot.main_lane.stack if self.snapshot is not None else ()

    @property
    def section(self) -> str | None:
        """Name of the innermost open section."""
        return self.stack[-1].name if self.stack else None

    @property
    def is_attended(self) -> bool:
        """Whether a person is at it, or at a child that it waits for: a debugger, or a prompt on a terminal."""
        has_traced_child = self.activity is not None and self.activity.on is On.TRACED_CHILD
        return self.traced or self.reads_terminal or self.slow_work == "prompt" or has_traced_child

    @property
    def stopped(self) -> bool:
        """Whether the process stands still by a signal or a debugger's stop."""
        return self.running and self.process_state in ("T", "t")


_NANO = 1e9
_BEATS = ("heartbeat", "pulse")


@attrs.frozen
class RunningTimer:
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
class RankTimers:
    """A rank and all its running timers, outermost first."""

    state: RankState
    timers: tuple[RunningTimer, ...]

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.state.rank

    @property
    def expired(self) -> tuple[RunningTimer, ...]:
        """Timers whose deadline has passed."""
        return tuple(timer for timer in self.timers if timer.expired)

    @property
    def worst(self) -> RunningTimer | None:
        """The expired timer that is furthest over its deadline."""
        return max(self.expired, key=lambda timer: timer.over_s, default=None)

    def past(self, book: LearnedTimeouts) -> bool:
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
        slow_work = self.state.slow_work
        return slow_work is None or self.timers[-1].elapsed_s >= book.for_slow_work(slow_work)


def watch(state: RankState, book: LearnedTimeouts, now_ns: int) -> RankTimers:
    """Return the timers of a rank. A paused or finished rank, and one without any signal, has none."""
    if state.timers is not None:
        return RankTimers(state, state.timers)
    snapshot = state.snapshot
    if snapshot is None or not state.running or snapshot.done or snapshot.paused is not None:
        return RankTimers(state, ())
    if not state.has_signal:
        return RankTimers(state, ())
    now = state.now_ns if state.now_ns is not None else now_ns
    timers = [_timer(snapshot, section, book.limit(section), now) for section in state.stack]
    around = _around(snapshot, timers, book, now)
    return RankTimers(state, (*around, *timers))


def _timer(snapshot: RankSnapshot, section: OpenSection, limit: Limit | None, now: int) -> RunningTimer:
    """Return the timer of an open section.

    What is open around steps that complete (an epoch) comes on with each of them. It is late when they stay away, or
    when somebody has set how long all of it may take.
    """
    since = max(section.entered_ns, snapshot.resumed_ns or 0)  # nothing is older than a pause, whichever thread paused
    if limit is None or not limit.is_set:
        since = max(since, snapshot.main_lane.beat_ns)
    elapsed_s = max(0.0, _since(since, now) - _unseen_s(snapshot, section))
    return RunningTimer(section.name, section.kind, elapsed_s, limit, first=section.occurrences == 0)


def _unseen_s(snapshot: RankSnapshot, section: OpenSection) -> float:
    """Return by how much an interval between completed collectives may look longer than it is: they are sampled."""
    is_sampled = section.kind == "pulse" and snapshot.beat_source == "collectives"
    return 1.25 * COLLECTIVES_EVERY_S if is_sampled else 0.0


def _around(
    snapshot: RankSnapshot, timers: list[RunningTimer], book: LearnedTimeouts, now: int
) -> tuple[RunningTimer, ...]:
    """Return the timer of what surrounds the open sections, where that is not a heartbeat."""
    lane = snapshot.main_lane
    if not snapshot.beats and not any(timer.kind in _BEATS for timer in timers):
        # Completed sections are signs of life in a start-up, and all there is in a loop without heartbeats.
        since = max(snapshot.created_ns, lane.last_ns, snapshot.resumed_ns or 0)
        # A script that has promised no step may rightly make none for hours: what it does decides, and no deadline.
        limit = book.startup_limit() if snapshot.declared else None
        return (RunningTimer(STARTUP, STARTUP, _since(since, now), limit),)
    if not timers:
        since = max(lane.last_ns, snapshot.created_ns, snapshot.resumed_ns or 0)
        return (RunningTimer(OUT_OF_SECTION, OUT_OF_SECTION, _since(since, now), book.out_of_section_limit()),)
    if all(timer.limit is None for timer in timers):
        # A section without samples outside any heartbeat: nothing may be unbounded.
        return (RunningTimer(OUT_OF_SECTION, OUT_OF_SECTION, timers[0].elapsed_s, book.out_of_section_limit()),)
    return ()


def _since(start_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - start_ns) / _NANO)


IDLE = 5.0
CAREFUL = 10.0
WAKE_S = 2.0  # after the end of its wait a rank has gone on
_USUAL_STEPS = 2.0
_SURVIVED = 3.0
_MAX_ENDINGS = 2  # of the job at one place by a rule of ours; the next one is the last
_STILL = (Kind.STOPPED, Kind.STUCK, Kind.WAITING)
_SURELY_LATE = (Kind.STOPPED, Kind.STUCK, Kind.SPINNING, Kind.POLLING)


@attrs.frozen
class HangRules:
    """The settings that the judgement needs. Seconds."""

    stuck_after: float = 60.0
    hang_cap: float = 3600.0

    @property
    def horizon_s(self) -> float:
        """For how long after its last work a rank may wait for what ends by itself, in seconds."""
        return CAREFUL * self.stuck_after


@attrs.frozen
class Due:
    """When a rank may be called hung, if it stays as it is."""

    in_s: float
    """Seconds from now, 0: it may be; infinite: never."""
    rule: str
    """What grants it that time, in words."""
    is_set: bool = False
    """Whether somebody set that time, so that no rule of ours is to blame."""
    waits_for_end: bool = False
    """Whether it is granted the wait that it is in, which ends by itself before."""
    final: bool = False
    """Whether the job has been ended at this place so often that another attempt would end alike."""

    @property
    def now(self) -> bool:
        """Whether the time is over."""
        return self.in_s <= 0


def verdict_due(w: RankTimers, book: LearnedTimeouts, rules: HangRules) -> Due:
    """Return when a rank may be called hung by what it does."""
    if w.state.due is not None:
        return w.state.due
    if not w.timers:
        return Due(math.inf, "no deadline holds")
    activity = w.state.activity
    limits = [timer for timer in w.timers if timer.limit is not None]
    literal = [timer for timer in limits if timer.limit is not None and timer.limit.setting]
    if literal:
        return _literal(w, literal, activity)
    if activity is None:
        left_s = 0.0 if w.past(book) else max(1e-3, min((-timer.over_s for timer in limits), default=math.inf))
        return Due(left_s, "its own deadline")
    if activity.kind in _STILL:
        beats = [section.name for section in w.state.stack if section.kind in ("heartbeat", "pulse")]
        return _still(w, activity, book.usual_step_s(beats[-1] if beats else None), rules)
    beyond_s = rules.hang_cap - max((timer.over_s for timer in limits), default=-math.inf)
    if activity.kind is Kind.BUSY:
        return Due(max(0.0, beyond_s), f"hang_cap {rules.hang_cap:g} s beyond its deadline, because it is busy")
    if w.state.endings:
        return Due(max(0.0, beyond_s), f"hang_cap {rules.hang_cap:g} s: this job was ended here before")
    return _careful(w, activity, limits, book, rules)


def _literal(w: RankTimers, literal: list[RunningTimer], activity: Activity | None) -> Due:
    """Return when the first deadline that somebody set passes, whatever the rank does.

    A first occurrence inside is granted its own budget, unless the rank plainly does nothing.
    """
    soonest = max(literal, key=lambda timer: timer.over_s)
    assert soonest.limit is not None
    left_s = max(0.0, -soonest.over_s)
    innermost = w.timers[-1]
    is_plain = activity is not None and activity.kind in _SURELY_LATE
    is_own = innermost.limit is not None and bool(innermost.limit.setting)
    if innermost.in_first_budget and innermost is not soonest and (is_own or not is_plain):
        return Due(max(left_s, -innermost.over_s), "the budget of a first occurrence")
    return Due(left_s, soonest.limit.setting, is_set=True)


def _still(w: RankTimers, activity: Activity, usual_s: float, rules: HangRules) -> Due:
    state = w.state
    base_s, rule = rules.stuck_after, f"stuck_after {rules.stuck_after:g} s"
    final = False
    if activity.kind is Kind.WAITING:
        base_s, rule = IDLE * rules.stuck_after, f"{IDLE:g} x stuck_after, because all of them wait"
    elif activity.kind is Kind.STUCK:
        if activity.on is not On.STOPPED_CHILD and (not state.snapshot or not state.snapshot.beats):
            base_s, rule = IDLE * rules.stuck_after, f"{IDLE:g} x stuck_after before the first step"
        elif activity.waits_idly:
            base_s, rule = IDLE * rules.stuck_after, f"{IDLE:g} x stuck_after on {activity.on.value}"
        elif _is_alone_between_pulses(w):
            base_s, rule = IDLE * rules.stuck_after, f"{IDLE:g} x stuck_after: the loop may be over"
        if state.endings:
            base_s = max(base_s, CAREFUL * rules.stuck_after)
            rule = f"{CAREFUL:g} x stuck_after, because this job was ended here before"
            final = state.endings >= _MAX_ENDINGS
    survived_s = _SURVIVED * state.survived_s if activity.kind is not Kind.STOPPED else 0.0
    in_s = max(base_s, survived_s) - activity.still_s
    rule = f"{_SURVIVED:g} x what was survived here" if survived_s > base_s else rule
    waits_for_end = False
    wait_s = wait_granted_s(activity, rules)
    if wait_s is not None and wait_s > in_s:
        in_s, waits_for_end = wait_s, True
        rule = f"{WAKE_S:g} s after the end of its wait, which lies within {CAREFUL:g} x stuck_after of its last work"
    step_s = _USUAL_STEPS * usual_s - w.timers[-1].elapsed_s
    if step_s > max(in_s, 0.0):
        rule, waits_for_end = "twice the usual step", False
    return Due(max(0.0, in_s, step_s), rule, waits_for_end=waits_for_end, final=final)


def wait_granted_s(activity: Activity, rules: HangRules) -> float | None:
    """Return in how many seconds a rank that stands still is to have gone on by itself; None where nothing says so.

    The end of its wait must lie near its last work: one that is an hour away is no better than none, and who wakes up
    to wait again has not worked.
    """
    ends_in_s = activity.ends_in_s
    if activity.kind is not Kind.STUCK or ends_in_s is None or ends_in_s < -WAKE_S:
        return None
    return ends_in_s + WAKE_S if activity.worked_s + ends_in_s <= rules.horizon_s else None


def _careful(
    w: RankTimers, activity: Activity, limits: list[RunningTimer], book: LearnedTimeouts, rules: HangRules
) -> Due:
    least_s = CAREFUL * rules.stuck_after
    granted = [(max(_granted_s(timer), least_s) - timer.elapsed_s) for timer in limits]
    in_s = min(granted, default=math.inf)
    if activity.kind is Kind.SPINNING:
        in_s = max(in_s, least_s - activity.still_s)
    if in_s <= 0 and not w.past(book):
        in_s = max(1.0, min((-timer.over_s for timer in limits if not timer.expired), default=1.0))
    return Due(max(0.0, in_s), f"its own deadline, at least {CAREFUL:g} x learned and {least_s:g} s")


def _granted_s(timer: RunningTimer) -> float:
    limit = timer.limit
    assert limit is not None
    return limit.seconds * (CAREFUL if limit.source == "learned" else 1.0)


def _is_alone_between_pulses(w: RankTimers) -> bool:
    """Tell whether nothing shows that the only rank is still in its loop: the end of one looks the same."""
    snapshot = w.state.snapshot
    is_alone = snapshot is not None and snapshot.world_size == 1
    return is_alone and all(section.kind == "pulse" for section in w.state.stack)
