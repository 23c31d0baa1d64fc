"""Lanes and the recorder: which thread writes where in the rank's page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any, TypeVar

from resilience_sdk import faults
from resilience_sdk.lanes.armed import ArmedBeat, ArmedBlock
from resilience_sdk.lanes.blocks import Amounts, Beat, Block, DeviceTime, Pulse
from resilience_sdk.lanes.pauses import is_inside, moved_by_pause
from resilience_sdk.rank_page import RankPage
from resilience_sdk.rank_page import layout as at

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

    def publish_step(self, step: int | None) -> None:
        """Say which global step the lane is in; None: steps are counted, and the ring has the count."""
        self.q[self.step_at] = 0 if step is None else step + 1

    def current_step(self) -> int:
        """Return the step that the lane is in, or was in last; -1 before the first."""
        explicit = self.q[self.step_at]
        if explicit:
            return explicit - 1
        if not self.beats:
            return -1
        return next((beat for beat in self.beats if beat.t0), self.beats[-1]).n

    @property
    def step_is_global(self) -> bool:
        """Whether the script numbers its steps, so that the number means the same on all ranks and in all attempts."""
        return bool(self.q[self.step_at])

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


class Recorder:
    """All lanes of this process over one rank page."""

    def __init__(self, page: RankPage, *, settle: Callable[[], bool]) -> None:
        """Record into `page`; `settle()` is asked on early beats whether the rank's identity is final."""
        self.page = page
        self._settle = settle
        self._lock = threading.RLock()
        self._names: dict[tuple[str, str], int] = {}
        self._rings: dict[tuple[int, int], int] = {}
        self._lanes: dict[int, Lane] = {}
        self._paused: list[str] = []
        self._early = 0
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
            words[at.W_BEAT_SOURCE] = at.BEATS_USER
            self.stop_pulses()

    def pulse(self, step: int | None) -> None:
        """Record one pulse of the calling thread."""
        lane = self.lane()
        if lane.pulse is None:
            lane.pulse = Pulse(lane, "step")
        lane.pulse.beat(step)
        if faults.armed():
            faults.reached("step", lane.current_step(), beat=True)

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

    def retime(self, block: Block, timeout: float | None) -> None:
        """Publish a changed explicit timeout of a section."""
        with self._lock:
            block.timeout = timeout
            if block.index < at.NAME_SLOTS:
                self.page.set_timeout(block.index, timeout)

    def early_beat(self, lane: Lane) -> None:
        """Handle one of the first beats: publish the first, and settle the identity while it is provisional."""
        words = self.page.words
        if not words[at.W_FIRST_BEAT_NS]:
            words[at.W_FIRST_BEAT_NS] = monotonic_ns()
        self._early += 1
        if self._settle() or self._early >= _EARLY_BEATS:
            lane.settle()

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
