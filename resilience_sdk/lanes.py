"""Timed blocks on the rank page: the engine under `heartbeat()` and `straggler.section()`.

The fast path is a cached context manager per name that belongs to one *lane* (one thread) and stores a few
words into the page: no lock, no syscall, no allocation. Everything unusual takes the slow path, and the one
comparison that leads there is the owner's thread id: another thread, a name that is already open (re-entry),
a block closed out of order (coroutines), a forked child (whose lanes own no thread at all).
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import Any, TypeVar, cast

import resilience_sdk
from resilience_sdk import faults
from resilience_sdk.rank_page import RankPage
from resilience_sdk.rank_page import layout as at

F = TypeVar("F", bound=Callable[..., Any])

_NOBODY = -1  # no thread has this id
_EARLY_BEATS = 16  # beats that look for a process group themselves; later the helper thread looks
_MASK = at.RING_MASK
_SCRAP_RING = at.PAGE_WORDS - at.RING_WORDS  # written by whoever found no ring, read by nobody


class Block:
    """A timed block of one name on one lane: context manager, and decorator when called with a function."""

    __slots__ = (
        "_entry",
        "_top_entry",
        "count_at",
        "ident",
        "kind",
        "lane",
        "n",
        "name",
        "owner",
        "prev",
        "q",
        "ring_at",
        "saved",
        "t0",
        "timeout",
    )

    def __init__(self, lane: Lane, name: str, kind: str, timeout: float | None) -> None:
        """Give `name` an entry in the page's table of names and a ring on `lane`."""
        self.lane = lane
        self.q = lane.q
        self.name = name
        self.kind = kind
        self.timeout = timeout
        self.t0 = 0
        self.prev: Block | _Root = lane.root
        self.saved: list[tuple[int, Block | _Root, int]] | None = None
        self._entry = 0
        self._top_entry = lane.last_entry
        index, ring = lane.recorder.register(lane, name, kind, timeout)
        self.ident = index + 1
        self.owner = lane.ident if self.is_settled() else _NOBODY
        self.ring_at = ring + at.R_SAMPLES
        self.count_at = ring + at.R_COUNT
        self.n = self.q[self.count_at]

    def __enter__(self) -> Block:
        if self.t0 or get_ident() != self.owner:
            return self._enter_slowly()
        lane = self.lane
        self.prev = prev = lane.top
        self._entry = entry = prev._entry + 2
        if entry > self._top_entry:
            return self._enter_slowly()
        lane.top = self
        q = self.q
        q[entry] = self.t0 = monotonic_ns()
        q[entry + 1] = self.ident
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = monotonic_ns()
        lane = self.lane
        if lane.top is not self or get_ident() != self.owner:
            self._exit_slowly(now)
            return
        q = self.q
        q[self._entry + 1] = 0
        lane.top = self.prev
        n = self.n
        q[self.ring_at + (n & _MASK)] = now - self.t0
        self.n = n = n + 1
        q[self.count_at] = n
        q[lane.last_at] = now
        self.t0 = 0

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; each call looks its block up anew."""
        return decorate(function, lambda: find_block(self.name, self.kind, self.timeout))

    # -- the slow path

    def _enter_slowly(self) -> Block:
        lane = self.lane
        if lane.ident == _NOBODY:  # a forked child holds its parent's block
            return self
        if get_ident() != lane.ident:
            self.lane.recorder.twin(self).__enter__()
            return self
        if lane.top._entry >= self._top_entry:
            lane.restack(lane.levels(), monotonic_ns())  # levels of entries that were never complete go
        self.push(monotonic_ns())
        if self._entry > self._top_entry:
            self.q[at.W_LOST] += 1  # deeper than the page can show: timed, but not guarded
        else:
            self.q[self._entry] = self.t0
            self.q[self._entry + 1] = self.ident
        return self

    def push(self, t0: int) -> None:
        """Become the innermost level of the lane, entered at `t0`."""
        lane = self.lane
        if self.t0:  # re-entry: remember the outer level, the page shows the inner one beside it
            if self.saved is None:
                self.saved = []
            self.saved.append((self.t0, self.prev, self._entry))
            self.owner = _NOBODY  # until the outer level is the only one again, exits take the slow path
        self.prev = lane.top
        self._entry = lane.top._entry + at.STACK_WORDS
        lane.top = self
        self.t0 = t0

    def _exit_slowly(self, now: int) -> None:
        lane = self.lane
        if lane.ident == _NOBODY:
            return
        if get_ident() != lane.ident:
            self.lane.recorder.twin(self)._leave(now)
        else:
            self._leave(now)

    def _leave(self, now: int) -> None:
        """Close the innermost level of this block, in order or not."""
        lane = self.lane
        if not self.t0:
            return  # closed already: an exit without an enter
        if lane.top is self:
            if self._entry <= self._top_entry:
                self.q[self._entry + 1] = 0
            lane.top = self.prev
            if self.is_counted():
                self.sample(now - self.t0)
            lane.q[lane.last_at] = now
            self.after_exit(now)
            if self.saved:
                self.t0, self.prev, self._entry = self.saved.pop()
                self.settle_owner()
            else:
                self.t0 = 0
        else:
            lane.close_out_of_order(self, now)

    def is_counted(self) -> bool:
        """Tell whether the level that is being closed counts as a completed one."""
        return True

    def is_settled(self) -> bool:
        """Tell whether this block may take the fast path."""
        return True

    def settle_owner(self) -> None:
        """Let the lane's thread take the fast path where that is possible now."""
        self.owner = self.lane.ident if self.is_settled() and not self.saved else _NOBODY

    def sample(self, duration_ns: int) -> None:
        """Add one duration to the ring."""
        self.q[self.ring_at + (self.n & _MASK)] = duration_ns
        self.n += 1
        self.q[self.count_at] = self.n

    def after_exit(self, now: int) -> None:
        """Do what a block of this kind does besides being timed."""


