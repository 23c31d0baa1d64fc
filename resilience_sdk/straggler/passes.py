"""The passes of an attached model.

Forward, backward and optimizer become sections, each timed on the wall clock and on the GPU.

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

from collections.abc import Callable
from functools import partial
from itertools import islice
from threading import get_ident
from time import monotonic_ns
from typing import Any, Protocol

import attrs

from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.blocks import Block
from resilience_sdk.recorder.lookup import BLOCKS
from resilience_sdk.straggler.gpu import GpuClock, GpuEvent
from resilience_sdk.straggler.model_hooks import NOTHING, Guard, Hook, Waited, Waits, hook_gradient, tensors_of

NO_TASK = -1
"""Outside of all backwards."""


class Engine:
    """What is asked of torch in every step, each torch's own function."""

    def __init__(self) -> None:
        import torch

        self.tensor: type = torch.Tensor
        self.gradients_wanted: Callable[[], bool] = torch.is_grad_enabled
        self.is_exporting: Callable[[], bool] = torch.compiler.is_compiling
        # Private in name, but what DDP and FSDP2 end their own backward with; a test watches over the order.
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        queue: Callable[[Callable[[], None]], None] | None = getattr(engine, "queue_callback", None)
        self.has_callbacks = queue is not None
        """Whether a backward can be told to call at its end. Where not, it is not timed."""
        self.at_end: Callable[[Callable[[], None]], None] = queue or _never
        """Call what is given at the end of the running backward, after what was queued before."""
        self.task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", None) or _no_task
        """Return the number of the backward that the calling thread runs, `NO_TASK` outside of one."""


def _never(_callback: Callable[[], None]) -> None:
    pass


def _no_task() -> int:
    return NO_TASK


class SectionTimer:
    """A section that is whole: from its begin to its end, without or with what was waited."""

    def __init__(self, name: str, kind: str) -> None:
        """Be closed, and on no lane."""
        self.name = name
        self._kind = kind
        self.block: Block | None = None
        self._clock: GpuClock | None = None
        self._gpu_block: Block | None = None
        self._mark: GpuEvent | None = None
        self.is_open = False

    @property
    def is_running(self) -> bool:
        """Whether it is open, and no exception that left a heartbeat has closed it on the page."""
        return self.is_open and self.block is not None and self.block.t0 != 0

    def find(self, clock: GpuClock | None) -> None:
        """Record on the lane of the calling thread from now on, the one that trains, and on the device of `clock`."""
        self.block = lookup.find_own_block(self.name, self._kind)
        if clock is not None and self.block is not None:
            self._clock, self._gpu_block = clock, self.block.lane.recorder.on_device(self.block)

    def begin(self) -> bool:
        """Open it; False where nothing is recorded, or the user's own section of that name is open."""
        if self.block is None or not self.block.begin(monotonic_ns()):
            return False
        if self._gpu_block is not None:
            self._set_mark()
        self.is_open = True
        return True

    def end(self, waited: Waited = NOTHING, *, add: bool = False) -> None:
        """Close and count it, without what was waited in it, or with `add` together with what was waited before."""
        if not self.is_open or self.block is None:
            return
        self.is_open = False
        self.block.end(monotonic_ns(), -waited.ns if add else waited.ns)
        if self._clock is not None and self._gpu_block is not None:
            self._clock.measure(self._mark, self._clock.mark(), self._gpu_block, holes=waited.holes, add_holes=add)
            self._mark = None

    def drop(self) -> None:
        """Close it without counting: the pass did not come to its end."""
        if self.is_open and self.block is not None:
            self.is_open = False
            self.block.drop(monotonic_ns())
            self._drop_mark()

    def _set_mark(self) -> None:
        if self._clock is not None:
            self._mark = self._clock.mark()

    def _drop_mark(self) -> None:
        if self._clock is not None:
            self._clock.give_back(self._mark)
            self._mark = None


