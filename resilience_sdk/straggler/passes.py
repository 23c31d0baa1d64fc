"""What the hooks of an attached model tell, made into sections.

    fwd         the forward, with gradients on
    bwd         from the first gradient of the outputs to the end of this rank's own work
    comm_wait   from there until the gradients of all ranks are reduced, and every bracketed wait before
    optim       the optimizer's step, without its closure

The wall time of a backward names nobody: it contains the collectives, so it is equal on all ranks, and where
gradients are accumulated it is the *shortest* on the slow one. The end of a rank's own work is found by a callback
that autograd runs at the end of the backward. Callbacks run in the order in which they were queued; ours is queued
when the first gradient of the outputs comes, before DDP has any to reduce, so it runs before DDP's, which waits.
It queues another one, which runs when DDP has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any

import attrs

from resilience_sdk.lanes import BLOCKS
from resilience_sdk.straggler.autograd import NO_TASK, Engine
from resilience_sdk.straggler.gpu_events import GpuClock
from resilience_sdk.straggler.hooks import Guard, Hook
from resilience_sdk.straggler.timers import StepTimer, Timer
from resilience_sdk.straggler.waits import NOTHING, ForwardWaits, Waits, hook_gradient, tensors_of

Callback = Callable[[], None]

_MOST_OUTPUTS = 64  # tensors: a model may return caches too, and its loss comes first


@attrs.frozen
class Listener:
    """What is called, if given, where an adapter wants to know; on the thread that trains."""

    on_forward: Callback | None = None
    """Before each forward with gradients."""
    on_inference: Callback | None = None
    """Before each other one."""
    on_step: Callback | None = None
    """Before each step of the optimizer."""
    on_step_end: Callback | None = None
    """Behind it."""
    on_failure: Callback | None = None
    """When a hook has failed, the model is gone, or the hooks are taken off: none of these is called any more."""


NOBODY = Listener()


class Passes:
    """The forwards, backwards and optimizer steps of one attached model, in the order in which they come.

    All of it runs in every step, after some milliseconds of other work, when caches are cold. So what is asked often
    is asked in place, and what has nothing to do is not called.
    """

    def __init__(
        self,
        prefix: str,
        find_clock: Callable[[], GpuClock | None],
        engine: Engine,
        guard: Guard,
        listener: Listener = NOBODY,
    ) -> None:
        """Name the sections with `prefix`; `find_clock()` is asked at the first forward, when the model has moved."""
        self._fwd = Timer(f"{prefix}fwd", "compute")
        self._bwd = Timer(f"{prefix}bwd", "compute")
        self._comm = Timer(f"{prefix}comm_wait", "comm")
        self._optim = StepTimer(f"{prefix}optim", "compute")
        self._of_model = self._fwd, self._bwd, self._comm
        self._find_clock = find_clock
        self._clock: GpuClock | None = None
        self._engine = engine
        self._guard = guard
        self._on_forward = listener.on_forward
        self._on_inference = listener.on_inference
        self._tensor = engine.tensor
        self._is_watching = False  # inside a forward that is no export
        self._inside = 0  # calls of the model within its own forward
        self._has_given = False
        self._task = -1
        self._carried = NOTHING  # waits of the backward that runs, and of the forwards that it goes back through
        self._forward_waits = ForwardWaits()
        self._stepping = 0  # id of the optimizer whose step is timed
        self._has_closure = False
        self.waits = Waits()
        self.forwards = 0
        self._on_own_end = guard(self.own_work_ends)
        self._on_end = guard(self.backward_ends)

    # -- forward

    def forward_begins(self, *_: object) -> None:
        """Begin `fwd`, unless no gradients are wanted, or the forward is a part of the backward (recomputed)."""
        if self._fwd.is_open and self._fwd.is_running:
            self._inside += 1  # the model calls itself
            return
        engine = self._engine
        if engine.is_exporting():
            return
        self._is_watching = True
        if engine.task() != NO_TASK:
            return
        if not engine.gradients_wanted():
            if self._on_inference is not None:
                self._on_inference()
            return
        if self._on_forward is not None:
            self._on_forward()
        if not self.forwards:
            self._clock = self.waits.clock = self._find_clock()
            for timer in (*self._of_model, self._optim):
                timer.find(self._clock)
        self.forwards += 1
        self._make_room()
        self._find(self._of_model)
        waits = self.waits
        waits.block = self._comm.block
        if waits.is_used:
            waits.forget()
        self._has_given = False
        if self._clock is not None:
            self._clock.harvest()
        self._fwd.begin(self._clock)

    def forward_gives(self, *given: Any) -> None:
        """Watch the outputs, given last: the first gradient that comes back is where the backward begins."""
        if self._inside or not self._is_watching:
            return
        output = given[-1]
        self._has_given = True
        if self._bwd.is_open or not self._engine.gradients_wanted():
            return
        on_gradient = Hook(self._guard, partial(self.gradient_comes, self.forwards))
        is_one = isinstance(output, self._tensor)
        for tensor in (output,) if is_one else islice(tensors_of(output), _MOST_OUTPUTS):
            if not (tensor._backward_hooks and self._is_watched(tensor)):
                hook_gradient(tensor, on_gradient)

    def _is_watched(self, tensor: Any) -> bool:
        """Tell whether a tensor was an output before: one that is kept would collect a hook of every forward."""
        hooks = tensor._backward_hooks.values()
        return any(isinstance(hook, Hook) and hook.runs(self.gradient_comes) for hook in hooks)

    def forward_ends(self, *_: object) -> None:
        """End `fwd`; one that has given nothing was left by an exception."""
        if self._inside:
            self._inside -= 1
            return
        self._is_watching = False
        if not self._fwd.is_open:
            return
        if not self._has_given:
            self._fwd.drop(self._clock)
            self.waits.forget()
            return
        waited = NOTHING
        if self.waits.is_used:
            waited = self.waits.take()
            self._forward_waits.add(self.forwards, waited)
        self._fwd.end(self._clock, waited)

    # -- backward

    def gradient_comes(self, forward: int, _gradient: Any) -> None:
        """Begin `bwd` at the first gradient of a backward; it comes to an output of that forward."""
        task, waits = self._engine.task(), self.waits
        if self._bwd.is_open and task == self._task:
            if waits.is_used:
                self._carried += self._forward_waits.take(forward)
            return
        self._make_room()
        self._task = task
        if waits.is_used:
            waits.forget()
            self._carried = self._forward_waits.take(forward)
        if self._bwd.begin(self._clock):
            self._engine.at_end(self._on_own_end)

    def own_work_ends(self) -> None:
        """End `bwd` and begin to wait for the others."""
        waited = NOTHING
        if self.waits.is_used:
            waited = self.waits.take()
            self._carried += waited
        self._bwd.end(self._clock, waited)
        self._comm.begin(self._clock)
        self._engine.at_end(self._on_end)

    def backward_ends(self) -> None:
        """End `comm_wait`, and count with it what was waited in the backward and its forwards."""
        waited = NOTHING
        if self.waits.is_used:
            waited, self._carried = self._carried + self.waits.take(), NOTHING
        self._comm.end(self._clock, waited, add=True)
        if self._optim.in_closure:
            self._optim.resume(self._clock)

    # -- optimizer

    def step_begins(self, optimizer: object, *, has_closure: bool = False) -> None:
        """Begin `optim`, unless the optimizer steps within the backward, or within the step of another optimizer."""
        if self._engine.task() != NO_TASK or (self._optim.is_open and self._is_within_another(optimizer)):
            return
        self.close()
        self._stepping, self._has_closure = id(optimizer), has_closure
        self._find((self._optim,))
        self._optim.begin(self._clock)

    def step_ends(self, optimizer: object) -> None:
        """End it."""
        if self._stepping == id(optimizer):
            self._optim.end(self._clock)

    def _is_within_another(self, optimizer: object) -> bool:
        is_counting = self._optim.is_running and not self._optim.in_closure
        return is_counting and self._stepping != id(optimizer)

    def close(self) -> None:
        """Close what an exception has left open, without counting it."""
        for timer in (*self._of_model, self._optim):
            if timer.is_open:
                timer.drop(self._clock)
        self._inside = 0

    def _make_room(self) -> None:
        """Close what is open, for a forward or backward: of a step, these may be the closure."""
        if self._optim.is_open:
            if self._has_closure:
                self._optim.suspend(self._clock)
            else:
                self._optim.drop(self._clock)
        for timer in self._of_model:
            if timer.is_open:
                timer.drop(self._clock)
        self._inside = 0

    def _find(self, timers: Iterable[Timer]) -> None:
        """Record on the lane of the calling thread from now on: the one that trains."""
        thread = get_ident()
        for timer in timers:
            block = timer.block
            if block is None or BLOCKS.get(timer.name) is not block or block.lane.ident != thread:
                timer.find(self._clock)
