"""The step of a loop on Megatron, and the sections that its timers begin and end. All for the thread that trains.

Each start and stop of a timer comes here, in every step: so a span does all of it by itself, and asks nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns

from resilience_sdk.adapters._base import StepBeat
from resilience_sdk.adapters.megatron.sections import KINDS, NAMES
from resilience_sdk.hang.deadlines import FALLBACK_INITIAL_S
from resilience_sdk.lanes import Block, find_own_block
from resilience_sdk.session.lifecycle import current


class Span:
    """A section that several seams may begin and end, one inside the other: the outermost pair counts."""

    __slots__ = ("_kind", "_name", "_step", "block", "depth")

    def __init__(self, name: str, step: Step | None = None) -> None:
        """Be closed. A section of a `step` begins in it alone, but for those that begin the step themselves."""
        self._name, self._kind = name, KINDS.get(name, "compute")
        self._step: Step | _Always = _ALWAYS if step is None else step
        self.block: Block | None = None
        """What was begun; None where that is the script's, or nothing is recorded."""
        self.depth = 0
        """How many begins wait for their end."""

    def begin(self) -> None:
        """Begin, or count one more that has begun."""
        if not (self._step.is_open or self._begins_step()):
            return
        depth = self.depth = self.depth + 1
        if depth == 1:
            block = find_own_block(self._name, self._kind)
            if block is not None and block.begin(monotonic_ns()):
                self.block = block

    def end(self) -> None:
        """End what began; the last one closes the section, and counts it. Nothing where none has begun."""
        if self.depth:
            depth = self.depth = self.depth - 1
            if not depth:
                block, self.block = self.block, None
                if block is not None:
                    block.end(monotonic_ns())

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        self.depth = 0
        block, self.block = self.block, None
        if block is not None:
            block.drop(monotonic_ns())

    def _begins_step(self) -> bool:
        """Tell whether it is the first of a step, and begin that."""
        return False


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
        self.evaluation = Span("eval")
        self.is_open = False

    def begin(self) -> None:
        """Begin it, unless it has begun; not in an evaluation, whose iterations are steps to NVRx's client."""
        if not (self.is_open or self.evaluation.depth):
            self.is_open = True
            self.beat.begin(self.global_step if self.number is None else self.number())

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        self.is_open = False
        self.beat.drop()


class Part(Span):
    """A forward or a backward: begins the step that it is the first of; that of an evaluation is none."""

    __slots__ = ("_first_of",)

    def __init__(self, name: str, step: Step) -> None:
        """Be closed."""
        super().__init__(name, step)
        self._first_of = step

    def _begins_step(self) -> bool:
        """Begin it where gradients are wanted."""
        is_first = self._first_of.has_gradients()
        if is_first:
            self._first_of.begin()
        return is_first


class Fetch(Span):
    """The wait for a batch, which Megatron has inside of its forward: a rank with slow storage has no slow model."""

    __slots__ = ("_forward", "_has_gradients")

    def __init__(self, name: str, step: Step, forward: Span) -> None:
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


class Update(Span):
    """The optimizer's, which ends the step. Its begins and ends are paired by who calls them."""

    __slots__ = ("_last_of",)

    def __init__(self, name: str, step: Step) -> None:
        """Be closed."""
        super().__init__(name)
        self._last_of = step

    def begin(self) -> None:
        """Begin it, and the step of a loop whose forwards are not seen."""
        if not self._last_of.is_open:
            self._last_of.begin()
        self.depth = 1
        block = find_own_block(self._name, self._kind)
        if block is not None and block.begin(monotonic_ns()):
            self.block = block

    def end(self) -> None:
        """End it, and the step."""
        self.depth = 0
        block, self.block = self.block, None
        if block is not None:
            block.end(monotonic_ns())
        step = self._last_of
        step.is_open = False
        step.beat.end()


class Finalize(Span):
    """The looks at saves in the background. The last one waits for the save to end, and may take as long as that.

    So what the many short ones teach is no deadline for it: it has a long one.
    """

    __slots__ = ("_has_deadline",)

    def __init__(self, name: str) -> None:
        """Be closed."""
        super().__init__(name)
        self._has_deadline = False

    def begin(self) -> None:
        """Begin it, the first time with its deadline, unless the user has set one."""
        if not self._has_deadline:
            self._has_deadline = True
            block, session = find_own_block(self._name, self._kind), current()
            if block is not None and (session is None or self._name not in session.settings.section_timeouts):
                block.lane.recorder.retime(block, FALLBACK_INITIAL_S)
        super().begin()


class _Always:
    """In place of a step, for what belongs to none."""

    is_open = True


_ALWAYS = _Always()


def spans(step: Step) -> dict[str, Span]:
    """Return a span for each section, by name."""
    forward = Part("fwd", step)
    known: dict[str, Span] = {
        "fwd": forward,
        "bwd": Part("bwd", step),
        "data": Fetch("data", step, forward),
        "comm_wait": Span("comm_wait", step),  # parameters may be gathered between two steps, too
        "optim": Update("optim", step),
        "eval": step.evaluation,
        "finalize": Finalize("finalize"),
    }
    return {name: known.get(name) or Span(name) for name in NAMES}
