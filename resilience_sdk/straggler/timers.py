"""One section that hooks begin and end: its wall time, and beside it the time on the GPU where there is one."""

from __future__ import annotations

from time import monotonic_ns

from resilience_sdk import lanes
from resilience_sdk.lanes import Block
from resilience_sdk.straggler.gpu_events import Event, GpuClock
from resilience_sdk.straggler.waits import NOTHING, Waited


class Timer:
    """A section that is whole: from its begin to its end, without or with what was waited."""

    def __init__(self, name: str, kind: str) -> None:
        """Be closed, and on no lane."""
        self.name = name
        self._kind = kind
        self.block: Block | None = None
        self._gpu_block: Block | None = None
        self._mark: Event | None = None
        self.is_open = False

    @property
    def is_running(self) -> bool:
        """Whether it is open, and no exception that left a heartbeat has closed it on the page."""
        return self.is_open and self.block is not None and self.block.t0 != 0

    def find(self, clock: GpuClock | None) -> None:
        """Record on the lane of the calling thread from now on: the one that trains."""
        self.block = lanes.find_own_block(self.name, self._kind)
        if clock is not None and self.block is not None:
            self._gpu_block = self.block.lane.recorder.on_device(self.block)

    def begin(self, clock: GpuClock | None) -> bool:
        """Open it; False where nothing is recorded, or the user's own section of that name is open."""
        if self.block is None or not self.block.begin(monotonic_ns()):
            return False
        if clock is not None:
            self._set_mark(clock)
        self.is_open = True
        return True

    def end(self, clock: GpuClock | None, waited: Waited = NOTHING, *, add: bool = False) -> None:
        """Close and count it, without what was waited in it, or with `add` together with what was waited before."""
        if not self.is_open or self.block is None:
            return
        self.is_open = False
        self.block.end(monotonic_ns(), -waited.ns if add else waited.ns)
        if clock is not None and self._gpu_block is not None:
            clock.measure(self._mark, clock.mark(), self._gpu_block.sample, holes=waited.holes, add_holes=add)
            self._mark = None

    def drop(self, clock: GpuClock | None) -> None:
        """Close it without counting: the pass did not come to its end."""
        if self.is_open and self.block is not None:
            self.is_open = False
            self.block.drop(monotonic_ns())
            self._drop_mark(clock)

    def _set_mark(self, clock: GpuClock | None) -> None:
        if clock is not None and self._gpu_block is not None:
            self._mark = clock.mark()

    def _drop_mark(self, clock: GpuClock | None) -> None:
        if clock is not None:
            clock.give_back(self._mark)
            self._mark = None


class StepTimer(Timer):
    """An optimizer's step, without its closure: that runs a forward and a backward, which have sections of their own.

    From the closure on the page does not show the step any more. Its deadline is that of the rest, and a closure that
    ended in an exception would leave it open.
    """

    def __init__(self, name: str, kind: str) -> None:
        """Be closed, and on no lane."""
        super().__init__(name, kind)
        self._before: Waited = NOTHING  # the parts that ended where a closure began
        self._since = 0  # when the part after a closure began; 0: the first part, or a closure runs
        self.in_closure = False

    @property
    def is_running(self) -> bool:
        """As for any section; behind a closure only its end, or another beginning, tells."""
        return self.is_open and (self.in_closure or self._since != 0 or super().is_running)

    def suspend(self, clock: GpuClock | None) -> None:
        """Do not count from here: the closure runs."""
        if self.in_closure or not self.is_running or self.block is None:
            return
        now = monotonic_ns()
        since = self._since
        if not since:
            since = self.block.t0
            self.block.drop(now)
        self.in_closure, self._since = True, 0
        self._before += Waited(now - since, () if clock is None else (clock.hole(self._mark),))
        self._mark = None

    def resume(self, clock: GpuClock | None) -> None:
        """Count again from here."""
        if self.in_closure:
            self.in_closure, self._since = False, monotonic_ns()
            self._set_mark(clock)

    def end(self, clock: GpuClock | None, waited: Waited = NOTHING, *, add: bool = False) -> None:
        """Close and count it, together with its parts before a closure; one that ends within a closure is dropped."""
        if not self._since:
            if self.in_closure:
                self.drop(clock)
            else:
                super().end(clock, waited, add=add)
            return
        now = monotonic_ns()
        before = self._before + Waited(now - self._since)
        self._reset()
        if self.block is not None and self.block.begin(now):
            super().end(clock, before, add=True)
        else:
            self.is_open = False
            self._drop_mark(clock)

    def drop(self, clock: GpuClock | None) -> None:
        """Close it without counting."""
        if not (self.in_closure or self._since):
            super().drop(clock)
            return
        self.is_open = False
        self._reset()
        self._drop_mark(clock)

    def _reset(self) -> None:
        self._before, self._since, self.in_closure = NOTHING, 0, False
