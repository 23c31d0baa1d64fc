"""Does the job hang? An answer, not an alarm.

An expired deadline makes a rank a *suspect*. The job hangs only when the ranks that are being waited for are
past their own deadlines: a rank that waits inherits the deadline of the one it waits for. Until then the job
is *slow*, for at most `hang_cap`: rank 0 alone may evaluate, save or compile for minutes while the others
stand in backward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.hang.deadlines import OUT_OF_SECTION, DeadlineBook
from resilience_sdk.hang.states import RankState
from resilience_sdk.hang.timers import Watch, watch
from resilience_sdk.hang.waits import awaited_by_collectives, least_advanced, progress, steps_are_global

if TYPE_CHECKING:
    from resilience_sdk.rank_page import OpenSection

STOPPED = "stopped"
_NANO = 1e9


@attrs.frozen
class Suspect:
    """A rank that is late by its own deadline, or stands still."""

    rank: int
    name: str
    """Section or heartbeat whose deadline passed, OUT_OF_SECTION, STARTUP, or STOPPED."""
    elapsed_s: float
    deadline_s: float | None
    """None for a rank that is stopped and not late yet."""


@attrs.frozen
class Judgement:
    """What was decided at one look."""

    kind: str
    """`quiet`, `suspect` (late, and no reason to act), `slow` (somebody within his own deadline is waited
    for), `held` (a person, or a pause, keeps a rank), or `confirmed`."""
    suspects: tuple[Suspect, ...] = ()
    waited_for: tuple[int, ...] = ()
    next_look_ns: int | None = None
    """When something changes if no rank moves; None when nothing does."""
    detail: str = ""
    half_way: tuple[int, ...] = ()
    """Ranks past half of a deadline: time to collect evidence while it is fresh."""


class Confirmation:
    """A verdict counts only when two looks agree on it: same ranks waited for, standing where they stood."""

    def __init__(self) -> None:
        self._last: Hashable = None
        self._clocks: dict[int, int] = {}

    def agrees(self, judgement: Judgement, states: Sequence[RankState]) -> bool:
        """Return True when `judgement` confirms a hang, and the look before did so with nobody come further.

        What another node told of its ranks once is one look, however often it is read.
        """
        if judgement.kind != "confirmed":
            self._last = None
            return False
        seen = standing(judgement, states, judgement.waited_for)
        clocks = {s.rank: s.now_ns for s in states if s.rank in judgement.waited_for and s.now_ns is not None}
        if seen != self._last:
            self._last, self._clocks = seen, clocks
            return False
        return all(at_ns > self._clocks.get(rank, at_ns) for rank, at_ns in clocks.items())


def standing(judgement: Judgement, states: Sequence[RankState], ranks: Iterable[int]) -> Hashable:
    """Return what stays the same while these ranks stay where `judgement` found them.

    A rank that is late in a section has not come further by what it does inside of it: it may open and close
    inner ones for ever. Nor has it by the beats of its other threads.
    """
    late = {suspect.rank: suspect.name for suspect in judgement.suspects}
    wanted = set(ranks)
    return tuple((state.rank, _place(state, late.get(state.rank))) for state in states if state.rank in wanted)


def _place(state: RankState, late_in: str | None) -> Hashable:
    snapshot = state.snapshot
    if snapshot is None:
        return state.alive
    stack = snapshot.main_lane.stack
    section = next((section for section in stack if section.name == late_in), stack[0] if stack else None)
    since = (section.name, section.entered_ns) if section is not None else snapshot.main_lane.last_ns
    return (state.alive, snapshot.pid, snapshot.beats, snapshot.paused, snapshot.done, since)


def judge(states: Sequence[RankState], book: DeadlineBook, now_ns: int, hang_cap: float) -> Judgement:
    """Decide over all known ranks of one attempt.

    `now_ns` is a reading of the clock that the snapshots' times are of; `hang_cap` is in seconds. Ranks of
    which nothing is known (fewer states than the world has, no page, no progress signal) are never blamed,
    and while they may be the ones that are waited for, the job is slow.
    """
    watches = [watch(state, book, now_ns) for state in sorted(states, key=lambda state: state.rank)]
    suspects = tuple(suspect for w in watches if (suspect := _suspect(w)) is not None)
    next_look_ns, half_way = _outlook(watches, now_ns, hang_cap)
    kind, waited_for, detail = _decide(watches, suspects, book, hang_cap)
    return Judgement(kind, suspects, waited_for, next_look_ns, detail, half_way)


def _suspect(w: Watch) -> Suspect | None:
    worst = w.worst
    if worst is not None and worst.limit is not None:
        return Suspect(w.rank, worst.name, worst.elapsed_s, worst.limit.seconds)
    if w.state.stopped and w.timers:
        return Suspect(w.rank, STOPPED, w.timers[-1].elapsed_s, None)
    return None


def _decide(
    watches: Sequence[Watch], suspects: Sequence[Suspect], book: DeadlineBook, hang_cap: float
) -> tuple[str, tuple[int, ...], str]:
    """Return kind, ranks waited for, and the reason."""
    if not suspects:
        return "quiet", (), "no deadline has passed"
    states = [w.state for w in watches]
    attended = [s.rank for s in states if s.running and s.is_attended]
    if attended:
        return "held", tuple(attended), f"{ranks_text(attended)} under a debugger or reading a terminal"
    late = [w for w in watches if w.expired]
    if not late:
        return "suspect", (), f"{ranks_text([s.rank for s in suspects])} stopped, no deadline has passed"
    if _idle_together(watches):
        return "suspect", (), "all ranks stopped at the same count with nothing open: the loop may be over"
    waited_for = _waited_for(states)
    paused = [s.rank for s in states if s.rank in waited_for and s.snapshot and s.snapshot.paused is not None]
    if paused:
        return "held", waited_for, f"{ranks_text(paused)} paused: {_reason(states, paused[0])}"
    own_fault = [w for w in late if w.past(book)]
    patience = max((t.over_s for w in own_fault for t in w.expired), default=0.0)
    if own_fault and patience >= hang_cap:
        return (
            "confirmed",
            waited_for,
            f"waited {patience:.0f} s beyond the deadline, the cap is {hang_cap:g} s",
        )
    late_ranks = {w.rank for w in own_fault}
    in_time = [r for r in waited_for if r not in late_ranks and not _gone(states, r)]
    if in_time:
        return "slow", waited_for, f"{ranks_text(in_time)} waited for, within their own deadline"
    if not own_fault:
        return "slow", waited_for, "late, but within the budget of a first occurrence or of known slow work"
    if _unseen(states) and not _is_proof(states, waited_for):
        lost = tuple(s.rank for s in states if s.silent_s is not None)
        if len(lost) >= _unseen(states):
            return "confirmed", lost, f"nothing is heard of {ranks_text(lost)}, whose deadlines have passed"
        return "slow", waited_for, f"{_unseen(states)} rank(s) unseen, they may be the ones waited for"
    return "confirmed", waited_for, f"{ranks_text(waited_for)} waited for, past their own deadline"


def _waited_for(states: Sequence[RankState]) -> tuple[int, ...]:
    """Return the ranks that hold up the others: dead ones, else by collectives, else by steps."""
    dead = [s.rank for s in states if s.died and s.has_signal]
    if dead:
        return tuple(sorted(dead))
    moving = [s for s in states if s.running and s.has_signal and s.snapshot and not s.snapshot.done]
    return tuple(sorted(awaited_by_collectives(moving) or least_advanced(moving)))


def _gone(states: Sequence[RankState], rank: int) -> bool:
    return any(s.rank == rank and s.died for s in states)


def _idle_together(watches: Sequence[Watch]) -> bool:
    """Tell whether only time out of section has expired, with all ranks at one count and none in a step.

    An interval between two pulses counts as nothing open when the stacks show that nobody is in a collective.
    """
    if any(timer.kind not in (OUT_OF_SECTION, "pulse") for w in watches for timer in w.expired):
        return False
    counts = {w.state.snapshot.beats for w in watches if w.state.snapshot is not None and w.state.has_signal}
    return len(counts) <= 1 and all(_is_idle(w.state) for w in watches if w.state.running)


def _is_idle(state: RankState) -> bool:
    stack: Sequence[OpenSection] = state.stack
    if any(section.kind != "pulse" for section in stack):
        return False
    return not stack or state.in_collective is False


def _unseen(states: Sequence[RankState]) -> int:
    """Return how many ranks of the world may be waited for without our knowledge."""
    world = max((s.snapshot.world_size for s in states if s.snapshot is not None), default=len(states))
    seen = sum(1 for s in states if s.has_signal or (s.snapshot is not None and s.snapshot.done))
    return max(0, world - seen)


def _is_proof(states: Sequence[RankState], waited_for: Sequence[int]) -> bool:
    """Tell whether the known ranks alone prove the hang, although others are unseen."""
    awaited = [s for s in states if s.rank in waited_for]
    if any(s.died for s in awaited) or all(s.in_collective is False or s.stopped for s in awaited):
        return True
    moving = [s for s in states if s.running and s.has_signal and s.snapshot and not s.snapshot.done]
    use_steps = steps_are_global(moving)
    ahead = [progress(s, use_steps) for s in moving if s.rank not in waited_for]
    behind = [progress(s, use_steps) for s in awaited]
    return bool(ahead and behind) and max(behind) < min(ahead)


def _outlook(watches: Sequence[Watch], now_ns: int, hang_cap: float) -> tuple[int | None, tuple[int, ...]]:
    """Return when the next deadline, half deadline or cap falls due, and who is past half of one."""
    due: list[float] = []
    half_way: list[int] = []
    for w in watches:
        for timer in w.timers:
            if timer.limit is not None:
                seconds = timer.limit.seconds
                marks = (seconds / 2, seconds, seconds + hang_cap)
                due += [mark - timer.elapsed_s for mark in marks if mark > timer.elapsed_s]
                if timer.elapsed_s >= seconds / 2 and w.rank not in half_way:
                    half_way.append(w.rank)
    soonest = min(due, default=None)
    bounded = soonest is not None and soonest < 1e9
    return (now_ns + int(soonest * _NANO) + 1 if bounded and soonest is not None else None), tuple(half_way)


def _reason(states: Sequence[RankState], rank: int) -> str:
    return next((s.snapshot.paused or "" for s in states if s.rank == rank and s.snapshot), "")


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 2`, shortened when there are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in sorted(ranks)[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
