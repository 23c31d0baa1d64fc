"""Timed blocks: the context managers under `heartbeat()` and `straggler.section()`.

A count that grows within a block says that the block holds a collective: then its time is the other ranks' too.

A block belongs to one name on one lane (one thread) and is reused for every pass. Entering stores one word into
the page, leaving stores three: no lock, no system call, no allocation but the integers. The page keeps for each
block when it was entered and left last, so the stack of open blocks needs no keeping: it is their order of entry.

One comparison, of the thread's id with the block's `owner`, leads from the fast path to the slow one. There is
no owner while a block is entered by several threads, is open on several levels, looks for collectives (its first
passes, and one now and then), is a heartbeat whose steps are given or whose process is not settled yet, and in a
forked child, where nothing is written at all.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from resilience_sdk.recorder import page_layout as at

if TYPE_CHECKING:
    from resilience_sdk.recorder.recorder import Lane


def in_event_loop() -> bool:
    """Tell whether an asyncio event loop runs in this thread."""
    asyncio = sys.modules.get("asyncio")
    return asyncio is not None and asyncio._get_running_loop() is not None


_MODULE = "torch.distributed.distributed_c10d"
_LEAST = 3  # passes: DDP agrees on its buckets in one forward, and other threads have collectives of their own
_ONE_IN = 64  # passes at least: of so many micro-batches one may synchronise


class Joint:
    """Whether a block is one that holds collectives, from the passes that were looked at."""

    __slots__ = ("_asked", "_held", "is_known")

    def __init__(self) -> None:
        """Begin with no pass."""
        self._asked = self._held = 0
        self.is_known = False

    def note(self, *, has_any: bool) -> bool:
        """Take one pass, and tell whether the block is one."""
        self._asked += 1
        self._held += has_any
        self.is_known = self._held >= _LEAST and _ONE_IN * self._held >= self._asked
        return self.is_known


def begun() -> int | None:
    """Return how many were begun in all process groups; None where there is no group, or torch does not tell.

    Some microseconds, no lock and no wait.
    """
    module: Any = sys.modules.get(_MODULE)
    try:
        groups = list(module._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups) if groups else None
    except Exception:  # noqa: BLE001 - private in name, and a back end may not count; none of it may reach the training
        return None


F = TypeVar("F", bound=Callable[..., Any])

# A loop that is left by `break` closes its generator; who leaves by `preemption.exit()` has made its step.
_ENDS_WELL = (GeneratorExit, SystemExit, StopIteration, StopAsyncIteration)
_NOBODY = 0  # no thread has this id
_MASK = at.RING_MASK
_ASKED_KINDS = ("compute", "io")  # those in which ranks are compared
_FIRST_ASKS = 32  # passes; nobody is compared in fewer than 17


class Block:
    """A timed block of one name on one lane: context manager, and decorator when called with a function."""

    is_progress = False
    """Whether a completed one is noted by its lane."""

    __slots__ = (
        "_asks",
        "_begun",
        "_joint",
        "_levels",
        "_mixed",
        "_shared",
        "count_at",
        "entered_at",
        "index",
        "kind",
        "lane",
        "left_at",
        "n",
        "name",
        "owner",
        "q",
        "samples_at",
        "t0",
        "timeout",
    )

    def __init__(self, lane: Lane, name: str, kind: str, timeout: float | None) -> None:
        """Give `name` an entry in the page's table of names and a ring on `lane`."""
        index, ring = lane.recorder.register(lane, name, kind, timeout)
        self.lane = lane
        self.q = lane.q
        self.name = name
        self.kind = kind
        self.timeout = timeout
        self.index = index
        self.entered_at = ring + at.R_ENTERED_NS
        self.left_at = ring + at.R_LEFT_NS
        self.count_at = ring + at.R_COUNT
        self.samples_at = ring + at.R_SAMPLES
        self.n = self.q[self.count_at]
        self.t0 = 0
        self._levels: list[int] = []  # starts of the outer levels of a block that is entered again inside itself
        self._mixed = False  # levels of several coroutines: nobody can tell whose end is whose
        self._shared = False
        self._asks = _FIRST_ASKS if kind in _ASKED_KINDS else 0  # passes that look for collectives, slowly
        self._begun: int | None = None  # how many had begun when it was entered, in a pass that asks
        self._joint = Joint()
        self.owner = _NOBODY
        self.settle_owner()

    def __enter__(self) -> Block:
        if self.t0 or get_ident() != self.owner:
            return self._enter_slowly()
        self.q[self.entered_at] = self.t0 = monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = monotonic_ns()
        t0 = self.t0
        if kind is not None or not (t0 and self.owner):
            self._exit_slowly(now, unwinding=kind is not None)
            if kind is not None and self.is_progress and not issubclass(kind, _ENDS_WELL):
                self.lane.note_raised(now)
            return
        q = self.q
        n = self.n
        q[self.samples_at + (n & _MASK)] = now - t0
        self.n = n = n + 1
        q[self.count_at] = n
        q[self.left_at] = now
        self.t0 = 0

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; each call looks its block up anew."""
        # Late, because `lookup` stands above the blocks that it finds; decorating is no hot path.
        from resilience_sdk.recorder import lookup

        return lookup.decorate(function, lambda: lookup.find_block(self.name, self.kind, self.timeout))

    # -- begun and ended by hooks

    def begin(self, now: int) -> bool:
        """Open the block without a `with`; return False where it is open already, and then somebody else's to end.

        For hooks, which run on whatever thread a framework calls them on (autograd has threads of its own). They
        come one after the other while the lane's thread waits for them, so no thread is asked for here.
        """
        if self.t0 or self.lane.ident == _NOBODY:
            return False
        self.q[self.entered_at] = self.t0 = now
        return True

    def end(self, now: int, less_ns: int = 0) -> None:
        """Close what `begin` opened, and count one pass: its duration without `less_ns` of it."""
        t0, lane = self.t0, self.lane
        if not t0 or lane.ident == _NOBODY:
            return
        if self._levels:
            self._leave(now)  # the script has entered it inside, and not left it yet
            return
        if less_ns and self.is_progress:
            self._tell_pass(now)
        duration = now - t0 - less_ns
        q, n = self.q, self.n
        q[self.samples_at + (n & _MASK)] = duration if duration > 0 else 0
        self.n = n = n + 1
        q[self.count_at] = n
        q[self.left_at] = now
        self.t0 = 0
        if not lane.settled and self.is_progress:
            lane.note_beat()

    def _tell_pass(self, now: int) -> None:
        """Publish when the pass that ends now was entered; only of a heartbeat anybody wants to know."""

    def drop(self, now: int) -> None:
        """Close what `begin` opened without counting it: the pass did not come to its end."""
        if self._levels and self.lane.ident != _NOBODY:
            # That was the outermost level; the script is inside of it, and leaves its own.
            del self._levels[0]
            self.q[self.entered_at] = self._levels[0] if self._levels else self.t0
            self.settle_owner()
        elif self.t0 and self.lane.ident != _NOBODY:
            self._close(now)

    # -- the slow path

    def may_be_fast(self) -> bool:
        """Tell whether the lane's thread may take the fast path."""
        return not (self._shared or self._levels or self._mixed or self._asks)

    def settle_owner(self) -> None:
        """Say who may take the fast path."""
        self.owner = self.lane.ident if self.may_be_fast() else _NOBODY

    def starts(self) -> list[int]:
        """When each open level was entered, the outermost first."""
        return [*self._levels, self.t0] if self.t0 else []

    def move(self, moved: Mapping[int, int]) -> None:
        """Let each open level begin at another time than it did."""
        if self.t0:
            *self._levels, self.t0 = starts = [moved[start] for start in self.starts()]
            self.q[self.entered_at] = starts[0]

    def _enter_slowly(self) -> Block:
        lane = self.lane
        if lane.ident == _NOBODY:  # a forked child holds its parent's block
            return self
        if get_ident() != lane.ident:
            self._shared = True  # the owner's exits have to look from now on whose exit it is
            self.owner = _NOBODY
            lane.recorder.twin(self).__enter__()
            return self
        now = monotonic_ns()
        if self.t0 and self._was_left_behind():
            self.abandon(now - 1)  # it is entered again now, and open means entered after it was left
        if self.t0:
            self._levels.append(self.t0)
            self._mixed = self._mixed or in_event_loop()
            self.owner = _NOBODY
        else:
            self.q[self.entered_at] = now  # the outermost level is the one with a deadline
            self._begun = begun() if self._asks else None
        self.t0 = now
        return self

    def ask(self) -> None:
        """Have one more pass look for collectives. Any thread may call this."""
        if self.kind in _ASKED_KINDS and not self._asks and not self._joint.is_known and self.lane.ident != _NOBODY:
            self._asks = 1
            self.owner = _NOBODY

    def _look_for_collectives(self) -> None:
        """Note whether the pass that ends now held any."""
        self._asks -= 1
        before, self._begun = self._begun, None
        if before is None or (now := begun()) is None:
            return
        if self._joint.note(has_any=now > before):
            self._asks = 0
            self.lane.recorder.note_joint(self)

    def _was_left_behind(self) -> bool:
        """Tell whether this pass lies in a completed heartbeat: an exception between two bytecodes lost its exit."""
        return not in_event_loop() and self.lane.is_within_last_beat(self.t0)

    def abandon(self, now: int) -> None:
        """Close all levels without a sample: their exits were lost."""
        self.q[at.W_ODD_EXITS] += 1
        self._close(now)
        self._levels.clear()
        self.settle_owner()

    def _close(self, now: int) -> None:
        """Be left without having counted the pass."""
        self.q[self.left_at] = now
        self.t0 = 0

    def _exit_slowly(self, now: int, *, unwinding: bool) -> None:
        if self.lane.ident == _NOBODY:
            return
        block = self if get_ident() == self.lane.ident else self.lane.recorder.twin(self)
        if unwinding and not in_event_loop():
            # Blocks nest, so what was entered later on this lane and is still open lost its exit to an exception
            # that came between two bytecodes.
            block.lane.abandon_after(block.t0, now)
        block._leave(now)

    def _leave(self, now: int) -> None:
        """Close the innermost level."""
        if not self.t0:
            return  # an exit without an enter
        duration = now - self.t0
        outermost = not self._levels
        if outermost and self._asks:
            self._look_for_collectives()
        if self._mixed:
            self.q[at.W_ODD_EXITS] += 1
        elif outermost:
            self._complete(duration)
        if not outermost:
            self.t0 = self._levels.pop()
        elif self._mixed:
            self._close(now)
            self._mixed = False
        else:
            self.q[self.left_at] = now
            self.t0 = 0
        self.settle_owner()

    def _complete(self, duration_ns: int) -> None:
        """Count one pass. One inside another of the same name is a part of it: its time would count twice."""
        self.sample(duration_ns)

    def sample(self, duration_ns: int) -> None:
        """Add one duration to the ring."""
        self.q[self.samples_at + (self.n & _MASK)] = duration_ns
        self.n += 1
        self.q[self.count_at] = self.n


