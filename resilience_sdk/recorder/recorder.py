"""The recorder and its lanes.

Which thread writes where in the rank's page, pauses that do not count, and blocks with planned faults.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import Any, Protocol, TypeVar

from resilience_sdk import faults
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.recorder.blocks import Amounts, Beat, Block, DeviceTime, Pulse
from resilience_sdk.recorder.page_writer import RankPage


def is_inside(time_ns: int, passes: Iterable[tuple[int, int]]) -> bool:
    """Tell whether a time lies in one of some passes, each `(entered, left)` in nanoseconds."""
    return any(entered <= time_ns < left for entered, left in passes)


def moved_by_pause(starts: Iterable[int], pause_ns: int, now: int, passes: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Return for each start when it would have been without the pause, which ends `now`; all in nanoseconds.

    The order of the starts is the stack, so it stays; none is in the future. `passes` are completed heartbeats: what
    started inside one was left behind there and is not moved, and what started outside comes to lie behind it rather
    than inside.
    """
    moved: dict[int, int] = {}
    latest = -1
    by_end = sorted(passes, key=lambda one: one[1])
    for start in sorted(starts):
        if is_inside(start, passes):
            moved[start] = start
            continue
        later = max(latest + 1, start + pause_ns)
        for entered, left in by_end:
            if entered <= later < left:
                later = left
        latest = moved[start] = min(now, later)
    return moved


def _is_step(block: Any) -> bool:
    return bool(block.is_progress) and block.name != at.EVALUATION


class _Armed:
    """What makes a block ask on entry whether an injected fault is due."""

    __slots__ = ()

    def __enter__(self: Any) -> Block:
        block: Block = super().__enter__()  # type: ignore[misc]
        faults.reached(self.name, self.lane.current_step(), beat=_is_step(self))
        return block

    def begin(self: Any, now: int, *step: int | None) -> bool:
        """Open it without a `with`, and suffer the fault inside it."""
        has_begun: bool = super().begin(now, *step)  # type: ignore[misc]
        if has_begun:
            faults.reached(self.name, self.lane.current_step(), beat=_is_step(self))
        return has_begun


class ArmedBlock(_Armed, Block):
    """A block that asks on entry whether an injected fault is due."""

    __slots__ = ()