class StepTimer(SectionTimer):
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

    def suspend(self) -> None:
        """Do not count from here: the closure runs."""
        if self.in_closure or not self.is_running or self.block is None:
            return
        now = monotonic_ns()
        since = self._since
        if not since:
            since = self.block.t0
            self.block.drop(now)
        self.in_closure, self._since = True, 0
        self._before += Waited(now - since, () if self._clock is None else (self._clock.hole(self._mark),))
        self._mark = None

    def resume(self) -> None:
        """Count again from here."""
        if self.in_closure:
            self.in_closure, self._since = False, monotonic_ns()
            self._set_mark()

    def end(self, waited: Waited = NOTHING, *, add: bool = False) -> None:
        """Close and count it, together with its parts before a closure; one that ends within a closure is dropped."""
        if not self._since:
            if self.in_closure:
                self.drop()
            else:
                super().end(waited, add=add)
            return
        now = monotonic_ns()
        before = self._before + Waited(now - self._since)
        if self.block is not None and self.block.begin(now):
            self._reset()
            super().end(before, add=True)
        else:
            self.drop()

    def drop(self) -> None:
        """Close it without counting."""
        if self.in_closure or self._since:
            self.is_open = False
            self._reset()
            self._drop_mark()
        else:
            super().drop()

    def _reset(self) -> None:
        self._before, self._since, self.in_closure = NOTHING, 0, False


Callback = Callable[[], None]

_MOST_OUTPUTS = 64  # tensors: a model may return caches too, and its loss comes first
_MOST_FORWARDS = 64  # whose waits are kept until a backward comes back to their outputs; many never do


@attrs.frozen
class PassListener:
    """What is called, if given, where an adapter wants to know; on the thread that trains."""

    on_forward: Callback | None = None
    """Before each forward with gradients."""
    on_inference: Callback | None = None
    """Before each other one."""
    on_inference_end: Callback | None = None
    """Behind it."""
    on_step: Callback | None = None
    """Before each step of the optimizer."""
    on_step_end: Callback | None = None
    """Behind it."""
    on_failure: Callback | None = None
    """When a hook has failed, the model is gone, or the hooks are taken off: none of these is called any more."""


NOBODY = PassListener()


class HasClock(Protocol):
    """The device of an attached model."""

    def find_clock(self) -> GpuClock | None:
        """Return a clock for it; None where it has none."""


