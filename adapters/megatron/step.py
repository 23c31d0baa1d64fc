"""The step of a loop on Megatron, and the sections that its timers begin and end. All for the thread that trains.

A timer of Megatron that is on synchronises with the device, and one that is off is a dummy. Both stay what they are:
this delegate reads the host's clock and nothing else.

Each start and stop of a timer comes here, in every step: so a span does all of it by itself, and asks nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from resilience_sdk.adapters._base import EvaluationBeat, HookedSection, StepBeat
from resilience_sdk.recorder.lookup import find_own_block
from resilience_sdk.straggler.model_hooks import Guard

STEP = "forward-backward"
OPTIMIZER = "optimizer"
DATA = "batch-generator"
LOAD = "load-checkpoint"
SAVE = "save-checkpoint"
INTERVAL = "interval-time"
"""Begun by Megatron-LM's `train()` before its first step, when its iterators are made."""

KINDS = {"data": "io", "checkpoint": "io", "finalize": "io", "resume": "io", "comm_wait": "comm"}
_NAMES = {
    "forward-compute": "fwd",
    "backward-compute": "bwd",
    DATA: "data",
    OPTIMIZER: "optim",
    "eval-time": "eval",
    "evaluate": "eval",
    SAVE: "checkpoint",
    "save-checkpoint-non-persistent": "checkpoint",
    LOAD: "resume",
}
# Where a rank waits for others: between stages of a pipeline, and for the gradients of its replicas.
_WAITS = (
    "all-grads-sync",
    "conditional-embedder-grads-all-reduce",
    "embedding-grads-all-reduce",
    "layernorm-grads-all-reduce",
    "non-tensor-parallel-grads-all-reduce",
    "params-all-gather",
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "forward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
SECTION_OF = {**_NAMES, **dict.fromkeys(_WAITS, "comm_wait")}
IN_STEP = ("fwd", "bwd", "data", "optim", "comm_wait")
"""Those that are never open between two steps."""
NAMES = (*dict.fromkeys(SECTION_OF.values()), "finalize")


Heard = tuple[Callable[[], None], Callable[[], None] | None]
"""What to call behind the start of a timer, and before its stop, if anything."""


class ObservingTimers:
    """What `config.timers` and `get_timers()` give while it is attached; all but the watched names is `inner`'s own."""

    def __init__(self, inner: Any, heard: dict[str, Heard], guard: Guard) -> None:
        """Delegate to `inner`, which may be None where the loop has no timers. What hears fails by the `guard`."""
        self.inner = inner if inner is not None else _no_timers
        self.plain = inner
        """What to put back."""
        # A method is called at less cost than an object.
        self._own: Callable[..., Any] = inner.__call__ if inner is not None else _no_timers
        self._watched = {name: ObservedTimer(*begins_and_ends, guard) for name, begins_and_ends in heard.items()}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """Return the timer of that name."""
        own = self._own(name, log_level)
        watched = self._watched.get(name)
        if watched is None:
            return own
        watched.inner = own
        return watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Be Megatron's own timers in a copy of the configuration, perhaps in another process."""
        return itself, (self.plain,)


class ObservedTimer:
    """A timer of Megatron, heard."""

    __slots__ = ("_begins", "_ends", "_guard", "inner")

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None] | None, guard: Guard) -> None:
        self.inner: Any = None
        self._begins, self._ends = begins, ends
        self._guard = guard

    # `Guard.run`, written out: each step has some ten of these and more.

    def start(self, barrier: bool = False) -> None:
        """Start it; what it waits for before does not count."""
        self.inner.start(barrier=barrier)
        if self._guard.is_on:
            try:
                self._begins()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self._guard.fail(error)

    def stop(self, barrier: bool = False) -> None:
        """Stop it; what it waits for then does not count."""
        if self._ends is not None and self._guard.is_on:
            try:
                self._ends()
            except Exception as error:  # noqa: BLE001 - as above
                self._guard.fail(error)
        self.inner.stop(barrier=barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _NoTimer:
    """A timer of a loop that has none."""

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


_NO_TIMER = _NoTimer()


def itself(plain: Any) -> Any:
    """Return it: what unpickling a delegate calls."""
    return plain


def _no_timers(_name: str, _log_level: int | None = None) -> _NoTimer:
    return _NO_TIMER


class SharedSection(HookedSection):
    """A section that several seams may begin and end, one inside the other: the outermost pair counts."""

    __slots__ = ("_step", "depth")
    begins_step = False

    def __init__(self, name: str, step: Step | None = None) -> None:
        """Be closed. A section of a `step` begins in it alone, but for those that begin the step themselves."""
        super().__init__(name, KINDS.get(name, "compute"))
        self._step = step
        self.depth = 0
        """How many begins wait for their end."""

    def begin(self) -> None:
        """Begin, or count one more that has begun."""
        step = self._step
        if step is not None and not (step.is_open or (self.begins_step and step.begins_with_gradients())):
            return
        depth = self.depth = self.depth + 1
        if depth == 1:
            block = find_own_block(self._name, self._kind)
            if block is not None and block.begin(monotonic_ns()):
                self.block = block

    def end(self) -> None:
        """End what began; the last one closes the section, and counts it. Nothing where none has begun."""
        if not self.depth:
            self.end_unbegun()
            return
        depth = self.depth = self.depth - 1
        if not depth:
            block, self.block = self.block, None
            if block is not None:
                block.end(monotonic_ns())

    def end_unbegun(self) -> None:
        """Do what is due where an end comes without a begin, as in an evaluation: nothing."""

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        self.depth = 0
        super().drop()


class Step:
    """The heartbeat of a step: begun by the first of its parts that is heard, ended by the optimizer."""

    __slots__ = ("beat", "evaluation", "global_step", "has_gradients", "is_open", "number")

    def __init__(self, global_step: int | None) -> None:
        """`global_step` is the one that begins, None where steps are only counted."""
        import torch

        self.beat = StepBeat()
        self.global_step = global_step
        self.number: Callable[[], int | None] | None = None
        """Tells the same, where somebody else counts."""
        self.has_gradients: Callable[[], bool] = torch.is_grad_enabled
        """Tells whether gradients are wanted: an evaluation is no step."""
        self.evaluation = SharedSection("eval")
        self.is_open = False

    def begin(self) -> None:
        """Begin it, unless it has begun; not in an evaluation, whose iterations are steps to NVRx's client."""
        if not (self.is_open or self.evaluation.depth):
            self.is_open = True
            self.beat.begin(self.global_step if self.number is None else self.number())

    def begins_with_gradients(self) -> bool:
        """Begin it where gradients are wanted, and tell whether they are."""
        is_wanted = self.has_gradients()
        if is_wanted:
            self.begin()
        return is_wanted

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        self.is_open = False
        self.beat.drop()


class StepPart(SharedSection):
    """A forward or a backward: begins the step that it is the first of; that of an evaluation is none."""

    __slots__ = ()
    begins_step = True


class Forward(StepPart):
    """A forward; in an evaluation it is the heartbeat of a batch."""

    __slots__ = ("_batch", "_has_gradients", "begun")

    def __init__(self, name: str, step: Step) -> None:
        """Be closed."""
        super().__init__(name, step)
        self._has_gradients, self._batch = step.has_gradients, EvaluationBeat()
        self.begun = 0
        """How many with gradients have begun."""

    def begin(self) -> None:
        """Begin it."""
        if self._has_gradients():
            self.begun += 1
            super().begin()
        else:
            self._batch.begin()

    def end_unbegun(self) -> None:
        """End the batch of an evaluation."""
        self._batch.end()

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        self._batch.drop()
        super().drop()


class Fetch(SharedSection):
    """The wait for a batch, which Megatron has inside of its forward: a rank with slow storage has no slow model."""

    __slots__ = ("_forward", "_has_gradients")

    def __init__(self, name: str, step: Step, forward: SharedSection) -> None:
        """Be closed."""
        super().__init__(name)
        self._has_gradients, self._forward = step.has_gradients, forward

    def begin(self) -> None:
        """Begin it, unless it is that of an evaluation; the forward is taken back, and begins anew behind it."""
        if not self._has_gradients():
            return
        depth = self.depth = self.depth + 1
        if depth == 1:
            now, forward, block = monotonic_ns(), self._forward.block, find_own_block(self._name, self._kind)
            if forward is not None:
                forward.drop(now)
            if block is not None and block.begin(now):
                self.block = block

    def end(self) -> None:
        """End what began; the last one closes the section, and counts it."""
        if not self.depth:
            return
        depth = self.depth = self.depth - 1
        if not depth:
            now, block, self.block = monotonic_ns(), self.block, None
            if block is not None:
                block.end(now)
            forward = self._forward.block
            if forward is not None and not forward.begin(now):
                self._forward.block = None  # the script's own section of this name has begun meanwhile


def spans(step: Step) -> dict[str, SharedSection]:
    """Return a span for each section, by name."""
    forward = Forward("fwd", step)
    known = {
        "fwd": forward,
        "bwd": StepPart("bwd", step),
        "data": Fetch("data", step, forward),
        "comm_wait": SharedSection("comm_wait", step),  # parameters may be gathered between two steps, too
        "eval": step.evaluation,
    }
    return {name: known.get(name) or SharedSection(name) for name in NAMES}