class Beat(Block):
    """A block whose completion is progress."""

    __slots__ = ("explicit", "pending")

    def __init__(self, lane: Lane, name: str, kind: str = "heartbeat", timeout: float | None = None) -> None:
        """Like a block, of kind `heartbeat`."""
        self.explicit = False  # somebody gives step numbers: every entry publishes one, on the slow path
        self.pending: int | None = None
        super().__init__(lane, name, kind, timeout)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; each call looks its heartbeat up anew."""
        return decorate(function, lambda: find_beat(self.name))

    def at_step(self, step: int) -> Beat:
        """Set the global step number of the next entry and return the block to enter."""
        block = self
        if get_ident() != self.lane.ident and self.lane.ident != _NOBODY:
            block = cast("Beat", self.lane.recorder.twin(self))
        block.explicit = True
        block.pending = step
        block.owner = _NOBODY
        return self

    def is_settled(self) -> bool:
        """Tell whether this block may take the fast path: not while beats settle something, or publish a step."""
        return self.lane.settled and not self.explicit

    def is_counted(self) -> bool:
        """Tell whether the level that is being closed is the outermost: only that is a step."""
        return not self.saved

    def _enter_slowly(self) -> Beat:
        lane = self.lane
        if lane.ident == _NOBODY or get_ident() != lane.ident:
            super()._enter_slowly()
            return self
        if not self.t0:
            lane.publish_step(self.pending)
            lane.beating = self
        self.pending = None
        super()._enter_slowly()
        return self

    def after_exit(self, now: int) -> None:
        """Count the beat when its outermost level is complete."""
        if not self.saved:
            self.lane.note_beat(now)
        if self.owner == _NOBODY:
            self.settle_owner()


class Pulse(Beat):
    """Progress without a block: each `beat()` closes the interval since the last one and opens the next."""

    __slots__ = ()

    def __init__(self, lane: Lane, name: str) -> None:
        """Like a heartbeat, of kind `pulse`."""
        super().__init__(lane, name, "pulse")

    def beat(self, step: int | None, now: int) -> None:
        """Record one pulse on this lane; the first of a row has no duration."""
        lane, q = self.lane, self.q
        self.sample(now - self.t0 if self.t0 else 0)
        q[lane.pulse_entry] = self.t0 = now
        q[lane.pulse_entry + 1] = self.ident
        q[lane.last_at] = now
        lane.publish_step(step)
        lane.beating = self
        lane.note_beat(now)

    def stop(self) -> None:
        """Close the running interval without counting it."""
        self.t0 = 0
        self.q[self.lane.pulse_entry + 1] = 0


class ArmedBlock(Block):
    """A block that asks on entry whether an injected fault is due."""

    __slots__ = ()

    def __enter__(self) -> Block:
        block = super().__enter__()
        faults.reached(self.name, self.lane.current_step(), beat=False)
        return block


class ArmedBeat(Beat):
    """A heartbeat that asks on entry and exit whether an injected fault is due."""

    __slots__ = ()

    def __enter__(self) -> Block:
        beat = super().__enter__()
        faults.reached(self.name, self.lane.current_step(), beat=True)
        return beat

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step = self.lane.current_step()
        super().__exit__(kind, error, trace)
        if kind is None:
            faults.left(self.name, step)


class _Root:
    """Below the outermost block of a lane."""

    __slots__ = ("_entry",)

    def __init__(self, entry: int) -> None:
        self._entry = entry


class Lane:
    """One thread's part of the page."""

    __slots__ = (
        "beating",
        "blocks",
        "ident",
        "index",
        "last_at",
        "last_entry",
        "pulse",
        "pulse_entry",
        "q",
        "recorder",
        "root",
        "settled",
        "shown",
        "step_at",
        "top",
    )

    def __init__(self, recorder: Recorder, index: int, ident: int, *, shown: bool = True) -> None:
        """Describe lane `index` of the page, owned by the thread `ident`.

        A lane that is not `shown` is for a thread that found none free: it writes into a scrap page.
        """
        first = at.lane_at(index)
        self.recorder = recorder
        self.index = index
        self.ident = ident
        self.shown = shown
        self.q = recorder.page.words if shown else memoryview(bytearray(at.PAGE_BYTES)).cast("Q")
        self.last_at = first + at.L_LAST_NS
        self.step_at = first + at.L_STEP
        self.pulse_entry = first + at.L_STACK
        self.last_entry = first + at.L_STACK + at.STACK_WORDS * (at.STACK_DEPTH - 1)
        self.root = _Root(self.pulse_entry)
        self.top: Block | _Root = self.root
        self.beating: Beat | None = None  # the heartbeat that was entered last
        self.settled = False
        self.pulse: Pulse | None = None
        self.blocks: dict[tuple[type[Block], str], Block] = {}

    def publish_step(self, step: int | None) -> None:
        """Say which global step the lane is in; None: steps are counted, and the ring has the count."""
        self.q[self.step_at] = 0 if step is None else step + 1

    def current_step(self) -> int:
        """Return the step that the lane is in, or was in last; -1 before the first."""
        explicit = self.q[self.step_at]
        if explicit:
            return explicit - 1
        return -1 if self.beating is None else self.beating.n

    def note_beat(self, now: int) -> None:
        """Note a completed heartbeat; the first ones also settle who this process is."""
        if not self.settled:
            self.recorder.early_beat(self, now)

    def settle(self) -> None:
        """End the time in which each heartbeat takes the slow path."""
        self.settled = True
        for block in self.blocks.values():
            block.settle_owner()

    def disown(self) -> None:
        """Belong to no thread any more."""
        self.ident = _NOBODY
        for block in self.blocks.values():
            block.owner = _NOBODY

    def close_out_of_order(self, block: Block, now: int) -> None:
        """Close a block that is not the innermost: counted, and the stack is written anew.

        Coroutines interleave, so what is above the block stays open, and the block leaves no sample. Without an
        event loop blocks nest strictly, and what is above was left behind by an exception between two
        bytecodes: it is closed without a sample, and the block as usual.
        """
        self.q[at.W_ODD_EXITS] += 1
        levels = self.levels()
        place = next((number for number, (open_block, _) in enumerate(levels) if open_block is block), None)
        if place is None:  # the chain broke above it; what is below closes in the same way
            place, levels = len(levels), [*levels, (block, block.t0)]
        if _in_event_loop():
            self.restack([*levels[:place], *levels[place + 1 :]], now)
        else:
            self.restack(levels[place:], now)
            block._leave(now)

    def levels(self) -> list[tuple[Block, int]]:
        """Return all open levels, innermost first, each with its start; a re-entered block is there repeatedly."""
        found: list[tuple[Block, int]] = []
        depths: dict[Block, int] = {}
        link: Block | _Root = self.top
        while isinstance(link, Block):
            depth = depths[link] = depths.get(link, -1) + 1
            t0, below = link.t0, link.prev
            if depth:
                if not link.saved or depth > len(link.saved):
                    break  # an exception came between two bytecodes of an entry: it was never complete
                t0, below, _ = link.saved[-depth]
            if t0:
                found.append((link, t0))
            link = below
        return found

    def restack(self, levels: list[tuple[Block, int]], now: int) -> None:
        """Make these the open levels (as `levels` returns them), here and on the page."""
        touched = {block for block, _ in (*self.levels(), *levels)}
        for block in touched:
            block.t0 = 0
            block.saved = None
        self.top = self.root
        for block, t0 in reversed(levels):
            block.push(t0)
        for block in touched:
            block.settle_owner()
        self.rewrite(now)

    def rewrite(self, now: int) -> None:
        """Write the whole stack again after a change in its middle."""
        entry = self.pulse_entry + at.STACK_WORDS
        for block, t0 in reversed(self.levels()):
            if entry <= self.last_entry:
                self.q[entry] = t0
                self.q[entry + 1] = block.ident
            entry += at.STACK_WORDS
        while entry <= self.last_entry:
            self.q[entry + 1] = 0
            entry += at.STACK_WORDS
        self.q[self.last_at] = now

    def shift(self, pause_ns: int) -> None:
        """Let every open block start later by a pause that must not count."""
        now = monotonic_ns()
        levels = self.levels()
        if levels:
            # A block that was entered within the pause starts now, not in the future.
            self.restack([(block, min(now, t0 + pause_ns)) for block, t0 in levels], now)
        if self.pulse is not None and self.pulse.t0:
            self.q[self.pulse_entry] = self.pulse.t0 = min(now, self.pulse.t0 + pause_ns)
        self.q[self.last_at] = now


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
        self.owner = self.lane()

    def lane(self) -> Lane:
        """Return the calling thread's lane; threads beyond the page's lanes share a shadow that is not shown."""
        ident = get_ident()
        with self._lock:
            if ident not in self._lanes:
                index = self.page.add_lane(threading.get_native_id())
                if index is None:
                    self.page.words[at.W_LOST] += 1
                self._lanes[ident] = Lane(self, index or 0, ident, shown=index is not None)
            return self._lanes[ident]

    def block(self, name: str, kind: str, timeout: float | None) -> Block:
        """Return the owner's block of a name, making it at first use."""
        return self._block(self.owner, ArmedBlock if faults.armed() else Block, name, kind, timeout)

    def beat(self, name: str) -> Beat:
        """Return the owner's heartbeat of a name. The first thread that beats becomes the owner of the fast path."""
        self.user_beats()
        lane = self.lane()
        if lane is not self.owner and self.owner.beating is None and self.owner.top is self.owner.root:
            self.owner = lane
        return cast(
            "Beat", self._block(self.owner, ArmedBeat if faults.armed() else Beat, name, "heartbeat", None)
        )

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
        lane.pulse.beat(step, monotonic_ns())
        if faults.armed():
            faults.reached("step", lane.current_step())

    def twin(self, block: Block) -> Block:
        """Return the calling thread's block for the same name."""
        lane = self.lane()
        return self._block(lane, type(block), block.name, block.kind, block.timeout)

    def register(self, lane: Lane, name: str, kind: str, timeout: float | None) -> tuple[int, int]:
        """Return `(name index, first word of the ring)`; where tables are full, ones that nobody reads."""
        with self._lock:
            index = self._names.get((name, kind))
            if index is None:
                index = self.page.add_name(name, kind, timeout)
                if index is None:
                    self.page.words[at.W_LOST] += 1
                    return at.NAME_SLOTS, _SCRAP_RING
                self._names[name, kind] = index
            if not lane.shown:
                return index, _SCRAP_RING
            ring = self._rings.get((lane.index, index))
            if ring is None:
                ring = self.page.add_ring(lane.index, index)
                if ring is None:
                    self.page.words[at.W_LOST] += 1
                    return index, _SCRAP_RING
                self._rings[lane.index, index] = ring
            return index, ring

    def retime(self, block: Block, timeout: float | None) -> None:
        """Publish a changed explicit timeout of a section."""
        with self._lock:
            block.timeout = timeout
            if block.ident <= at.NAME_SLOTS:
                self.page.set_timeout(block.ident - 1, timeout)

    def early_beat(self, lane: Lane, now: int) -> None:
        """Handle one of the first beats: publish the first, and settle the identity while it is provisional."""
        words = self.page.words
        if not words[at.W_FIRST_BEAT_NS]:
            words[at.W_FIRST_BEAT_NS] = now
        self._early += 1
        if self._settle() or self._early >= _EARLY_BEATS:
            lane.settle()

    def pause(self, reason: str) -> None:
        """Suspend all deadlines of this process until the matching `resume`."""
        with self._lock:
            self._paused.append(reason)
            self.page.set_paused(len(self._paused), reason)

    def resume(self, pause_ns: int) -> None:
        """End one pause of `pause_ns`, which counts for no open block."""
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
        self.stop_pulses()
        self.page.set_flag(at.FLAG_DONE)

    def orphan(self) -> None:
        """Disown every lane, in a forked child: its calls then cost a comparison and write nothing."""
        for lane in self._lanes.values():
            lane.disown()

    def _block(self, lane: Lane, cls: type[Block], name: str, kind: str, timeout: float | None) -> Block:
        with self._lock:
            block = lane.blocks.get((cls, name))
            if block is None:
                block = cls(lane, name, kind, timeout)
                lane.blocks[cls, name] = block
            return block