class ArmedBeat(_Armed, Beat):
    """A heartbeat that asks on entry and exit whether an injected fault is due."""

    __slots__ = ()

    def end(self, now: int, less_ns: int = 0) -> None:
        """Close what `begin` opened, and suffer the fault behind it."""
        step, was_open = self.lane.current_step(), self.t0 != 0
        super().end(now, less_ns)
        if was_open and _is_step(self):
            faults.left(self.name, step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step = self.lane.current_step()
        super().__exit__(kind, error, trace)
        if kind is None and _is_step(self):
            faults.left(self.name, step)


B = TypeVar("B", bound=Block)

_NOBODY = 0
_EARLY_BEATS = 16  # beats that look for a process group themselves; later the helper thread looks
_SCRAP_RING = at.PAGE_WORDS - at.RING_WORDS  # written by whoever found no ring, read by nobody


class Lane:
    """One thread's part of the page."""

    def __init__(self, recorder: Recorder, index: int, ident: int, *, shown: bool = True) -> None:
        """Describe lane `index` of the page, owned by the thread `ident`.

        A lane that is not `shown` is for a thread that found none free: it writes into a scrap page.
        """
        self.recorder = recorder
        self.index = index
        self.ident = ident
        self.shown = shown
        self.q = recorder.page.words if shown else memoryview(bytearray(at.PAGE_BYTES)).cast("Q")
        self.settled = False
        self.pulse: Pulse | None = None
        self.blocks: dict[tuple[type[Block], str], Block] = {}
        self.beats: list[Beat] = []
        self.step_at = at.lane_at(index) + at.L_STEP
        self.pass_entered_at = at.lane_at(index) + at.L_PASS_ENTERED_NS
        self.pass_left_at = at.lane_at(index) + at.L_PASS_LEFT_NS
        self.raised_at = at.lane_at(index) + at.L_RAISED_NS
        self.pulses_before_at = at.lane_at(index) + at.L_PULSES_BEFORE

    def publish_step(self, step: int | None) -> None:
        """Say which global step the lane is in; None: steps are counted, and the ring has the count."""
        self.q[self.step_at] = 0 if step is None else step + 1

    def current_step(self) -> int:
        """Return the step that the lane is in, as the reader of the page finds it; -1 before the first."""
        explicit = self.q[self.step_at]
        if explicit:
            return explicit - 1
        beats = [beat for beat in self.beats if beat.name != at.EVALUATION]
        if not beats:
            return -1
        count = max(beat.passes() for beat in beats)
        is_in_it = any(beat.t0 for beat in beats)
        is_for_next = any(block.t0 for (_, name), block in self.blocks.items() if name == at.NEXT_STEPS)
        return count if is_in_it or is_for_next else max(0, count - 1)

    def has_stepped(self) -> bool:
        """Tell whether a step is complete. The first pulse is none: to load its state, an optimizer may take a step."""
        return any(beat.passes() > isinstance(beat, Pulse) for beat in self.beats)

    @property
    def step_is_global(self) -> bool:
        """Whether the script numbers its steps, so that the number means the same on all ranks and in all attempts."""
        return bool(self.q[self.step_at])

    def note_raised(self, left_ns: int) -> None:
        """Note that an exception ended the step that was left then: it is not complete."""
        if self.ident != _NOBODY:
            self.q[self.raised_at] = left_ns

    def note_end_by_exception(self) -> None:
        """Note that the process ends by an exception; a step that is open now, in a generator say, is not complete."""
        if any(beat.t0 for beat in self.beats if not isinstance(beat, Pulse)):
            self.note_raised(at.RAISED_INSIDE)

    def completed_steps(self, *, at_end_of: int | None = None) -> int | None:
        """Return how many steps are complete, as the reader of the page finds it; None where they have no numbers.

        `at_end_of`: that step counts, though its block may still be open.
        """
        if not self.step_is_global:
            return None
        step = self.current_step()
        return step + (step == at_end_of or not any(beat.t0 for beat in self.beats))

    def disregard_pulses(self) -> None:
        """Let none of the pulses so far be a step of the loop, and close the interval that the last one opened."""
        if self.pulse is not None:
            self.pulse.stop()
            self.q[self.pulses_before_at] = self.pulse.n

    def note_beat(self) -> None:
        """Note a completed heartbeat; the first ones also settle who this process is."""
        if not self.settled:
            self.recorder.early_beat(self)

    def settle(self) -> None:
        """End the time in which each heartbeat takes the slow path."""
        self.settled = True
        for block in self._all():
            block.settle_owner()

    def disown(self) -> None:
        """Belong to no thread any more."""
        self.ident = _NOBODY
        for block in self._all():
            block.owner = _NOBODY

    def is_within_last_beat(self, time_ns: int) -> bool:
        """Tell whether a time lies within the heartbeat that was completed last on this lane."""
        return is_inside(time_ns, self._last_passes())

    def _last_passes(self) -> list[tuple[int, int]]:
        """From when to when the last pass of each heartbeat lasted, as the reader of the page finds it."""
        found = [beat.last_pass() for beat in self.beats if not isinstance(beat, Pulse)]
        return [one for one in found if one is not None]

    def abandon_after(self, time_ns: int, now: int) -> None:
        """Close what was entered after a time and is still open."""
        if time_ns:
            for block in self._all():
                if block.t0 > time_ns and not isinstance(block, Pulse):
                    block.abandon(now)

    def is_idle(self) -> bool:
        """Tell whether no block is open."""
        return not any(block.t0 for block in self.blocks.values())

    def shift(self, pause_ns: int) -> None:
        """Let every open block begin later by a pause that must not count."""
        blocks = self._all()
        starts = [start for block in blocks for start in block.starts()]
        moved = moved_by_pause(starts, pause_ns, monotonic_ns(), self._last_passes())
        for block in blocks:
            block.move(moved)

    def _all(self) -> set[Block]:
        return {*self.blocks.values(), *self.beats}


class Rank(Protocol):
    """Whose page it is."""

    def settle(self) -> bool:
        """Correct a provisional identity; tell whether it is final now."""

    def look_between_steps(self) -> None:
        """Look at what only the thread that trains may ask for."""


class Recorder:
    """All lanes of this process over one rank page."""

    def __init__(self, page: RankPage, rank: Rank | None = None) -> None:
        """Record into `page`; `rank` is asked on early beats whether its identity is final, None: it is."""
        self.page = page
        self._rank = rank
        self._lock = threading.RLock()
        self._names: dict[tuple[str, str], int] = {}
        self._rings: dict[tuple[int, int], int] = {}
        self._lanes: dict[int, Lane] = {}
        self._paused: list[str] = []
        self._early = 0
        self._looks = False
        self.is_done = False
        """Whether `done` has ended all deadlines; each heartbeat then takes the slow path, which begins anew."""
        self.lost = ""
        """What found no place in the page first, and why; empty: everything has one."""
        self.teller: Any = None
        """What takes the amounts of work, once some were told."""
        self.owner = self.lane()

    def lane(self) -> Lane:
        """Return the calling thread's lane; threads beyond the page's lanes get one that is not shown."""
        ident = get_ident()
        with self._lock:
            if ident not in self._lanes:
                index = self.page.add_lane(threading.get_native_id())
                if index is None:
                    self._lose(f"a thread: a page holds {at.LANE_SLOTS}")
                self._lanes[ident] = Lane(self, index or 0, ident, shown=index is not None)
            return self._lanes[ident]

    def block(self, name: str, kind: str, timeout: float | None) -> Block | None:
        """Return the owner's block of a name, making it at first use; None where the page has no place for the name."""
        if not self._has_place(name, kind):
            return None
        return self._block(self.owner, ArmedBlock if faults.armed() else Block, name, kind, timeout)

    def beat(self, name: str) -> Beat | None:
        """Return the owner's heartbeat of a name. The first thread that beats becomes the owner of the fast path.

        None where the page has no place for the name, and another one beats already.
        """
        if self.owner.beats and not self._has_place(name, "heartbeat"):
            return None
        self.user_beats()
        lane = self.lane()
        if lane is not self.owner and not self.owner.beats and self.owner.is_idle():
            self.owner = lane
        return self._block(self.owner, ArmedBeat if faults.armed() else Beat, name, "heartbeat", None)

    def user_beats(self) -> None:
        """Let the script's own heartbeats replace those made for it, where both are there."""
        words = self.page.words
        if words[at.W_BEAT_SOURCE] != at.BEATS_USER:
            if words[at.W_BEAT_SOURCE] == at.BEATS_COLLECTIVES:
                words[at.W_FIRST_BEAT_NS] = 0  # they were those of a preparation: the first step is still to come
            words[at.W_BEAT_SOURCE] = at.BEATS_USER
            words[at.W_STEPPED] = 0
            with self._lock:
                for lane in self._lanes.values():
                    lane.disregard_pulses()
                    lane.settled = False

    def pulse(self, step: int | None) -> None:
        """Record one pulse of the calling thread, at the end of a step: of `step`, else of as many as came before."""
        lane = self.lane()
        if lane.pulse is None:
            lane.pulse = Pulse(lane, "step")
        if faults.armed():  # before it counts: what strikes at the end of a step strikes in it
            faults.reached("step", lane.pulse.passes() if step is None else step, beat=True)
        lane.pulse.beat(step)

    def take_back(self, pulses: int) -> None:
        """Let so many of the calling thread's pulses be no steps of the loop: they were all within one step."""
        lane = self.lane()
        if lane.pulse is not None:
            lane.q[lane.pulses_before_at] += min(pulses, lane.pulse.passes())

    def twin(self, block: B) -> B:
        """Return the calling thread's block for the same name."""
        return self._block(self.lane(), type(block), block.name, block.kind, block.timeout)

    def on_device(self, block: Block) -> DeviceTime | None:
        """Return what takes the durations on the GPU of a section, on the section's lane; None: it is idle then."""
        kind = at.DEVICE_KINDS.get(block.kind)
        return None if kind is None else self._block(block.lane, DeviceTime, block.name, kind, None)

    def amounts(self, name: str) -> Amounts:
        """Return what takes the amounts of work that are told, of a name."""
        return self._block(self.owner, Amounts, name, at.WORK, None)

    def register(self, lane: Lane, name: str, kind: str, timeout: float | None) -> tuple[int, int]:
        """Return `(name index, first word of the ring)`; where tables are full, ones that nobody reads."""
        with self._lock:
            index = self._names.get((name, kind))
            if index is None:
                index = self.page.add_name(name, kind, timeout)
                if index is None:
                    self._lose_name(name)
                    return at.NAME_SLOTS, _SCRAP_RING
                self._names[name, kind] = index
            if not lane.shown:
                return index, _SCRAP_RING
            ring = self._rings.get((lane.index, index))
            if ring is None:
                ring = self.page.add_ring(lane.index, index)
                if ring is None:
                    self._lose(f"section {name!r} in one more thread: a page holds {at.RING_SLOTS} rows of durations")
                    return index, _SCRAP_RING
                self._rings[lane.index, index] = ring
            return index, ring

    def note_joint(self, block: Block) -> None:
        """Publish that a section holds collectives."""
        if block.index < at.NAME_SLOTS:
            self.page.set_joint(block.index)

    def ask(self) -> None:
        """Have each section look in one more pass whether it holds collectives: some begin late, or are rare."""
        with self._lock:
            for lane in self._lanes.values():
                for block in lane.blocks.values():
                    block.ask()

    def retime(self, block: Block, timeout: float | None) -> None:
        """Publish a changed explicit timeout of a section."""
        with self._lock:
            block.timeout = timeout
            if block.index < at.NAME_SLOTS:
                self.page.set_timeout(block.index, timeout)

    def look_at_next_beat(self) -> None:
        """Have the next heartbeat take the slow path once, where its thread looks for the rank. Any thread."""
        with self._lock:
            self._looks = True
            for lane in self._lanes.values():
                lane.settled = False
                for beat in lane.beats:
                    beat.owner = _NOBODY

    def early_beat(self, lane: Lane) -> None:
        """Handle one of the first beats: publish the first, and settle the identity while it is provisional.

        Or a later one at which the rank wants to look.
        """
        if self._looks and self._rank is not None:
            self._looks = False
            self._rank.look_between_steps()
        words = self.page.words
        if not words[at.W_FIRST_BEAT_NS]:
            words[at.W_FIRST_BEAT_NS] = monotonic_ns()
        if not words[at.W_STEPPED] and lane.has_stepped():
            self._note_first_step()
        self._early += 1
        is_final = self._rank is None or self._rank.settle() or self._early >= _EARLY_BEATS
        if is_final and words[at.W_STEPPED]:
            lane.settle()

    def _note_first_step(self) -> None:
        """Publish how often each section was passed until now: in that nobody is compared.

        It is the way back to where an earlier attempt was, data that is read again, compilation and warm-up: each rank
        has its own of these. Time on the device comes later than that of the host, and has as many passes.
        """
        with self._lock:
            passes: dict[int, int] = {}
            for lane in self._lanes.values():
                timed = {block.name: block.n for block in lane.blocks.values() if block.kind in at.DEVICE_KINDS}
                for block in lane.blocks.values() if lane.shown else ():
                    ring = self._rings.get((lane.index, block.index))
                    if ring is not None:
                        passes[ring] = timed.get(block.name, 0) if isinstance(block, DeviceTime) else block.n
            self.page.set_stepped(passes)

    def pause(self, reason: str) -> None:
        """Suspend all deadlines of this process until the matching `resume`."""
        with self._lock:
            self._paused.append(reason)
            self.page.set_paused(len(self._paused), reason)

    def resume(self, pause_ns: int) -> None:
        """End one pause of `pause_ns`, which counts for no open block of this thread."""
        if self.owner.ident == _NOBODY:
            return  # a forked child leaves its parent's pause, which is the parent's to end
        with self._lock:
            self._paused.pop()
            if self._paused:  # the outer pause will count this one too
                self.page.set_paused(len(self._paused), self._paused[-1])
                return
            # Durations of blocks that other threads have open keep the pause; their deadlines begin anew.
            self.lane().shift(pause_ns)
            self.page.set_paused(0, "", monotonic_ns())

    def stop_pulses(self) -> None:
        """Close the running interval of every lane that pulses."""
        with self._lock:
            for lane in self._lanes.values():
                if lane.pulse is not None:
                    lane.pulse.stop()

    def done(self) -> None:
        """End all deadlines: the loop is over."""
        with self._lock:
            self.is_done = True
            self.stop_pulses()
            for lane in self._lanes.values():
                for beat in lane.beats:
                    beat.settle_owner()
            self.page.set_flag(at.FLAG_DONE)

    def begin(self) -> None:
        """Take the deadlines up again after `done`: another loop begins. The time between counts for nothing."""
        with self._lock:
            if self.is_done:
                self.is_done = False
                self.page.set_resumed(monotonic_ns())
                self.page.set_flag(at.FLAG_DONE, False)

    def orphan(self) -> None:
        """Disown every lane, in a forked child: its calls then cost a comparison and write nothing."""
        for lane in self._lanes.values():
            lane.disown()

    def _has_place(self, name: str, kind: str) -> bool:
        with self._lock:
            has_place = (name, kind) in self._names or self.page.words[at.W_NAMES] < at.NAME_SLOTS
            if not has_place:
                self._lose_name(name)
            return has_place

    def _lose_name(self, name: str) -> None:
        cure = "leave out of names what varies, such as a number"
        self._lose(f"section {name!r}: a page holds {at.NAME_SLOTS} names; {cure}")

    def _lose(self, what: str) -> None:
        self.page.words[at.W_LOST] += 1
        self.lost = self.lost or what

    def _block(self, lane: Lane, cls: type[B], name: str, kind: str, timeout: float | None) -> B:
        with self._lock:
            block = lane.blocks.get((cls, name))
            if not isinstance(block, cls):
                block = cls(lane, name, kind, timeout)
                lane.blocks[cls, name] = block
            return block
