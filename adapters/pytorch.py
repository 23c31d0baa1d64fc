"""Plain PyTorch: one line beside a loop of one's own.

    from resilience_sdk.adapters import pytorch

    handle = pytorch.attach(model, optimizer, loader)  # last: after DDP, fully_shard or torch.compile

`resilience_sdk.start_run` and `Run.steps` are the full form, which saves and resumes too.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from resilience_sdk import environ, lanes, preemption, straggler
from resilience_sdk.adapters._base import StepBeat, check_first_step
from resilience_sdk.adapters._timed_loader import TimedLoader
from resilience_sdk.console import say_once
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.session.run import is_stepping
from resilience_sdk.session.train_step import resilient
from resilience_sdk.straggler.hooks import Guard

__all__ = ["Attached", "attach", "resilient"]

Through = Callable[[Iterator[Any]], Iterator[Any]]

_NEVER = math.inf

_current: Attached | None = None


def attach(model: Any, optimizer: Any, loader: Any = None, *, first_step: int | None = None) -> Attached:
    """Watch a training loop without a line in it; the handle's `detach()` ends that.

    Each step of `optimizer` is a heartbeat, which begins with the first forward that has gradients, so that under
    gradient accumulation all micro-batches are in it; not what comes behind the last batch of `loader`, nor a forward
    in another mode (`model.eval()`) than that of the last step. `fwd`, `bwd`, `comm_wait` and `optim` are sections (see
    `straggler.attach`), and `data` is the wait for the batches of `loader`. Each optimizer step ends with a
    `preemption.check()`: once all ranks have agreed to stop, `Preempted` is raised where the next step begins (the
    next batch of `loader`, the next forward, or the next optimizer step, whichever comes first), on every rank behind
    the same step. Catch it around the loop, save, and raise it again.

    Call it on every rank, last, on the object that the loop calls: after DDP, `fully_shard` or `torch.compile`. Inside
    `Run.steps` and `@resilient` only the sections are added, since those beat and check themselves. No collective, no
    synchronisation with a device. A hook that fails says so once and switches all off.

    Args:
        model: The `nn.Module` that the loop calls.
        optimizer: The `torch.optim.Optimizer` whose steps are the progress.
        loader: What each epoch iterates anew, such as a `DataLoader`. It stays the object that it is.
        first_step: How many steps are complete already, as a resume knows it: steps then have global numbers in
            reports. None where nothing is resumed; they are counted per attempt.

    Raises:
        ConfigError: An argument is wrong, or the process has a loop attached already.

    Example:
        handle = pytorch.attach(model, optimizer, loader)
        try:
            for batch in loader:
                train_step(batch)
        except resilience_sdk.Preempted:
            save()
            raise
    """
    _check(model, optimizer, first_step)
    return watch(lambda: Attached(model, optimizer, loader, first_step))


def watch(make: Callable[[], Attached]) -> Attached:
    """Make the one thing that is attached in this process; raises ConfigError where there is one. For adapters."""
    global _current
    refuse_second()
    _current = make()
    return _current


class Attached:
    """The hooks on one loop, and its steps so far; a context manager that detaches. The thread that trains."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loader: Any,
        first_step: int | None,
        *,
        between_steps: Callable[[bool], int] | None = None,
        through: Through | None = None,
    ) -> None:
        """Put the hooks on; use `attach`.

        For adapters built on this one: `between_steps(is_leaving)` is called where a step has ended and the next one
        begins, and returns behind how many steps that is due again; `through(batches)` for each iterator of the
        loader (see `TimedLoader`).
        """
        self.step = first_step or 0
        """Completed optimizer steps, over all attempts where `first_step` says so; the number of the next one."""
        self._is_global = first_step is not None
        self._is_between = False  # what is due between two steps was not done yet
        self._is_leaving = False
        self._is_apart = False
        self._is_in_step = False
        self._alone: set[bool] = set()  # the hooks that we have put on, since those of the sections are gone
        self._between_steps = between_steps
        self._due_at = _NEVER if between_steps is None else 0.0
        self._is_attached = True
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        # Of the last forward with gradients, and of that of the last complete step: whether in training mode.
        self._mode = self._mode_of_steps = True
        self._beat = StepBeat()
        self._guard = Guard(self._failed)
        self._sections: Any = None
        self._handles: list[Any] = []
        self._loader: TimedLoader | None = None
        try:
            self._put_on(model, optimizer, loader, through)
        except BaseException:
            self.detach()
            raise

    def _put_on(self, model: Any, optimizer: Any, loader: Any, through: Any) -> None:
        if environ.is_disabled(environ.environment()):
            self._guard.is_on = False
            lanes.recorder()  # says so
            self._handles.append(optimizer.register_step_post_hook(Guard(_ignore)(self._step_ends)))
            if through is not None and loader is not None:
                self._loader = TimedLoader(loader, through)
            return
        try:
            self._hang_on(model, optimizer, loader, through)
        except BaseException:
            self.detach()
            raise

    def _hang_on(self, model: Any, optimizer: Any, loader: Any, through: Through | None) -> None:
        if loader is not None:
            self._loader = TimedLoader(loader, through, self._beat.interrupt)
            preemption.time_left()  # before the loader forks workers, which would take the signals as theirs
        self._sections = straggler.attach(
            model,
            optimizer,
            on_forward=self._forward_begins,
            on_inference=self._inference_begins,
            on_step=self._step_begins,
            on_step_end=self._step_ends,
            on_failure=self._sections_failed,
        )

    @property
    def is_attached(self) -> bool:
        """Whether it was not detached yet, and the model is still there."""
        return self._is_attached and self._model() is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no step for one meanwhile: loading the state of an optimizer may make some. For adapters."""
        before = self.step, self._is_between, self._is_leaving, self._due_at
        self._is_between, self._is_leaving, self._due_at = False, False, _NEVER
        was_on, self._guard.is_on = self._guard.is_on, False
        self._beat.drop()
        try:
            yield
        finally:
            self.step, self._is_between, self._is_leaving, self._due_at = before
            self._guard.is_on = was_on and self._is_attached

    def go_to(self, step: int) -> None:
        """Go on behind another number of steps, as of a state that was loaded. For adapters."""
        self.step = step
        if not self._is_apart:
            self._ask_anew()

    def _ask_anew(self) -> None:
        self._due_at = _NEVER if self._between_steps is None else 0.0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Only count steps meanwhile, of which ranks may take different numbers, until they `meet()`. For adapters.

        What was due before is done first; all ranks are here.
        """
        self._leave_if_asked()
        self._is_apart, self._due_at = True, _NEVER
        try:
            yield
        finally:
            self._is_apart = False
            self._ask_anew()
            # Of micro-batches that make no step any more: its deadline would go on while this rank waits for others.
            self._beat.drop()

    def meet(self, gather: Callable[[int], list[int]]) -> None:
        """Go on with as many steps as the rank that took most, and do what is due between two. Collective, as `gather`.

        Raises `Preempted`.
        """
        self.step = max(gather(self.step))
        self._is_between = self._between_steps is not None
        self._guard.run(self._step_is_complete)
        self._leave_if_asked()

    def detach(self) -> None:
        """Take all hooks off and give the loader its class back; ends the deadlines of this rank. May be repeated."""
        global _current
        was_attached, self._is_attached, self._guard.is_on = self._is_attached, False, False
        for hook in self._handles:
            hook.remove()
        self._handles = []
        if self._loader is not None:
            self._loader.restore()
        if self._sections is not None:
            self._sections.detach()
        if _current is self:
            _current = None
        if was_attached:
            self._beat.drop()
            if not is_stepping():
                heartbeat.done()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # -- what the hooks tell

    # In every step: a call that can be spared is.

    def _forward_begins(self) -> None:
        if self._is_between or self._is_leaving:
            self._leave_if_asked()
        if self._guard.is_on:
            model = self._model()  # `_mode_now`, written out
            self._mode = mode = model is None or bool(model.training)
            if mode is self._mode_of_steps:
                self._beat.begin(self.step if self._is_global else None)
            else:
                self._beat.interrupt()  # an evaluation that wants gradients, or the first step of a frozen model

    def _inference_begins(self) -> None:
        if self._mode_now() is not self._mode_of_steps:
            self._beat.interrupt()  # an evaluation, behind micro-batches that made no step

    def _mode_now(self) -> bool:
        model = self._model()
        return model is None or bool(model.training)

    def _step_begins(self) -> None:
        self._is_in_step = True
        if self._is_between or self._is_leaving:
            self._leave_if_asked()
        beat = self._beat.beat
        if beat is None or not beat.t0:  # of a model whose forward was not seen
            self._guard.run(self._begin)

    def _begin(self) -> None:
        self._beat.begin(self.step if self._is_global else None)

    def _step_ends(self, *_: Any) -> None:
        self._is_in_step = False
        # Whatever becomes of the rest: loops end by the number, and what is done between two steps may be collective,
        # so that the other ranks would wait there for one whose hooks have failed.
        self.step += 1
        self._is_between = self.step >= self._due_at
        self._mode_of_steps = self._mode
        if self._guard.is_on:  # `Guard.run`, written out
            try:
                self._step_is_complete()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self._guard.fail(error)
        if self._loader is not None and (self._is_between or self._is_leaving):
            self._loader.due = self._leave_if_asked

    def _step_is_complete(self) -> None:
        self._beat.end()
        if not (self._is_apart or is_stepping()) and preemption.check(self.step):
            # Not here: a scheduler and a scaler still have their part of this step to do.
            self._is_leaving = True

    def _sections_failed(self) -> None:
        self._hook_alone(behind=self._is_in_step)

    def _hook_alone(self, *, behind: bool) -> None:
        """Put a hook of our own on the optimizer, before or behind its steps; each puts on the other one.

        Never both at once: torch may be going through those before a step, or those behind it.
        """
        optimizer = self._optimizer()
        if optimizer is None or not self._is_attached or behind in self._alone:
            return
        self._alone.add(behind)
        if behind:
            self._handles.append(optimizer.register_step_post_hook(Guard(_ignore)(self._ends_alone)))
        else:
            self._handles.append(optimizer.register_step_pre_hook(Guard(self._failed)(self._begins_alone)))

    def _begins_alone(self, *_: Any) -> None:
        self._hook_alone(behind=True)
        self._step_begins()

    def _ends_alone(self, *_: Any) -> None:
        self._step_ends()
        self._hook_alone(behind=False)

    def _leave_if_asked(self) -> None:
        if self._loader is not None:
            self._loader.due = None
        if (self._is_between or self._is_leaving) and self._between_steps is not None:
            self._is_between = False
            self._due_at = self._between_steps(self._is_leaving)
        if self._is_leaving:
            self._is_leaving = False
            heartbeat.done()  # saving may take any time
            raise Preempted

    def _failed(self, error: Exception) -> None:
        self._beat.drop()
        say_once(
            "adapter failed",
            f"attach: a hook failed, heartbeats and preemption are switched off and training goes on: "
            f"{type(error).__name__}: {error}",
        )


def _ignore(_error: Exception) -> None:
    """Counting cannot fail."""


def _check(model: Any, optimizer: Any, first_step: Any) -> None:
    if optimizer is None or not hasattr(optimizer, "register_step_pre_hook"):
        raise ConfigError(
            f"attach(model, {optimizer!r}): expected the torch.optim.Optimizer whose steps are the progress; "
            "of a wrapper pass the one inside"
        )
    check_first_step(first_step)
    if not hasattr(model, "parameters"):
        return  # straggler.attach says what is expected
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        say_once(
            "foreign parameters",
            "attach: the optimizer has none of the model's parameters; if it was made before fully_shard(model) or "
            "model.to(device), it trains nothing: make it afterwards",
        )


def refuse_second() -> None:
    """Raise ConfigError where a loop is attached."""
    if _current is None or not _current.is_attached:
        return
    gc.collect()  # the model of an earlier cell of a notebook may only look alive
    if _current.is_attached:
        raise ConfigError(
            "attach: this process has a loop attached already; call detach() of its handle first, or for a second "
            'model of the same loop use straggler.attach(model, optimizer, prefix="critic.")'
        )