class DeviceTime(Block):
    """Durations on the GPU of a section of the same name. It is sampled and never entered."""

    __slots__ = ()


class Amounts(Block):
    """Amounts of work in place of durations. They are added and never entered."""

    __slots__ = ("_amounts",)

    def __init__(self, lane: Lane, name: str, kind: str = at.WORK, timeout: float | None = None) -> None:
        """Like a block, whose samples are doubles."""
        super().__init__(lane, name, kind, timeout)
        self._amounts = self.q.cast("B").cast("d")

    def add(self, amount: float) -> None:
        """Add one amount to the ring; in a forked child nothing, since the ring is its parent's."""
        if self.lane.ident != _NOBODY:
            n = self.n
            self._amounts[self.samples_at + (n & _MASK)] = amount
            self.n = n = n + 1
            self.q[self.count_at] = n

    def skip(self, count: int) -> None:
        """Leave so many amounts out, which nobody has told."""
        if self.lane.ident != _NOBODY:
            self.n += count
            for n in range(self.n - min(count, at.RING_SAMPLES), self.n):
                self._amounts[self.samples_at + (n & _MASK)] = math.nan
            self.q[self.count_at] = self.n


class Beat(Block):
    """A block whose completion is progress."""

    __slots__ = ("_explicit", "_pending")

    is_progress = True

    def __init__(self, lane: Lane, name: str, kind: str = "heartbeat", timeout: float | None = None) -> None:
        """Like a block, of kind `heartbeat`."""
        self._explicit = False  # somebody gives step numbers: every entry publishes one
        self._pending: int | None = None
        super().__init__(lane, name, kind, timeout)
        lane.beats.append(self)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function; each call looks its heartbeat up anew."""
        from resilience_sdk.recorder import lookup  # see Block.__call__

        return lookup.decorate(function, lambda: lookup.find_beat(self.name))

    def at_step(self, step: int) -> Beat:
        """Set the global step number of the next entry and return the block to enter."""
        beat = self
        if get_ident() != self.lane.ident and self.lane.ident != _NOBODY:
            beat = self.lane.recorder.twin(self)
        beat._explicit = True
        beat._pending = step
        beat.owner = _NOBODY
        return self

    def begin(self, now: int, step: int | None = None) -> bool:
        """Open it without a `with`, in the global step `step`; False where it is open already, as of a block."""
        lane = self.lane
        if self.t0 or lane.ident == _NOBODY:
            return False
        if step is not None and not self._explicit:
            self._explicit = True
            self.owner = _NOBODY
        if lane.recorder.is_done:
            lane.recorder.begin()
        q = self.q
        q[lane.step_at] = 0 if step is None else step + 1
        q[self.entered_at] = self.t0 = now
        return True

    def passes(self) -> int:
        """Return how many steps of the loop it has counted."""
        return self.n

    def last_pass(self) -> tuple[int, int] | None:
        """Return when the last pass was entered and left, as the reader of the page finds it; None before the first."""
        q, left = self.q, self.q[self.left_at]
        if left == q[self.lane.pass_left_at]:
            return q[self.lane.pass_entered_at], left
        return (left - q[self.samples_at + (self.n - 1 & _MASK)], left) if self.n else None

    def _tell_pass(self, now: int) -> None:
        """Publish when the pass that ends now was entered: what lay before it must not look left behind in it.

        Its ring has the duration of another pass last, or one that time was added to or taken off.
        """
        q, lane = self.q, self.lane
        q[lane.pass_entered_at] = q[self.entered_at]
        q[lane.pass_left_at] = now

    def _close(self, now: int) -> None:
        """Be left without having counted the pass: no progress."""
        self._tell_pass(now)
        super()._close(now)

    def may_be_fast(self) -> bool:
        """Tell whether the lane's thread may take the fast path."""
        lane = self.lane
        return lane.settled and not (self._explicit or lane.recorder.is_done) and super().may_be_fast()

    def _enter_slowly(self) -> Beat:
        lane = self.lane
        if lane.ident != _NOBODY and get_ident() == lane.ident:
            if not self.t0:
                if lane.recorder.is_done:
                    lane.recorder.begin()
                lane.publish_step(self._pending)
            self._pending = None
        super()._enter_slowly()
        return self

    def _complete(self, duration_ns: int) -> None:
        """Count the pass; a step inside a step is no further progress."""
        super()._complete(duration_ns)
        self.lane.note_beat()


