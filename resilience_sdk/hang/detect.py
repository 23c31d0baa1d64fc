"""Detection of a hang: evidence decides, not elapsed time. Pure.

A passed deadline makes a rank a *suspect*, and so does stillness. The job hangs only when every rank that is being
waited for is due by what it does (`timers`): a rank that waits inherits the patience with the one it waits for. Until
then the job is *slow*: rank 0 alone may evaluate, save or compile for minutes while the others stand in backward.

While ranks are unseen (a silent node, a launcher that relays nothing), deadlines alone decide, with `hang_cap`.

Who is waited for follows from the wait-for graph: an edge from each rank to those it waits for, by collective sequences
where known, else by steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.hang.activity import Kind
from resilience_sdk.hang.saves import stalls_in_save
from resilience_sdk.hang.timeouts import OUT_OF_SECTION, LearnedTimeouts
from resilience_sdk.hang.timers import CollectivePosition, Due, HangRules, RankState, RankTimers, verdict_due, watch
from resilience_sdk.hang.waits import LOCKS

if TYPE_CHECKING:
    from resilience_sdk.recorder.page_reader import OpenSection

Positions = Mapping[int, Mapping[str, CollectivePosition]]
MAY_BE_OVER = "all ranks stopped at the same count with nothing open: the loop may be over"


def wait_edges(positions: Positions) -> dict[int, set[int]]:
    """Return, for every rank that stands in a collective, the ranks that have not come to it.

    Ranks that stand in the same collective, with nobody missing, wait for one another.
    """
    edges: dict[int, set[int]] = {}
    for group in sorted({name for groups in positions.values() for name in groups}):
        listed = {rank: groups[group] for rank, groups in positions.items() if group in groups}
        blocked = {rank for rank, at in listed.items() if at.blocked}
        for rank in blocked:
            missing = _missing(rank, group, listed, positions)
            if not missing:
                missing = {other for other in blocked if other != rank}
            edges.setdefault(rank, set()).update(missing)
    return edges


def _missing(rank: int, group: str, listed: Mapping[int, CollectivePosition], positions: Positions) -> set[int]:
    mine = listed[rank]
    missing = {other for other, at in listed.items() if other != rank and _is_behind(at, mine)}
    members = next((at.members for at in listed.values() if at.members is not None), None)
    unlisted = set(positions) - set(listed)
    if members is not None:
        missing |= unlisted & set(members)
    elif any(at.is_world for at in listed.values()):
        missing |= unlisted
    elif not missing and len(listed) == 1:
        # Alone in a group of unknown members: whoever has never used the group may be awaited.
        missing |= unlisted
    return missing


def _is_behind(other: CollectivePosition, mine: CollectivePosition) -> bool:
    """Tell whether `other` has not come to the collective that `mine` stands in."""
    if other.enqueued <= mine.completed or other.completed < mine.completed:
        return True
    return other.started is not None and other.started <= mine.completed and other.enqueued > other.started


def awaited_components(edges: Mapping[int, set[int]]) -> list[frozenset[int]]:
    """Return the ends of all waiting: sets of ranks that wait for nobody but one another.

    One rank alone in a set that waits for nobody is who everybody waits for; several are a knot.
    """
    nodes = sorted(set(edges) | {other for targets in edges.values() for other in targets})
    reach = {node: _reachable(node, edges) for node in nodes}
    components = {frozenset({node} | {o for o in reach[node] if node in reach[o]}) for node in nodes}
    return sorted((c for c in components if all(reach[node] <= c for node in c)), key=sorted)


def _reachable(start: int, edges: Mapping[int, set[int]]) -> set[int]:
    found: set[int] = set()
    pending = list(edges.get(start, ()))
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(edges.get(node, ()))
    return found


def awaited_by_collectives(states: Iterable[RankState]) -> frozenset[int]:
    """Return the ranks that are waited for by their collectives; empty when not known of every rank."""
    positions: dict[int, Mapping[str, CollectivePosition]] = {}
    for state in states:
        if state.collectives is None:
            return frozenset()
        positions[state.rank] = state.collectives
    return frozenset().union(*awaited_components(wait_edges(positions)))


def progress(state: RankState, use_steps: bool) -> tuple[int, int]:
    """Return how far a rank came: steps begun, and whether it is in one. Comparable within one attempt."""
    assert state.snapshot is not None
    in_step = any(section.kind in ("heartbeat", "pulse") for section in state.stack)
    beats, step = state.snapshot.beats, state.snapshot.step
    if use_steps and step is not None:
        # A step number is published on entry and stays after the exit.
        return (step, 1) if in_step else (step + (1 if beats else 0), 0)
    return (beats, int(in_step))


def steps_are_global(states: Iterable[RankState]) -> bool:
    """Tell whether every rank publishes global step numbers, which then compare better than counts."""
    snapshots = [state.snapshot for state in states]
    return bool(snapshots) and all(s is not None and s.step_is_global and s.step is not None for s in snapshots)


def least_advanced(states: Sequence[RankState]) -> frozenset[int]:
    """Return the ranks with the lowest step; of those, the ones that do not wait themselves.

    Different sections of one step are not ordered, so whoever may be waited for is kept: the verdict then
    needs all of them to be late. Only a rank that is seen in a collective, or in a section of kind `comm`,
    beside ranks of the same step that are not, is known to wait for those.
    """
    use_steps = steps_are_global(states)
    lowest = min((progress(state, use_steps) for state in states), default=(0, 0))
    tied = [state for state in states if progress(state, use_steps) == lowest]
    busy = [state for state in tied if not waits_visibly(state)]
    return frozenset(state.rank for state in busy or tied)


def waits_visibly(state: RankState) -> bool:
    """Tell whether the stack, or else the kind of the innermost section, shows that a rank waits."""
    if state.in_collective is not None:
        return state.in_collective
    return bool(state.stack) and state.stack[-1].kind == "comm"


STOPPED = "stopped"
_NANO = 1e9


@attrs.frozen
class LateRank:
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
    suspects: tuple[LateRank, ...] = ()
    waited_for: tuple[int, ...] = ()
    next_look_ns: int | None = None
    """When something changes if no rank moves; None when nothing does."""
    detail: str = ""
    half_way: tuple[int, ...] = ()
    """Ranks past half of a deadline: time to collect evidence while it is fresh."""
    due: Due | None = None
    """When the ranks that are waited for may be called hung; None where deadlines alone decide."""


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


def judge(
    states: Sequence[RankState], book: LearnedTimeouts, now_ns: int, rules: HangRules, *, stalled: bool = False
) -> Judgement:
    """Decide over all known ranks of one attempt.

    `now_ns` is a reading of the clock that the snapshots' times are of. Ranks of which nothing is known (fewer states
    than the world has, no page, no progress signal) are never blamed, and while they may be the ones that are waited
    for, the job is slow. `stalled`: nothing has progressed for so long that the ranks are looked at, although no
    deadline has passed.
    """
    states = expected(states)
    watches = [watch(state, book, now_ns) for state in sorted(states, key=lambda state: state.rank)]
    suspects = tuple(suspect for w in watches if (suspect := _suspect(w)) is not None)
    next_look_ns, half_way = _outlook(watches, now_ns, rules.hang_cap)
    if not suspects and not stalled:
        return Judgement("quiet", (), (), next_look_ns, "no deadline has passed", half_way)
    judgement = _decide(watches, book, rules)
    if judgement.due is not None and 0 < judgement.due.in_s < 1e9:
        due_ns = now_ns + int(judgement.due.in_s * _NANO) + 1
        next_look_ns = due_ns if next_look_ns is None else min(next_look_ns, due_ns)
    return attrs.evolve(judgement, suspects=suspects, next_look_ns=next_look_ns, half_way=half_way)


def expected(states: Sequence[RankState]) -> Sequence[RankState]:
    """Return the states, with those marked of which a first step is to be expected although they have promised none.

    An unchanged script gives no sign in its start-up. It is judged all the same where its process is stopped, where it
    has made an optimizer, and where any rank waits in a collective.
    """
    silent = [state for state in states if _is_silent(state)]
    if not silent:
        return states
    waits = any(state.in_collective for state in states)
    marked = {s.rank for s in silent if waits or s.stopped or (s.snapshot is not None and s.snapshot.trains)}
    return [attrs.evolve(state, is_expected=True) if state.rank in marked else state for state in states]


def _is_alone_in_lock(state: RankState, rules: HangRules) -> bool:
    """Tell whether a rank has stood for `stuck_after` in a lock beside no thread that may release it."""
    activity = state.activity
    is_still = activity is not None and activity.kind is Kind.STUCK and activity.still_s >= rules.stuck_after
    return is_still and activity is not None and activity.on in LOCKS and activity.ends_in_s is None


def _is_silent(state: RankState) -> bool:
    return state.running and state.snapshot is not None and not state.snapshot.done and not state.has_signal


def _suspect(w: RankTimers) -> LateRank | None:
    worst = w.worst
    if worst is not None and worst.limit is not None:
        return LateRank(w.rank, worst.name, worst.elapsed_s, worst.limit.seconds)
    if w.state.stopped and w.timers:
        return LateRank(w.rank, STOPPED, w.timers[-1].elapsed_s, None)
    return None


def _decide(watches: Sequence[RankTimers], book: LearnedTimeouts, rules: HangRules) -> Judgement:
    """Return kind, ranks waited for, when they are due, and the reason."""
    states = [w.state for w in watches]
    attended = [s.rank for s in states if s.running and s.is_attended]
    if attended:
        return _answer("held", attended, f"{ranks_text(attended)} under a debugger or reading a terminal")
    waited_for = ranks_waited_for(states)
    if _idle_together(watches) and not any(s.stopped for s in states if s.rank in waited_for):
        # A save behind the loop ends when its storage answers: that it does not is told, and nobody is ended for it.
        # Neither for a lock that nobody is there to release: who idles behind the loop may want to.
        idle = [s for s in states if s.rank in waited_for]
        told = [s.rank for s in idle if stalls_in_save(s)] or [s.rank for s in idle if _is_alone_in_lock(s, rules)]
        return _answer("suspect", told, MAY_BE_OVER)
    paused = [s.rank for s in states if s.rank in waited_for and s.snapshot and s.snapshot.paused is not None]
    if paused:
        return _answer("held", waited_for, f"{ranks_text(paused)} paused: {_reason(states, paused[0])}")
    if (_unseen(states) and not _is_proof(states, waited_for)) or all(_gone(states, rank) for rank in waited_for):
        return _decide_by_deadlines(watches, waited_for, book, rules.hang_cap)
    dues = {w.rank: verdict_due(w, book, rules) for w in watches if w.rank in waited_for and not w.state.died}
    rank, due = max(dues.items(), key=lambda item: item[1].in_s)
    if not due.now and not any(_may_take_its_time(w.state, dues) for w in watches):
        waited_s = max((t.over_s for w in watches if w.past(book) for t in w.expired), default=0.0)
        if waited_s >= rules.hang_cap:
            due = Due(0.0, f"waited {waited_s:.0f} s beyond the deadline, hang_cap is {rules.hang_cap:g} s")
    named = waited_for if due.now else (rank,)
    answer = _answer("confirmed" if due.now else "slow", waited_for, f"{_is_or_are(named)} waited for: {due.rule}")
    return attrs.evolve(answer, due=due)


def _may_take_its_time(state: RankState, dues: Mapping[int, Due]) -> bool:
    """Tell whether a rank is seen to work, or is in what somebody gave a time of his own and does not wait itself."""
    due, activity = dues.get(state.rank), state.activity
    if due is None or due.now or activity is None:
        return False
    return activity.kind is Kind.BUSY or (due.is_set and activity.kind is not Kind.WAITING)


def _answer(kind: str, waited_for: Iterable[int], detail: str) -> Judgement:
    return Judgement(kind, waited_for=tuple(waited_for), detail=detail)


def _decide_by_deadlines(
    watches: Sequence[RankTimers], waited_for: tuple[int, ...], book: LearnedTimeouts, hang_cap: float
) -> Judgement:
    """Decide where ranks are unseen, or dead: by the deadlines of those who are seen."""
    states = [w.state for w in watches]
    late = [w for w in watches if w.expired]
    if not late:
        return _answer("suspect", waited_for, "no deadline has passed")
    own_fault = [w for w in late if w.past(book)]
    patience = max((t.over_s for w in own_fault for t in w.expired), default=0.0)
    if own_fault and patience >= hang_cap:
        detail = f"waited {patience:.0f} s beyond the deadline, the cap is {hang_cap:g} s"
        return _answer("confirmed", waited_for, detail)
    late_ranks = {w.rank for w in own_fault}
    in_time = [r for r in waited_for if r not in late_ranks and not _gone(states, r)]
    if in_time:
        return _answer("slow", waited_for, f"{_is_or_are(in_time)} waited for, within their own deadline")
    if not own_fault:
        return _answer("slow", waited_for, "late, but within the budget of a first occurrence or of known slow work")
    if _unseen(states) and not _is_proof(states, waited_for):
        lost = tuple(s.rank for s in states if s.silent_s is not None)
        if len(lost) >= _unseen(states):
            return _answer("confirmed", lost, f"nothing is heard of {ranks_text(lost)}, whose deadlines have passed")
        return _answer("slow", waited_for, f"{_unseen(states)} rank(s) unseen, they may be the ones waited for")
    return _answer("confirmed", waited_for, f"{_is_or_are(waited_for)} waited for, past their own deadline")


def _is_or_are(ranks: Sequence[int]) -> str:
    return ranks_text(ranks) + (" is" if len(ranks) == 1 else " are")


def ranks_waited_for(states: Sequence[RankState]) -> tuple[int, ...]:
    """Return the ranks that hold up the others: dead ones, else by collectives, else by steps."""
    dead = [s.rank for s in states if s.died and s.has_signal]
    if dead:
        return tuple(sorted(dead))
    moving = [s for s in states if s.running and s.has_signal and s.snapshot and not s.snapshot.done]
    return tuple(sorted(awaited_by_collectives(moving) or least_advanced(moving)))


def _gone(states: Sequence[RankState], rank: int) -> bool:
    return any(s.rank == rank and s.died for s in states)


def _idle_together(watches: Sequence[RankTimers]) -> bool:
    """Tell whether all ranks are out of any section, at one count and none in a step.

    An interval between two pulses counts as nothing open when the stacks show that nobody is in a collective. Of a rank
    alone no other can show that the loop goes on: neither is it over between two pulses, nor where somebody has set how
    long it may be outside of sections.
    """
    if any(timer.kind not in (OUT_OF_SECTION, "pulse") for w in watches for timer in w.timers):
        return False
    if len(watches) == 1 and (_is_in_pulse(watches[0]) or _is_out_for_a_set_time(watches[0])):
        return False
    counts = {w.state.snapshot.beats for w in watches if w.state.snapshot is not None and w.state.has_signal}
    return len(counts) <= 1 and all(_is_idle(w.state) for w in watches if w.state.running)


def _is_in_pulse(w: RankTimers) -> bool:
    return any(section.kind == "pulse" for section in w.state.stack)


def _is_out_for_a_set_time(w: RankTimers) -> bool:
    return any(timer.kind == OUT_OF_SECTION and timer.limit is not None and timer.limit.is_set for timer in w.timers)


def _is_idle(state: RankState) -> bool:
    stack: Sequence[OpenSection] = state.stack
    # Whoever sets how long the interval between two pulses may be also tells when the loop is over.
    if any(section.kind != "pulse" or section.timeout_s is not None for section in stack):
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


def _outlook(watches: Sequence[RankTimers], now_ns: int, hang_cap: float) -> tuple[int | None, tuple[int, ...]]:
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


def they_wait(ranks: Sequence[int]) -> str:
    """Return `rank 3 waits` or `ranks 0, 1, 2 wait`."""
    return f"{ranks_text(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"