class ModelPasses:
    """The forwards, backwards and optimizer steps of one attached model, in the order in which they come.

    All of it runs in every step, after some milliseconds of other work, when caches are cold. So what is asked often
    is asked in place, and what has nothing to do is not called.
    """

    def __init__(
        self,
        prefix: str,
        device: HasClock,
        engine: Engine,
        guard: Guard,
        listener: PassListener = NOBODY,
    ) -> None:
        """Name the sections with `prefix`; `device` is asked at the first forward, when the model has moved."""
        self._fwd = SectionTimer(f"{prefix}fwd", "compute")
        self._bwd = SectionTimer(f"{prefix}bwd", "compute")
        self._comm = SectionTimer(f"{prefix}comm_wait", "comm")
        self._optim = StepTimer(f"{prefix}optim", "compute")
        self._of_model = self._fwd, self._bwd, self._comm
        self._device = device
        self._clock: GpuClock | None = None
        self._engine = engine
        self._guard = guard
        self._on_forward = listener.on_forward
        self._on_inference = listener.on_inference
        self._on_inference_end = listener.on_inference_end
        self._tensor = engine.tensor
        self._is_watching = False  # inside a forward that is no export
        self._inside = 0  # calls of the model within its own forward
        self._has_given = False
        self._task = -1
        self._carried = NOTHING  # waits of the backward that runs, and of the forwards that it goes back through
        self._forward_waits: dict[int, Waited] = {}
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
            self._clock = self.waits.clock = self._device.find_clock()
            for timer in (*self._of_model, self._optim):
                timer.find(self._clock)
        self.forwards += 1
        if self._fwd.is_open or self._bwd.is_open or self._comm.is_open or self._optim.is_open:
            self._make_room()
        if not self._is_here(self._fwd):  # which stands for all that were found with it
            for timer in self._of_model:
                timer.find(self._clock)
        waits = self.waits
        waits.block = self._comm.block
        if waits.is_used:
            waits.take()  # it belongs to no pass that is timed
        self._has_given = False
        if self._clock is not None:
            self._clock.harvest()
        self._fwd.begin()

    def forward_gives(self, *given: Any) -> None:
        """Watch the outputs, given last: the first gradient that comes back is where the backward begins."""
        if self._inside or not self._is_watching:
            return
        output = given[-1]
        self._has_given = True
        if self._bwd.is_open or not (self._engine.has_callbacks and self._engine.gradients_wanted()):
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
            if self._on_inference_end is not None:
                self._on_inference_end()
            return
        if not self._has_given:
            self._fwd.drop()
            self.waits.take()
            return
        waited = NOTHING
        if self.waits.is_used:
            waited = self._forward_waits[self.forwards] = self.waits.take()
            if len(self._forward_waits) > _MOST_FORWARDS:
                del self._forward_waits[next(iter(self._forward_waits))]
        self._fwd.end(waited)

    # -- backward

    def gradient_comes(self, forward: int, _gradient: Any) -> None:
        """Begin `bwd` at the first gradient of a backward; it comes to an output of that forward."""
        task, waits = self._engine.task(), self.waits
        if self._bwd.is_open and task == self._task:
            if waits.is_used:
                self._carried += self._forward_waits.pop(forward, NOTHING)
            return
        if self._fwd.is_open or self._bwd.is_open or self._comm.is_open or self._optim.is_open:
            self._make_room()
        self._task = task
        if waits.is_used:
            waits.take()
            self._carried = self._forward_waits.pop(forward, NOTHING)
        if self._bwd.begin():
            self._engine.at_end(self._on_own_end)

    def own_work_ends(self) -> None:
        """End `bwd` and begin to wait for the others."""
        waited = NOTHING
        if self.waits.is_used:
            waited = self.waits.take()
            self._carried += waited
        self._bwd.end(waited)
        self._comm.begin()
        self._engine.at_end(self._on_end)

    def backward_ends(self) -> None:
        """End `comm_wait`, and count with it what was waited in the backward and its forwards."""
        waited = NOTHING
        if self.waits.is_used:
            waited, self._carried = self._carried + self.waits.take(), NOTHING
        self._comm.end(waited, add=True)
        if self._optim.in_closure:
            self._optim.resume()

    # -- optimizer

    def step_begins(self, optimizer: object, *, has_closure: bool = False) -> None:
        """Begin `optim`, unless the optimizer steps within the backward, or within the step of another optimizer."""
        if self._engine.task() != NO_TASK or (self._optim.is_open and self._is_within_another(optimizer)):
            return
        if self._fwd.is_open or self._bwd.is_open or self._comm.is_open or self._optim.is_open:
            self.close()
        self._stepping, self._has_closure = id(optimizer), has_closure
        if not self._is_here(self._optim):
            self._optim.find(self._clock)
        self._optim.begin()

    def step_ends(self, optimizer: object) -> None:
        """End it."""
        if self._stepping == id(optimizer):
            self._optim.end()

    def _is_within_another(self, optimizer: object) -> bool:
        is_counting = self._optim.is_running and not self._optim.in_closure
        return is_counting and self._stepping != id(optimizer)

    def close(self) -> None:
        """Close what an exception has left open, without counting it."""
        for timer in (*self._of_model, self._optim):
            if timer.is_open:
                timer.drop()
        self._inside = 0

    def _make_room(self) -> None:
        """Close what is open, for a forward or backward: of a step, these may be the closure."""
        if self._optim.is_open:
            if self._has_closure:
                self._optim.suspend()
            else:
                self._optim.drop()
        for timer in self._of_model:
            if timer.is_open:
                timer.drop()
        self._inside = 0

    def _is_here(self, timer: SectionTimer) -> bool:
        """Tell whether it still records, on the lane of the calling thread: the one that trains."""
        block = timer.block
        return block is not None and BLOCKS.get(timer.name) is block and block.lane.ident == get_ident()


class CompiledCall:
    """A call of a model with hooks around it instead of in it: what `model.compile()` made, or a method.

    Nobody but the model holds it: it leads to what is compiled, and that to the model.
    """

    __slots__ = ("_begins", "_ends", "_gives", "compiled", "guard")

    def __init__(self, compiled: Callable[..., Any], guard: Guard, passes: ModelPasses) -> None:
        self.compiled = compiled
        self.guard = guard
        self._begins = guard(passes.forward_begins)
        self._gives = guard(passes.forward_gives)
        self._ends = guard(passes.forward_ends)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        self._begins()
        try:
            output = self.compiled(*args, **kwargs)
            self._gives(output)
        finally:
            self._ends()
        return output