class Pulse(Beat):
    """Progress without a block: each `beat()` closes the interval since the last one and opens the next.

    It comes at the end of a step, so that the lane is then in the next one, until somebody says that there is none.
    """

    __slots__ = ("_published",)

    def __init__(self, lane: Lane, name: str) -> None:
        """Like a heartbeat, of kind `pulse`."""
        super().__init__(lane, name, "pulse")
        self._published = 0

    def passes(self) -> int:
        """Return how many steps of the loop it has counted: not those before the script began to beat by itself."""
        return self.n - self.q[self.lane.pulses_before_at]

    def beat(self, step: int | None) -> None:
        """Record one pulse on this lane, the end of `step`; the first of a row has no duration."""
        if self.lane.recorder.is_done:
            self.lane.recorder.begin()
        now = monotonic_ns()
        self.sample(now - self.t0 if self.t0 else 0)
        q = self.q
        q[self.entered_at] = self.t0 = now
        q[self.left_at] = now - 1  # the interval that begins here is open
        self.lane.publish_step(None if step is None else step + 1)
        self._published = q[self.lane.step_at]
        self.lane.note_beat()

    def stop(self) -> None:
        """Close the running interval without counting it: no step has begun in it."""
        if self.t0:
            q, step_at = self.q, self.lane.step_at
            if self._published and q[step_at] == self._published:
                q[step_at] = self._published - 1
            q[self.left_at] = monotonic_ns()
            self.t0 = 0
