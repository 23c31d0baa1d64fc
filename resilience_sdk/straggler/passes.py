"""What the hooks of an attached model tell, made into sections.

    fwd         the forward, with gradients on
    bwd         from the first gradient of the outputs to the end of this rank's own work
    comm_wait   from there until the gradients of all ranks are reduced, and every bracketed wait before
    optim       the optimizer's step

The wall time of a backward names nobody: it contains the collectives, so it is equal on all ranks, and where
gradients are accumulated it is the *shortest* on the slow one. The end of a rank's own work is found by a callback
that autograd runs at the end of the backward. Callbacks run in the order in which they were queued; ours is queued
when the first gradient of the outputs comes, before DDP has any to reduce, so it runs before DDP's, which waits.
It queues another one, which runs when DDP has waited.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from time import monotonic_ns
from typing import Any

from resilience_sdk import lanes
from resilience_sdk.lanes import Block
from resilience_sdk.straggler.autograd import Engine
from resilience_sdk.straggler.gpu_events import Event, GpuClock
from resilience_sdk.straggler.hooks import Hook
from resilience_sdk.straggler.waits import NOTHING, Waited, Waits, tensors_of

_MOST_OUTPUTS = 64  # tensors: a model may return caches too, and its loss comes first


class Timer:
    """One section: its wall time, and beside it the time on the GPU where there is one."""

    def __init__(self, name: str, kind: str) -> None:
        self._name = name
        self._kind = kind
        self.block: Block | None = None
        self._gpu_block: Block | None = None
        self._mark: Event | None = None
        self.is_open = False

    def find(self, clock: GpuClock | None) -> None:
        """Record on the lane of the calling thread from now on: the one that trains."""
        self.block = lanes.find_own_block(self._name, self._kind)
        if clock is not None and self.block is not None:
            self._gpu_block = self.block.lane.recorder.on_device(self.block)

    def begin(self, clock: GpuClock | None) -> bool:
        """Open it; False where nothing is recorded, or the user's own section of that name is open."""
        if self.block is None or not self.block.begin(monotonic_ns()):
            return False
        if clock is not None:
            self._mark = clock.mark()
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
            if clock is not None:
                clock.give_back(self._mark)
                self._mark = None


class Passes:
    """The forwards, backwards and optimizer steps of one attached model, in the order in which they come."""

    def __init__(
        self, prefix: str, find_clock: Callable[[], GpuClock | None], engine: Engine, guard: Callable[..., Hook]
    ) -> None:
        """Name the sections with `prefix`; `find_clock()` is asked at the first forward, when the model has moved."""
        self._fwd = Timer(f"{prefix}fwd", "compute")
        self._bwd = Timer(f"{prefix}bwd", "compute")
        self._comm = Timer(f"{prefix}comm_wait", "comm")
        self._optim = Timer(f"{prefix}optim", "compute")
        self._find_clock = find_clock
        self._clock: GpuClock | None = None
        self._engine = engine
        self._task = -1
        self._carried = NOTHING  # waits of the forwards since the last backward
        self.waits = Waits()
        self.forwards = 0
        self._on_gradient = guard(self.gradient_comes)
        self._on_own_end = guard(self.own_work_ends)
        self._on_end = guard(self.backward_ends)

    # -- forward

    def forward_begins(self) -> None:
        """Begin `fwd`, unless no gradients are wanted, or the forward is a part of the backward (recomputed)."""
        if not self._engine.gradients_wanted() or self._engine.task() is not None:
            return
        if not self.forwards:
            self._clock = self.waits.clock = self._find_clock()
        self.forwards += 1
        self.close()
        for timer in (self._fwd, self._bwd, self._comm):
            timer.find(self._clock)
        self.waits.block = self._comm.block
        self.waits.forget()
        if self._clock is not None:
            self._clock.harvest()
        self._fwd.begin(self._clock)

    def forward_gives(self, output: Any) -> None:
        """Watch the outputs: the first gradient that comes back is where the backward begins."""
        if self._bwd.is_open or not self._engine.gradients_wanted():
            return
        for tensor in islice(tensors_of(output), _MOST_OUTPUTS):
            if tensor.requires_grad:
                tensor.register_hook(self._on_gradient)

    def forward_ends(self, output: Any) -> None:
        """End `fwd`; without an output it was left by an exception."""
        if not self._fwd.is_open:
            return
        if output is None:
            self._fwd.drop(self._clock)
            self.waits.forget()
            return
        waited = self.waits.take()
        self._carried += waited
        self._fwd.end(self._clock, waited)

    # -- backward

    def gradient_comes(self, _gradient: Any) -> None:
        """Begin `bwd` at the first gradient of a backward."""
        task = self._engine.task()
        if self._bwd.is_open and task == self._task:
            return
        self.close()
        self._task = -1 if task is None else task
        self.waits.forget()
        if self._bwd.begin(self._clock):
            self._engine.at_end(self._on_own_end)

    def own_work_ends(self) -> None:
        """End `bwd` and begin to wait for the others."""
        waited = self.waits.take()
        self._carried += waited
        self._bwd.end(self._clock, waited)
        if self._comm.begin(self._clock):
            self._engine.at_end(self._on_end)

    def backward_ends(self) -> None:
        """End `comm_wait`, and count with it what was waited since the last backward."""
        waited = self._carried + self.waits.take()
        self._carried = NOTHING
        self._comm.end(self._clock, waited, add=True)

    # -- optimizer

    def step_begins(self) -> None:
        """Begin `optim`, unless the optimizer steps within the backward: that is the backward's time."""
        if self._engine.task() is None and not self._optim.is_open:
            self.close()
            self._optim.find(self._clock)
            self._optim.begin(self._clock)

    def step_ends(self) -> None:
        """End it."""
        self._optim.end(self._clock)

    def close(self) -> None:
        """Close what an exception has left open, without counting it."""
        for timer in (self._fwd, self._bwd, self._comm, self._optim):
            timer.drop(self._clock)
