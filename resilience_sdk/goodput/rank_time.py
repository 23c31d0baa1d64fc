"""The time of a rank since its first step: what it went into, from its page and looks at its process. Pure.

A second is productive where it lies inside of a step that was completed, and in nothing that has a bucket of its own:
in no wait for data, save or evaluation, and in no standstill. Heartbeats tell where a step begins and ends. Pulses tell
only its end, so that from one pulse to the next all counts as one step, but for what lasts longer than usual steps do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.goodput.step_time import is_data, is_evaluation, is_save
from resilience_sdk.recorder.page_layout import BEAT_KINDS, EVALUATION
from resilience_sdk.recorder.page_reader import LanePasses, LaneView, RankSnapshot

_NANO = 1e9
_LEAST_LONG_NS, _USUAL_STEPS = 1e9, 2.0
"""A step is long after a second and two usual ones."""
_FIRST_LONG_NS = 2e9  # as long as nobody knows what is usual
_SAMPLED_FROM = 0.4  # of that time: the process is looked at from then on
_USUAL_OF = 15  # newest steps
_OWN = ("compute", "io")  # kinds of sections whose time is the rank's own; in others it waits for somebody
_LEAST_OWN, _ODD = 5, 3.0
_SLOW, _LEAST_SLOW = 1.10, 0.02
"""Ranks wait for one whose own work takes so many times that of the others, and so much of the time more."""


class SectionUse(str, Enum):
    """What a section is for, where that is neither a step nor nothing."""

    DATA = "data"
    SAVES = "saves"
    EVALUATION = "evaluation"


class Doing(Enum):
    """What a process did since it was looked at last."""

    STOPPED = "stopped"  # by a signal, or frozen
    STILL = "still"  # it has used next to no processor
    BUSY = "busy"


def part_of(name: str, kind: str) -> SectionUse | None:
    """Return what a section is for."""
    if kind in BEAT_KINDS:
        return SectionUse.EVALUATION if name == EVALUATION else None
    if is_evaluation(name, kind):
        return SectionUse.EVALUATION
    if is_save(name, kind):
        return SectionUse.SAVES
    return SectionUse.DATA if is_data(name, kind) else None


@attrs.frozen
class Spent:
    """Seconds since the first step, by what they were spent on; what is in none of them lay outside of all steps."""

    productive_s: float = 0.0
    data_s: float = 0.0
    saves_s: float = 0.0
    evaluation_s: float = 0.0
    standing_s: float = 0.0
    waiting_s: float = 0.0

    def minus(self, other: Spent) -> Spent:
        """Return what was spent beyond another one."""
        return self._with(other, lambda mine, theirs: max(0.0, mine - theirs))

    def plus(self, other: Spent) -> Spent:
        """Return both together."""
        return self._with(other, lambda mine, theirs: mine + theirs)

    def towards(self, other: Spent, share: float) -> Spent:
        """Return what lies so far, 0 to 1, on the way to another one."""
        return self._with(other, lambda mine, theirs: mine + (theirs - mine) * share)

    def times(self, factor: float) -> Spent:
        """Return so many times as much."""
        return self._with(self, lambda mine, _: mine * factor)

    def _with(self, other: Spent, do: Any) -> Spent:
        names = attrs.fields_dict(Spent)
        return Spent(**{name: do(getattr(self, name), getattr(other, name)) for name in names})


@attrs.define
class RankTime:
    """The account of one rank of an attempt. The monitor's only thread."""

    began_ns: int | None = None
    """When its first step was complete."""
    completed: int = 0
    """How many steps it has completed since it began, the first one included."""
    brackets_steps: bool = True
    """Whether its heartbeats tell where steps begin, so that what lies between two of them is seen."""
    parts_seen: set[SectionUse] = attrs.field(factory=set)
    _known: dict[tuple[int, str, str], int] = attrs.field(factory=dict)
    _done_ns: dict[tuple[str, str], float] = attrs.field(factory=dict)
    _own: dict[tuple[str, str], tuple[int, float]] = attrs.field(factory=dict)  # passes, and what one takes
    _joint: set[tuple[str, str]] = attrs.field(factory=set)  # sections that hold collectives, so waits for others
    _inside: dict[tuple[str, str], list[int]] = attrs.field(factory=dict)  # looks that saw it outside, inside of a step
    _steps_ns: float = 0.0
    _evaluated_ns: float = 0.0  # between two steps, around batches of an evaluation
    _gap_ns: float = 0.0  # outside of all steps and sections, at the last look
    _stood_ns: dict[tuple[bool, SectionUse | str], float] = attrs.field(factory=dict)
    _beyond_ns: float = 0.0  # of steps that are not bracketed, longer than usual ones
    _taken_ns: float = 0.0  # of what is taken from steps, the part of the one that is open
    _usual_ns: deque[float] = attrs.field(factory=lambda: deque(maxlen=_USUAL_OF))
    _beat: tuple[int, int] = (0, 0)  # how many, and when the last one was
    _sliced_to_ns: float = 0.0  # up to where the interval that lasts is divided
    _last: tuple[Doing, bool, SectionUse | str] | None = None
    _until_ns: int = 0
    _open_ns: dict[tuple[str, str] | None, float] = attrs.field(factory=dict)  # by section, None: the step
    _has_blocks: bool = False  # heartbeats that tell where a step begins
    _paused_ns: float = 0.0  # of a pause that lasts; one that is over is no part of the blocks that hold it

    @property
    def usual_ns(self) -> float:
        """What a step usually takes; 0.0 before anybody knows."""
        known = sorted(self._usual_ns)
        return known[len(known) // 2] if known else 0.0

    def is_late(self, snapshot: RankSnapshot, now_ns: int) -> bool:
        """Tell whether a look at the process is due: a step takes long, or is about to."""
        began_ns = snapshot.first_beat_ns
        return began_ns is not None and now_ns - self._since_ns(snapshot) > _SAMPLED_FROM * self._long_ns()

    def is_long(self, snapshot: RankSnapshot, now_ns: int) -> bool:
        """Tell whether a step has taken longer than usual by now."""
        return snapshot.first_beat_ns is not None and now_ns - self._since_ns(snapshot) > self._long_ns()

    def look(
        self,
        snapshot: RankSnapshot,
        passes: Sequence[LanePasses],
        now_ns: int,
        *,
        is_alive: bool = True,
        doing: Doing | None = None,
        alone: bool = False,
    ) -> None:
        """Take what was completed since the last look.

        Args:
            snapshot: The page now.
            passes: The passes of all of its sections since the last look.
            now_ns: The time of the page's clock.
            is_alive: Whether the process is still there; of one that is gone nothing lasts on.
            doing: What it did since the last look, where somebody has looked at the process.
            alone: Whether others work meanwhile, so that they wait for it, or it for them.
        """
        self._note_passes(snapshot, passes)
        if snapshot.first_beat_ns is None:
            return
        self.began_ns = self.began_ns or snapshot.first_beat_ns
        lane = snapshot.main_lane
        is_over = not is_alive or snapshot.done or snapshot.over_ns is not None
        until_ns = max(self._until_ns, now_ns if is_alive else max(lane.last_ns, lane.beat_ns))
        self._paused_ns = self._paused_ns + until_ns - self._until_ns if snapshot.paused and self._until_ns else 0.0
        self._until_ns = until_ns
        self.completed = max(self.completed, snapshot.completed_beats)
        self._note_places(lane)
        self._slice(snapshot, now_ns, doing, alone=alone, is_over=is_over)
        self._open_ns = self._open_now(lane, is_alive=is_alive, is_over=is_over)
        gap_ns = self._wall_ns() - self._in_steps_ns() - self._sections_ns(inside=False)
        evaluates = any(new.name == EVALUATION and new.kind in BEAT_KINDS for new in passes)
        if evaluates or any(one.name == EVALUATION for one in lane.stack):
            self.parts_seen.add(SectionUse.EVALUATION)
            self._evaluated_ns += max(0.0, gap_ns - self._gap_ns)
        self._gap_ns = gap_ns

    @property
    def wall_s(self) -> float:
        """Seconds since its first step."""
        return self._wall_ns() / _NANO

    @property
    def own_s(self) -> float:
        """Seconds in sections in which it works by itself, and waits for nothing; 0.0 where it has told of none."""
        return sum(mean_ns * count for key, (count, mean_ns) in self._own.items() if key not in self._joint) / _NANO

    @property
    def spent(self) -> Spent:
        """What they were spent on."""
        if self.began_ns is None:
            return Spent()
        stood: dict[SectionUse | str, float] = {}
        for (_, place), ns in self._stood_ns.items():
            stood[place] = stood.get(place, 0.0) + ns
        parts = {part: max(0.0, self._part_ns(part) - stood.get(part, 0.0)) for part in SectionUse}
        parts[SectionUse.EVALUATION] += self._evaluated_ns
        # Of a step that never is complete nothing counts, so nothing is to be taken from it.
        taken = stood.get("step", 0.0) + self._beyond_ns - (0.0 if None in self._open_ns else self._taken_ns)
        in_steps = max(0.0, self._sections_ns(inside=True) - sum(stood.get(part, 0.0) for part in SectionUse))
        productive = self._in_steps_ns() - taken - self._paused_ns - in_steps
        waited = sum(ns for (is_alone, _), ns in self._stood_ns.items() if is_alone)
        return Spent(
            productive_s=min(max(0.0, productive), self._wall_ns()) / _NANO,
            data_s=parts[SectionUse.DATA] / _NANO,
            saves_s=parts[SectionUse.SAVES] / _NANO,
            evaluation_s=parts[SectionUse.EVALUATION] / _NANO,
            standing_s=(sum(stood.values()) - waited) / _NANO,
            waiting_s=waited / _NANO,
        )

    # -- completed passes, and those that last

    def _note_passes(self, snapshot: RankSnapshot, passes: Sequence[LanePasses]) -> None:
        lane_index = next((i for i, lane in enumerate(snapshot.lanes) if lane is snapshot.main_lane), 0)
        for new in passes:
            if new.lane != lane_index or not new.samples_ns:
                continue
            key, count = (new.lane, new.name, new.kind), new.start + len(new.samples_ns)
            # What came before the first step is a part of the start; None: that step is still awaited.
            first = max(self._known.get(key, 0), count if new.before is None else new.before)
            self._known[key] = max(count, self._known.get(key, 0))
            if new.kind in BEAT_KINDS and new.name != EVALUATION:
                first = max(first, 1)
                if new.kind != "pulse" and not self._has_blocks:
                    # Pulses before were those of a preparation.
                    self._has_blocks, self._steps_ns = True, 0.0
                    self._beyond_ns = self._taken_ns = 0.0
                    for alone in (False, True):  # it stood before the first step that it tells of
                        stood_ns = self._stood_ns.pop((alone, "step"), 0.0)
                        self._stood_ns[alone, "gap"] = self._stood_ns.get((alone, "gap"), 0.0) + stood_ns
                self.brackets_steps = self._has_blocks
            counted = new.samples_ns[max(0, first - new.start) :]
            if count <= first or not counted:
                continue
            # Of more passes than a ring holds, those that are there stand for all.
            took_ns = (count - first) * sum(counted) / len(counted)
            if new.kind in _OWN and part_of(new.name, new.kind) is None:
                self._note_own(new, count - first, counted)
            if new.kind in BEAT_KINDS and new.name != EVALUATION:
                self._steps_ns += took_ns if self._is_step(new.name, new.kind) else 0.0
            elif (part := part_of(new.name, new.kind)) is not None and new.kind not in BEAT_KINDS:
                self.parts_seen.add(part)
                self._done_ns[new.name, new.kind] = self._done_ns.get((new.name, new.kind), 0.0) + took_ns
            if new.in_step is not None:
                self._inside.setdefault((new.name, new.kind), [0, 0])[new.in_step] += 1

    def _note_own(self, new: LanePasses, passed: int, samples_ns: Sequence[int]) -> None:
        """Add passes in which it works by itself; one that takes many times as long as usual stood."""
        if new.is_joint:
            self._joint.add((new.name, new.kind))
        known, mean_ns = self._own.get((new.name, new.kind), (0, 0.0))
        most_ns = max(_LEAST_LONG_NS, _ODD * mean_ns) if known >= _LEAST_OWN else float("inf")
        usual = [ns for ns in samples_ns if ns <= most_ns]
        if usual:
            took_ns = known * mean_ns + passed * sum(usual) / len(usual)
            self._own[new.name, new.kind] = known + passed, took_ns / (known + passed)

    def _is_step(self, name: str, kind: str) -> bool:
        """Tell whether a heartbeat, or the time since a pulse, is a step: a pulse is none beside heartbeats."""
        return kind in BEAT_KINDS and name != EVALUATION and not (kind == "pulse" and self._has_blocks)

    def _note_places(self, lane: LaneView) -> None:
        in_step = False
        for one in lane.stack:
            if one.kind in BEAT_KINDS:
                in_step = in_step or self._is_step(one.name, one.kind)
            else:
                self._inside.setdefault((one.name, one.kind), [0, 0])[in_step] += 1

    def _is_inside(self, key: tuple[str, str]) -> bool:
        outside, inside = self._inside.get(key, (0, 0))
        return not self.brackets_steps or inside > outside

    def _open_now(self, lane: LaneView, *, is_alive: bool, is_over: bool) -> dict[tuple[str, str] | None, float]:
        """Return for how long the step and the outermost section with a part of its own have lasted, from the first
        step on; a step that is never completed counts nowhere."""
        found: dict[tuple[str, str] | None, float] = {}
        began_ns = self.began_ns or 0
        for one in lane.stack:
            lasts_ns = float(max(0, self._until_ns - max(one.entered_ns, began_ns)))
            if one.kind in BEAT_KINDS:
                if self._is_step(one.name, one.kind) and is_alive and not (is_over and one.kind == "pulse"):
                    found.setdefault(None, lasts_ns)
            elif part_of(one.name, one.kind) is not None and not any(key is not None for key in found):
                found[one.name, one.kind] = lasts_ns
        return found

    def _wall_ns(self) -> float:
        return float(max(0, self._until_ns - self.began_ns)) if self.began_ns is not None else 0.0

    def _in_steps_ns(self) -> float:
        return min(self._wall_ns(), self._steps_ns + self._open_ns.get(None, 0.0))

    def _section_ns(self, key: tuple[str, str]) -> float:
        return self._done_ns.get(key, 0.0) + self._open_ns.get(key, 0.0)

    def _keys(self) -> Iterable[tuple[str, str]]:
        return [*self._done_ns, *(key for key in self._open_ns if key is not None and key not in self._done_ns)]

    def _part_ns(self, part: SectionUse) -> float:
        return sum(self._section_ns(key) for key in self._keys() if part_of(*key) is part)

    def _sections_ns(self, *, inside: bool) -> float:
        """Return the time of all sections with a part of their own inside, or outside, of steps."""
        return sum(self._section_ns(key) for key in self._keys() if self._is_inside(key) == inside)

    # -- steps that last long

    def _long_ns(self) -> float:
        usual_ns = self.usual_ns
        return max(_LEAST_LONG_NS, _USUAL_STEPS * usual_ns) if usual_ns else _FIRST_LONG_NS

    @staticmethod
    def _since_ns(snapshot: RankSnapshot) -> int:
        return max(snapshot.main_lane.beat_ns, snapshot.first_beat_ns or 0, snapshot.resumed_ns or 0)

    def _slice(self, snapshot: RankSnapshot, now_ns: int, doing: Doing | None, *, alone: bool, is_over: bool) -> None:
        """Divide an interval without a step that lasts longer than usual, and end one that is over."""
        lane, (beats, beat_ns) = snapshot.main_lane, self._beat
        since_ns = self._since_ns(snapshot)
        if since_ns > beat_ns:
            made = max(1, lane.beats - beats)
            if self._last is not None:
                # It has ended with the first of the steps that were completed since.
                ended_ns = max(self._sliced_to_ns, since_ns - (made - 1) * self.usual_ns)
                self._add(ended_ns - self._sliced_to_ns, *self._last)
            elif beat_ns and lane.beats > beats:
                self._usual_ns.append((since_ns - beat_ns) / made)
            self._beat, self._last, self._taken_ns = (lane.beats, since_ns), None, 0.0
            self._sliced_to_ns = since_ns + self.usual_ns
        if doing is None or is_over or now_ns - since_ns <= self._long_ns() or now_ns <= self._sliced_to_ns:
            return
        place: SectionUse | str = "gap"
        entered_ns = float(since_ns)
        for one in lane.stack:
            part = part_of(one.name, one.kind)
            if part is not None or self._is_step(one.name, one.kind):
                place, entered_ns = part or "step", max(entered_ns, one.entered_ns)
            if part is not None:
                break
        if place == "step" and doing is not Doing.STOPPED and now_ns - entered_ns <= self._long_ns():
            doing = Doing.BUSY  # what came before the step has taken long, and it is known what that was
        self._sliced_to_ns = max(self._sliced_to_ns, entered_ns)
        if snapshot.paused or (doing is Doing.STILL and not self.usual_ns):
            return  # whoever pauses says that no step is due; and the steps of some programs always sleep
        before, self._last = self._last, (doing, alone, place)
        # One that moves again has stood until a moment ago.
        went_on = before is not None and before[0] is not Doing.BUSY and doing is Doing.BUSY
        self._add(now_ns - self._sliced_to_ns, *(before if went_on and before is not None else self._last))
        self._sliced_to_ns = now_ns

    def _add(self, ns: float, doing: Doing, alone: bool, place: SectionUse | str) -> None:
        if ns <= 0:
            return
        if doing is Doing.STOPPED or (doing is Doing.STILL and place == "step"):  # else it is known what it does
            key = alone and doing is not Doing.STOPPED, place
            self._stood_ns[key] = self._stood_ns.get(key, 0.0) + ns
            self._taken_ns += ns if place == "step" else 0.0
        elif place == "step" and not self.brackets_steps:
            self._beyond_ns += ns
            self._taken_ns += ns


def node_spent(ranks: Iterable[RankTime]) -> Spent:
    """Return what the time of a node's ranks was spent on: productive is when all of them were in a step.

    Of what each has worked by itself, where all say so, the others have waited for the slowest.
    """
    begun = [rank for rank in ranks if rank.began_ns is not None]
    if not begun:
        return Spent()
    merged = merge([rank.spent for rank in begun])
    own_s = [rank.own_s for rank in begun]
    slow_s = _waits_s(own_s, merged.productive_s) if all(own_s) else 0.0
    return attrs.evolve(merged, productive_s=merged.productive_s - slow_s, waiting_s=merged.waiting_s + slow_s)


def _waits_s(own_s: Sequence[float], productive_s: float) -> float:
    """Return how long ranks have waited for the slowest one, step by step."""
    if len(own_s) < 2:
        return 0.0
    others = sorted(own_s)[:-1]
    usual_s, slowest_s = others[len(others) // 2], max(own_s)
    waits_s = slowest_s - usual_s
    is_slow = usual_s > 0 and slowest_s >= _SLOW * usual_s and waits_s >= _LEAST_SLOW * productive_s
    return min(waits_s, productive_s) if is_slow else 0.0


def merge(all_spent: Sequence[Spent]) -> Spent:
    """Return the account of several at once: the least of what is productive, the most of all else."""
    most = {name: max(getattr(one, name) for one in all_spent) for name in attrs.fields_dict(Spent)}
    return Spent(**{**most, "productive_s": min(one.productive_s for one in all_spent)})
