"""Notices of a job that does not come on: told early, again with doubling pauses, and closed. They end nothing.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.attribution.exceptions import is_users_frame
from resilience_sdk.core.words import clock_time
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.detect import MAY_BE_OVER, Judgement, ranks_text, ranks_waited_for
from resilience_sdk.hang.evidence import FlightRecord
from resilience_sdk.hang.saves import STALL, is_loading, stalls_in_save
from resilience_sdk.hang.timers import RankState
from resilience_sdk.hang.waits import On

if TYPE_CHECKING:
    from resilience_sdk.recorder.page_reader import OpenSection

_NANO = 1e9
_NOTICE_PART = 1 / 6  # of `stuck_after`: 10 s by default
_NAMED_PART = 1 / 5  # of the time to a notice, for which the same ranks have been waited for
_LOOK_PART = 0.7  # of it: then they are known in time, with one look a second
_USUAL_STEPS = 20.0
_LEAST_USUAL_STEPS = 2.0
_BUSY = 3.0  # times as long without a word, because there is nothing to repair
_BUSY_START = 6.0
_LONGER = 1.5  # than the longest that was told of a busy rank in that section, before it is told again
_ALMOST = 1.2
_MAX_NAMED = 3


def notice_after_s(stuck_after: float, usual_s: float, verdict_s: float = math.inf) -> float:
    """Return after how many seconds without progress a notice is due; `verdict_s`: when the verdict would be."""
    early_s = max(_NOTICE_PART * stuck_after, _USUAL_STEPS * usual_s)
    return max(min(early_s, verdict_s / 2), _LEAST_USUAL_STEPS * usual_s)


def look_after_s(stuck_after: float, usual_s: float, set_s: float = math.inf) -> float:
    """Return after how many seconds without progress the ranks are looked at: no notice is due before.

    Args:
        stuck_after: The setting, in seconds.
        usual_s: The usual length of a step, in seconds.
        set_s: The shortest deadline that somebody set, in seconds.
    """
    after_s = notice_after_s(stuck_after, usual_s, min(max(stuck_after, _LEAST_USUAL_STEPS * usual_s), set_s))
    return _LOOK_PART * after_s


def without_progress_s(states: Sequence[RankState], now_ns: int, least_s: float = 0.0) -> float:
    """Return for how long the ranks that are waited for have not come on, in seconds; 0 where there are none.

    0, too, where that is less than `least_s`: most of the time every rank comes on, which is quickly seen.
    """
    if all(_age_s(state, now_ns) < least_s for state in states):
        return 0.0
    # Whether a script that has promised no step owes one is seen at a closer look only.
    states = [attrs.evolve(state, is_expected=True) for state in states]
    ranks = ranks_waited_for(states)
    ages = [_age_s(state, now_ns) for state in states if state.rank in ranks and state.running]
    return min(ages, default=0.0)


def _age_s(state: RankState, now_ns: int) -> float:
    snapshot = state.snapshot
    if snapshot is None or snapshot.done or snapshot.paused is not None:
        return 0.0
    lane = snapshot.main_lane
    # Before the first step completed sections are the signs of life.
    came_ns = lane.beat_ns or lane.last_ns
    since_ns = max(snapshot.created_ns, came_ns, snapshot.resumed_ns or 0)
    return max(0.0, ((state.now_ns or now_ns) - since_ns) / _NANO)


@attrs.define
class StallNotices:
    """Decides when a stall is told, and when it is over. One attempt's."""

    stuck_after: float
    _marks: Mapping[int, object] = attrs.field(factory=dict)
    _next_s: float = 0.0
    _last_s: float = 0.0
    _busy_in: dict[str | None, float] = attrs.field(factory=dict)
    _since: Mapping[int, float] = attrs.field(factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether a stall was told and has not ended."""
        return bool(self._marks)

    @property
    def lasted_s(self) -> float:
        """For how long there has been no progress, of the open stall."""
        return self._last_s

    def went_on(self, states: Sequence[RankState], for_s: float) -> bool:
        """Tell whether the open stall has ended, because the ranks that were named have come on; it is closed then."""
        if not self._marks:
            return False
        now = {state.rank: _mark(state) for state in states}
        if any(now.get(rank, mark) == mark for rank, mark in self._marks.items()):
            self._last_s = max(self._last_s, for_s)
            return False
        self.close()
        return True

    def close(self) -> None:
        """End the open stall, if there is one."""
        self._marks, self._next_s, self._since = {}, 0.0, {}

    def due(self, judgement: Judgement, states: Sequence[RankState], for_s: float, usual_s: float) -> bool:
        """Tell whether to say it now. Held and finished ranks are no news.

        Nor is a rank that was not named in the looks before: who has waited until now may be on its way.
        """
        named = [state for state in states if state.rank in judgement.waited_for]
        if judgement.kind in ("held", "quiet") or not named:
            return False
        self._since = {rank: min(self._since.get(rank, for_s), for_s) for rank in judgement.waited_for}
        verdict_s = for_s + (judgement.due.in_s if judgement.due is not None else math.inf)
        least_s = notice_after_s(self.stuck_after, usual_s, verdict_s)
        if for_s - max(self._since.values()) < _NAMED_PART * least_s:
            return False
        busy = all(state.activity is not None and state.activity.kind is Kind.BUSY for state in named)
        section = named[0].section
        if busy:
            starts = any(state.snapshot is None or not state.snapshot.beats for state in named)
            patience = (_BUSY_START if starts else _BUSY) * _NOTICE_PART * self.stuck_after
            least_s = max(least_s, patience, _LONGER * self._busy_in.get(section, 0.0))
        if for_s < max(least_s, self._next_s if self._marks else 0.0):
            return False
        if self._marks and verdict_s < _ALMOST * for_s:
            return False  # the verdict itself says more
        if busy:
            self._busy_in[section] = for_s
        self._marks = {state.rank: _mark(state) for state in named}
        self._next_s, self._last_s = 2 * for_s, for_s
        return True


def _mark(state: RankState) -> object:
    """Return what changes when a rank comes on."""
    snapshot = state.snapshot
    if snapshot is None:
        return None
    lane = snapshot.main_lane
    return (snapshot.pid, snapshot.beats, snapshot.done, lane.beat_ns or lane.last_ns)


def notice_text(
    judgement: Judgement,
    states: Sequence[RankState],
    frames: Mapping[int, Sequence[str]],
    flight: Mapping[int, FlightRecord | None],
    for_s: float,
    *,
    now: float,
    storage: Mapping[int, str] | None = None,
) -> str:
    """Say who does what where, who waits for it, and when there will be a verdict.

    Args:
        judgement: What was decided.
        states: All ranks.
        frames: Stacks by rank, innermost first.
        flight: Flight records by rank.
        for_s: For how long nothing has come on, in seconds.
        now: Unix seconds.
        storage: By rank that stands in a save, into what it saves, and whether that answers.
    """
    by_rank = {state.rank: state for state in states}
    named = [by_rank[rank] for rank in judgement.waited_for if rank in by_rank]
    places = storage or {}
    parts = [_does(state, frames.get(state.rank, ()), now, places.get(state.rank)) for state in named[:_MAX_NAMED]]
    if len(named) > _MAX_NAMED:
        parts.append(f"and {len(named) - _MAX_NAMED} more ranks")
    text = f"no progress for {for_s:.0f} s: {', '.join(parts)}"
    waiting = [s.rank for s in states if s.running and s.rank not in judgement.waited_for and s.has_signal]
    if waiting:
        number = f"{len(waiting)} ranks wait" if len(waiting) > 1 else f"{ranks_text(waiting)} waits"
        place = waits_in(waiting, flight)
        text += f"; {number} for {'it' if len(named) == 1 else 'them'}" + (f" in {place}" if place else "")
    return text + _outlook(judgement, [state.activity for state in named])


def _outlook(judgement: Judgement, activities: Sequence[Activity | None]) -> str:
    """Say when there will be a verdict, and what would avert it."""
    kinds = {activity.kind if activity is not None else None for activity in activities}
    if kinds == {Kind.BUSY}:
        return "; slow, not hung"
    if judgement.detail == MAY_BE_OVER:
        return "; no verdict, as the loop may be over: nobody is ended for it"
    due = judgement.due
    if due is None or not math.isfinite(due.in_s):
        return ""
    if due.in_s < 1:
        return "; verdict now"
    ends_s = [activity.ends_in_s for activity in activities if activity is not None and activity.kind is Kind.STUCK]
    end_first = bool(ends_s) and all(end_s is not None and 0 < end_s < due.in_s for end_s in ends_s)
    if due.waits_for_end or (end_first and len(ends_s) == len(activities)):
        return f"; no hang unless it is still there in {due.in_s:.0f} s"
    if kinds <= {Kind.BUSY, Kind.SPINNING}:
        return f"; slow, and no hang unless it is still there in {due.in_s:.0f} s"
    return f"; verdict in {due.in_s:.0f} s"


def _does(state: RankState, frames: Sequence[str], now: float, storage: str | None) -> str:
    saves = stalls_in_save(state, frames)
    stall = f"stuck {'reading a checkpoint' if is_loading(frames) else 'in a save'} ({STALL})"
    text = f"rank {state.rank} {stall if saves else _activity_words(state.activity, now)}"
    frame = innermost_of_user(frames)
    if frame is not None:
        place, _, function = frame.rpartition(" ")
        text += f" at {place.rpartition('/')[2]} in {function}"
    if state.section is not None and state.stack[-1].kind != "pulse":
        text += f" (section '{state.section}')"
    if saves and storage is not None:
        return f"{text}, {'from' if is_loading(frames) else 'into'} {storage}"
    return text.rstrip(",")


def _activity_words(activity: Activity | None, now: float) -> str:
    if activity is None:
        return "stands"
    if activity.kind is Kind.SPINNING:
        return f"busy (the same stack for {activity.still_s:.0f} s)"
    end_words = wait_words(activity, now)
    if end_words is not None and (activity.ends_in_s or 0.0) >= 1.0:
        return f"{end_words},"
    text = activity.kind.value + (f" on {activity.on.value}" if activity.waits_idly else "")
    return f"{text}, {end_words}," if end_words is not None else text


_MAX_TOLD_S = 2 * 86400.0
_WAITS = {On.SLEEP: "sleeps", On.WORKER: "waits for a thread that waits", On.POLL: "waits in its event loop"}


def wait_words(activity: Activity, now: float) -> str | None:
    """Say until when a rank that stands still waits, or waited; None where the kernel tells no end. `now` is Unix."""
    if activity.kind is not Kind.STUCK:
        return None
    if activity.ends_in_s is not None and activity.ends_in_s > _MAX_TOLD_S:
        return None  # as good as never
    if activity.ends_in_s is not None and activity.ends_in_s > 0:
        at = clock_time(now + activity.ends_in_s, now)
        return f"{_WAITS.get(activity.on, 'waits on a lock')} until {at}, in {activity.ends_in_s:.0f} s"
    ago_s = activity.woke_s if activity.ends_in_s is None else -activity.ends_in_s
    if ago_s is None:
        return None
    return f"its wait ended at {clock_time(now - ago_s, now)} and it has not moved since"


def innermost_of_user(frames: Sequence[str]) -> str | None:
    """Return the innermost frame that is the user's own; the innermost of all where none is."""
    return next(filter(is_users_frame, frames), frames[0] if frames else None)


def place_of(stack: Sequence[OpenSection], frames: Sequence[str]) -> str:
    """Return the name of a place, as it is remembered: innermost section, innermost frame of the user's."""
    return f"{stack[-1].name if stack else '-'} at {innermost_of_user(frames) or '?'}"


def waits_in(ranks: Sequence[int], flight: Mapping[int, FlightRecord | None]) -> str | None:
    """Return the collective that most of these ranks wait in, such as `all_reduce 46`; None where no record tells."""
    places: dict[str, int] = {}
    for rank in ranks:
        record = flight.get(rank)
        for group in record.groups.values() if record is not None else ():
            if group.position.blocked:
                entry = group.entries.get(group.completed + 1)
                name = f"{entry.op if entry is not None else 'collective'} {group.completed + 1}"
                places[name] = places.get(name, 0) + 1
    return max(places, key=lambda name: places[name], default=None)
