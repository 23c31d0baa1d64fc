"""`attach()`: the steps and sections of a loop on `megatron.core`, told by its timers and its optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from resilience_sdk import environ, lanes, preemption
from resilience_sdk.adapters._base import check_first_step
from resilience_sdk.adapters.megatron import exits, surroundings
from resilience_sdk.adapters.megatron.sections import IN_STEP, OPTIMIZER, SECTION_OF, STEP
from resilience_sdk.adapters.megatron.step import Step, spans
from resilience_sdk.adapters.megatron.timers import Heard, ObservingTimers
from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.session.run import is_stepping
from resilience_sdk.straggler.hooks import Guard

_current: Attached | None = None
_STEPS_WITHOUT_OPTIMIZER = 3


def attach(config: Any, optimizer: Any = None, *, first_step: int | None = None) -> Attached:
    """Watch a training loop on `megatron.core`; the handle's `detach()` ends that.

    A delegate takes the place of `config.timers`, also where that is None, and hears what Megatron times: `fwd`, `bwd`,
    `data` (timer `batch-generator`), `comm_wait` (between stages, and for the gradients), `checkpoint` and `eval`.
    A step is a heartbeat: it begins with the first forward with gradients, and ends with `optimizer.step()`, which is
    section `optim`. Ranks of different pipeline stages are not compared with one another. Nothing waits for a device
    or for another rank; timers that are on at the log level of the loop synchronise as ever.

    Call it on every rank when the model and the optimizer are made, in the thread that trains.

    Args:
        config: What the model was made with, `TransformerConfig` or another `ModelParallelConfig`.
        optimizer: What `get_megatron_optimizer` returned; None where the loop times its step with timer `optimizer`.
        first_step: How many steps are complete already, as a resume knows it: steps then have global numbers in
            reports. None where nothing is resumed; they are counted per attempt.

    Raises:
        ConfigError: An argument is wrong, or the process has a loop attached already.

    Example:
        handle = megatron.attach(config, optimizer, first_step=iteration)
        while handle.step < train_iters:
            train_step()
            if handle.should_stop():  # on all ranks behind the same step
                save()
                preemption.exit()
    """
    _check(config, optimizer, first_step)
    handle = Attached(first_step)
    try:
        handle.watch_timers(config, "timers")
        if optimizer is not None:
            handle.watch_optimizer(optimizer)
    except BaseException:
        handle.detach()
        raise
    handle.starts()
    return handle


class Attached:
    """What is hung on one loop, and its steps so far; a context manager that detaches. The thread that trains."""

    def __init__(self, first_step: int | None = None) -> None:
        """Be the one of this process; raises ConfigError where there is another."""
        global _current
        if _current is not None:
            raise ConfigError(
                "megatron: this process has a loop attached already; call detach() of its handle first, or attach "
                "once, with what all model chunks share"
            )
        _current = self
        self.step = first_step or 0
        """Completed steps, over all attempts where `first_step` says so; the number of the next one."""
        self.step_under_way = Step(first_step)
        self.spans = spans(self.step_under_way)
        self._parts = tuple(self.spans[name] for name in IN_STEP)
        self._update = self.spans["optim"]
        self._optimizer_depth = 0
        self._unfinished = 0
        self._has_stepped = False
        self._restore: list[Callable[[], None]] = []
        self.guard = Guard(self._failed)
        self._is_attached = True
        self.is_on = not environ.is_disabled(environ.environment())
        """Whether anything is recorded at all."""
        if not self.is_on:
            lanes.recorder()  # says so

    @property
    def is_attached(self) -> bool:
        """Whether it was not detached yet."""
        return self._is_attached

    def number_by(self, number: Callable[[], int | None]) -> None:
        """Have `number()` tell the number of the step that begins, None where steps are only counted."""
        self.step_under_way.number = number

    def should_stop(self) -> bool:
        """Tell whether to save and leave now: True on all ranks behind the same step. Once per step, on all ranks."""
        is_time = self.is_stop_agreed()
        if is_time:
            heartbeat.done()  # saving may take any time
        return is_time

    def is_stop_agreed(self) -> bool:
        """Tell the same for a loop whose save is a section, which has a deadline of its own."""
        return self._is_attached and not is_stepping() and preemption.check(self.step)

    def watch(self, forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
        """Return it as section `fwd`, also where no timer is; it leaves nothing open if it raises."""
        if not self.is_on:
            return forward_step_func
        run, forward = self.guard.run, self.spans["fwd"]

        @functools.wraps(forward_step_func)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            run(forward.begin)
            try:
                result = forward_step_func(*args, **kwargs)
            except BaseException:
                self.drop()
                raise
            run(forward.end)
            return result

        return forward_step

    def watch_timers(self, owner: Any, name: str) -> None:
        """Put a delegate in the place of the timers that `owner` has under that name."""
        if not self.is_on:
            return
        heard: dict[str, Heard] = {
            timer: (self.spans[section].begin, self.spans[section].end) for timer, section in SECTION_OF.items()
        }
        heard[STEP] = self._step_begins, None
        heard[OPTIMIZER] = self._optimizer_begins, self._optimizer_ends
        timers = ObservingTimers(getattr(owner, name), heard, self.guard)
        setattr(owner, name, timers)

        def restore() -> None:
            if getattr(owner, name) is timers:
                setattr(owner, name, timers.plain)

        self._restore.append(restore)

    def watch_optimizer(self, optimizer: Any) -> None:
        """Count the steps of a Megatron optimizer, and time them."""
        plain, begins, ends = optimizer.step, self._optimizer_begins, self._optimizer_ends

        @functools.wraps(plain)
        def step(*args: Any, **kwargs: Any) -> Any:
            begins()
            try:
                result = plain(*args, **kwargs)
            except BaseException:
                self._optimizer_depth = 0
                self.drop()
                raise
            ends()
            return result

        had_own = "step" in vars(optimizer)
        optimizer.step = step

        def restore() -> None:
            if vars(optimizer).get("step") is not step:
                return
            if had_own:
                optimizer.step = plain
            else:
                del optimizer.step

        self._restore.append(restore)

    def on_detach(self, restore: Callable[[], None]) -> None:
        """Have it called when this is detached."""
        self._restore.append(restore)

    def starts(self) -> None:
        """Say what this rank does, which its process groups tell."""
        if self.is_on:
            self.guard.run(surroundings.declare)

    def detach(self) -> None:
        """Leave Megatron as it was; ends the deadlines of this rank. May be repeated."""
        global _current
        was_attached, self._is_attached, self.guard.is_on = self._is_attached, False, False
        for restore in reversed(self._restore):
            restore()
        self._restore = []
        if _current is self:
            _current = None
        if was_attached:
            self.drop()
            for span in self.spans.values():
                span.drop()
            if not is_stepping():
                heartbeat.done()

    def drop(self) -> None:
        """Close what is open of this step, after an exception; the step does not count."""
        for span in self._parts:
            span.drop()
        self.step_under_way.drop()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exits.record(error)
        self.detach()

    # -- what the timers tell

    def _step_begins(self) -> None:
        if not self.step_under_way.has_gradients():
            return  # an evaluation
        for span in self._parts:
            if span.depth:
                span.drop()  # an exception has left it so
        if not self._has_stepped:
            self._look_for_optimizer()
        self.step_under_way.begin()

    # `Guard.run`, written out: each call that is spared in a step is worth more than two lines.

    def _optimizer_begins(self) -> None:
        depth = self._optimizer_depth = self._optimizer_depth + 1
        if depth == 1 and self.guard.is_on:
            try:
                self._update.begin()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self.guard.fail(error)

    def _optimizer_ends(self) -> None:
        if not self._optimizer_depth:
            return
        depth = self._optimizer_depth = self._optimizer_depth - 1
        if depth:
            return
        # Whatever becomes of the rest: loops end by it.
        under_way = self.step_under_way
        number = None if under_way.number is None else under_way.number()
        self.step = (self.step if number is None else number) + 1
        if under_way.global_step is not None:
            under_way.global_step = self.step
        self._has_stepped = True
        if self.guard.is_on:
            try:
                self._update.end()
            except Exception as error:  # noqa: BLE001 - as above
                self.guard.fail(error)

    def _look_for_optimizer(self) -> None:
        self._unfinished += 1
        if self._unfinished > _STEPS_WITHOUT_OPTIMIZER:
            surroundings.say_first(
                "megatron optimizer",
                "megatron: no step of an optimizer was seen, so no step is counted: attach(config, optimizer), or time "
                "the step of the loop with its timer 'optimizer'",
            )

    def _failed(self, error: Exception) -> None:
        self.drop()
        say_once(
            "megatron failed",
            f"megatron: a hook failed, heartbeats and sections are switched off and training goes on: "
            f"{type(error).__name__}: {error}",
        )


def _check(config: Any, optimizer: Any, first_step: Any) -> None:
    if not hasattr(config, "timers"):
        raise ConfigError(
            f"attach({type(config).__name__}): expected the configuration of the model, a ModelParallelConfig of "
            "megatron.core with a field `timers`; of a model pass get_model_config(model)"
        )
    if optimizer is not None and not callable(getattr(optimizer, "step", None)):
        raise ConfigError(
            f"attach(config, {optimizer!r}): expected what get_megatron_optimizer() returned, or None where the loop "
            "times its step with the timer 'optimizer'"
        )
    check_first_step(first_step)