class NoBlock:
    """What every call returns where nothing is recorded: a block that does nothing, and decorates to nothing."""

    __slots__ = ("kind", "timeout")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.timeout: float | None = None

    def __enter__(self) -> NoBlock:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __call__(self, function: F) -> F:
        """Return the function itself."""
        _refuse_generators(function)
        return function

    def at_step(self, step: int) -> NoBlock:
        """Accept a step number."""
        return self


NO_BLOCK = NoBlock()


class Unstarted:
    """A block of a process that records nothing yet. Entering it starts the recording, decorating does not.

    A decorator runs at import, which happens in processes that are no ranks (spawned DataLoader workers), so
    it must not open a page.
    """

    __slots__ = ("_find", "_opened", "kind", "timeout")

    def __init__(
        self, find: Callable[[], AnyBlock], kind: str | None = None, timeout: float | None = None
    ) -> None:
        """`find` returns the block to use, and starts the recording if it has to."""
        self._find = find
        self._opened: AnyBlock = NO_BLOCK
        self.kind = kind
        self.timeout = timeout

    def __enter__(self) -> AnyBlock:
        self._opened = self._find()
        return self._opened.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; each call looks its block up anew."""
        return decorate(function, self._find)

    def at_step(self, step: int) -> Unstarted:
        """Set the global step number of the entry."""
        find = self._find
        return Unstarted(lambda: find().at_step(step))  # type: ignore[union-attr]


AnyBlock = Block | NoBlock | Unstarted

# The blocks of the recording process by name. Filled at the first entry, emptied by a fork and by `forget()`.
BLOCKS: dict[str, Block | NoBlock] = {}
BEATS: dict[str, Beat | NoBlock] = {}


def _nobody() -> Recorder | None:
    return None


_starter: Callable[[], Recorder | None] = resilience_sdk._start_recording


def set_starter(starter: Callable[[], Recorder | None]) -> None:
    """Tell how recording begins: `starter()` returns the process's recorder, or None where there is none."""
    global _starter
    _starter = starter


def recorder() -> Recorder | None:
    """Return the recorder of this process, starting it if need be."""
    return _starter()


def find_beat(name: str) -> Beat | NoBlock:
    """Return the heartbeat of a name, starting the recording at first use."""
    beat = BEATS.get(name)
    if beat is None:
        current = _starter()
        if current is None:
            if _starter is _nobody:
                BEATS[name] = NO_BLOCK
            return NO_BLOCK
        beat = BEATS[name] = current.beat(name)
    return beat


def find_block(name: str, kind: str, timeout: float | None) -> Block | NoBlock:
    """Return the section of a name, starting the recording at first use."""
    block = BLOCKS.get(name)
    if block is None:
        current = _starter()
        if current is None:
            if _starter is _nobody:
                BLOCKS[name] = NO_BLOCK
            return NO_BLOCK
        block = BLOCKS[name] = current.block(name, kind, timeout)
    return block


def forget() -> None:
    """Empty the caches: every name is looked up anew at its next use."""
    BLOCKS.clear()
    BEATS.clear()


def disable() -> None:
    """Make every later lookup a no-op; what is open already is closed as usual."""
    set_starter(_nobody)
    forget()


def decorate(function: F, find: Callable[[], AnyBlock]) -> F:
    """Return `function` inside a block; of a coroutine function the whole awaited duration is meant."""
    _refuse_generators(function)
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            with find():
                return await function(*args, **kwargs)

        return cast(F, run_coroutine)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with find():
            return function(*args, **kwargs)

    return cast(F, run)


def _refuse_generators(function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!s} is a generator: its body runs while it is iterated, "
            "not while it is called. Use a `with` block inside it, or straggler.iterate() around it"
        )


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None
