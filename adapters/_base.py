"""The base of the adapters.

What is put on a framework's objects and taken off again, the one loop that is attached, steps and sections that hooks
begin and end, the options of a callback, late-bound callbacks, a missing framework.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, TypeVar

import attrs

from resilience_sdk import preemption
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.memory_staging import Stager
from resilience_sdk.core.console import say_once
from resilience_sdk.core.settings import Settings, load_settings
from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.numerics.deferred_read import prepared
from resilience_sdk.rank import Session
from resilience_sdk.rank.run import begin_session, is_stepping
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.blocks import Beat, Block
from resilience_sdk.recorder.lookup import BEATS
from resilience_sdk.recorder.page_layout import EVALUATION, W_FIRST_BEAT_NS
from resilience_sdk.straggler.model_hooks import Guard


class Patches:
    """What an adapter has put on the objects of a framework; `detach` takes all of it off again."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Put `value` in the place of an attribute.

        `detach` leaves it where somebody has put another one around it; patches that have do not bring it back.
        """
        own = getattr(owner, "__dict__", {})
        before = (own[name],) if name in own else ()
        setattr(owner, name, value)
        with suppress(KeyError, TypeError):
            del _given_up[value]
        self.on_detach(functools.partial(_give_back, owner, name, value, before))

    def on_detach(self, undo: Callable[[], object]) -> None:
        """Have something called by `detach`: what came last is undone first."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Leave everything as it was. May be repeated."""
        while self._undo:
            self._undo.pop()()


_given_up: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()
"""What was put in the place of an attribute and is to be gone, with another one around it -> what was there before."""


def _give_back(owner: Any, name: str, value: Any, before: tuple[Any, ...]) -> None:
    if vars(owner).get(name) is not value:
        with suppress(TypeError):  # no weak reference to it is possible
            _given_up[value] = before
        return
    with suppress(KeyError, TypeError):
        while before:
            before = _given_up[before[0]]
    if before:
        setattr(owner, name, before[0])
    else:
        delattr(owner, name)


@contextmanager
def errors_kept(owner: Any, name: str) -> Iterator[None]:
    """Let a method of `owner` return where it raises, and raise that at the end of the block.

    For a save: only some ranks write, and all may meet in a barrier after it.
    """
    plain, errors, patches = getattr(owner, name), list[Exception](), Patches()

    def keep_error(*args: Any, **options: Any) -> Any:
        try:
            return plain(*args, **options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait
            errors.append(error)

    patches.replace(owner, name, keep_error)
    try:
        yield
    finally:
        patches.detach()
    if errors:
        raise errors[0]


_current: AttachedLoop | None = None


def refuse_second() -> None:
    """Raise ConfigError where a loop is attached in this process."""
    if _current is None or not _current.is_attached:
        return
    gc.collect()  # the model of an earlier cell of a notebook may only look alive
    if _current.is_attached:
        raise ConfigError(
            "attach: this process has a loop attached already; call detach() of its handle first, "
            f"{_current.cure_of_second}"
        )


L = TypeVar("L", bound="AttachedLoop")


class AttachedLoop(Patches):
    """The loop of this process that is attached, and its steps; a context manager. Of the thread that trains."""

    caller: str
    cure_of_second: str
    """What to do in the place of attaching a second one."""
    what_fails: str
    """What is switched off when a hook fails."""

    def __init__(self, first_step: int | None) -> None:
        """Be the one of this process; raises ConfigError where there is another, or `first_step` is no number."""
        global _current
        check_first_step(first_step)
        refuse_second()
        super().__init__()
        self.step: int = first_step or 0
        """Completed optimizer steps, over all attempts where `first_step` says so; the number of the next one."""
        self.guard = Guard(self._failed)
        self._is_attached = True
        _current = self

    @property
    def is_attached(self) -> bool:
        """Whether it was not detached yet."""
        return self._is_attached

    def drop(self) -> None:
        """Close what is open of this step, which does not count."""
        raise NotImplementedError

    def _failed(self, error: Exception) -> None:
        self.drop()
        say_failed(self.caller, self.what_fails, error)

    def detach(self) -> None:
        """Leave the framework as it was; ends the deadlines of this rank. May be repeated."""
        global _current
        was_attached, self._is_attached, self.guard.is_on = self._is_attached, False, False
        if _current is self:
            _current = None
        super().detach()
        if was_attached:
            self.drop()
            if not is_stepping():
                heartbeat.done()

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.detach()


def say_failed(name: str, what: str, error: Exception) -> None:
    """Say once that a hook has failed, and `what` is switched off by that."""
    say_once(
        f"{name} failed",
        f"{name}: a hook failed, {what} are switched off and training goes on: {type(error).__name__}: {error}",
    )


class StepBeat:
    """The heartbeat `step` of one optimizer step, where hooks take the place of a `with` block.

    For the thread that trains. It keeps away where the script beats by itself: inside `Run.steps`, `@resilient` and
    `with heartbeat()` its `begin` does nothing. Never raises for a reason of its own.
    """

    __slots__ = ("_spent_ns", "beat")

    def __init__(self) -> None:
        """Be closed."""
        self.beat: Beat | None = None
        """What was begun."""
        self._spent_ns = 0

    def begin(self, step: int | None = None) -> None:
        """Open it unless it is open; `step` is the number of the global step, None where beats are only counted."""
        if self.beat is not None:
            if self.beat.t0:
                return
            self.beat = None  # closed behind our back: an exception left a block of the script around it
        try:  # `find_own_beat`, written out: in every step a call that can be spared is
            beat: Any = BEATS["step"]
            is_own = beat.lane.ident == get_ident()
        except (KeyError, AttributeError):
            is_own = False
        if not is_own:
            beat = lookup.find_own_beat("step")
        if beat is not None and beat.begin(monotonic_ns(), step):
            self.beat = beat

    def end(self) -> None:
        """Close it and count it: the step is complete."""
        beat, spent_ns = self.beat, self._spent_ns
        self.beat, self._spent_ns = None, 0
        if beat is not None:
            beat.end(monotonic_ns(), -spent_ns)

    def drop(self) -> None:
        """Close it without counting: the step did not come to its end."""
        self._spent_ns = 0
        self._close()

    def interrupt(self) -> None:
        """Close it for now: what comes next is no part of the step, which goes on with the next `begin`.

        Micro-batches at the end of an epoch may make no step: the evaluation behind them would look like one that
        does not end. What was spent so far counts when the step is complete, so that its deadline is not learned from
        the rest alone.
        """
        if self.beat is not None and self.beat.lane.ident == get_ident():  # a prefetcher may end a pass elsewhere
            self._spent_ns += self._close()

    def _close(self) -> int:
        """Close it, and return for how long it was open, in nanoseconds."""
        beat, self.beat = self.beat, None
        if beat is None or not beat.t0:
            return 0
        now = monotonic_ns()
        spent_ns = now - beat.t0
        beat.drop(now)
        return spent_ns


class StepLoss:
    """The loss of each optimizer step, looked at by `numerics`: what its micro-batches add up to.

    For the thread that trains. A step of more or fewer micro-batches than usual, as at the end of an epoch or where a
    scaler has left one out, is scaled to the usual number, so that it is no spike. What cannot be read switches this
    off, which is said once.
    """

    __slots__ = ("_before", "_count", "_is_on", "_total", "_usual", "watch")

    def __init__(self) -> None:
        """Begin with no loss."""
        self._is_on = True
        self._total: Any = None
        self._count = self._before = self._usual = 0
        self.watch: numerics.NumericsWatch | None = None
        """What the losses are handed to; None before the first one."""

    def add(self, loss: Any) -> None:
        """Take the loss of one micro-batch, on any device. Waits for none."""
        if loss is None or not self._is_on:
            return
        try:
            # `prepared`, written out for what most are on a CPU: in every step a call that can be spared is.
            is_plain = type(loss).__name__ == "Tensor" and loss.is_cpu
            loss = loss.item() if is_plain else prepared(loss, "loss")
        except (ConfigError, RuntimeError) as error:  # the latter is torch's, of a tensor of several elements
            self._fail(error)
            return
        count = self._count
        self._total = self._total + loss if count else loss
        self._count = count + 1

    def end(self, step: int | None, grad_norm: Any = None) -> None:
        """Hand what was added to `numerics`: the step is complete. None: the step of the heartbeat that is open."""
        total, count, is_scaled = self._total, self._count, False
        if not self._is_on or (total is None and grad_norm is None):
            return
        if count:
            self._total, self._count = None, 0
            if count != self._usual:
                if count == self._before or not self._usual:
                    self._usual = count
                else:
                    total, is_scaled = total * (self._usual / count), True
        self._before = count
        try:
            if self.watch is None:
                self.watch = numerics.watch_of_adapters()
            if self.watch is not None:
                self.watch.note(step, total, grad_norm, is_scaled=is_scaled)
        except ConfigError as error:
            self._fail(error)

    def drop(self) -> None:
        """Forget what was added: the step does not come to its end."""
        self._total, self._count = None, 0

    def _fail(self, error: Exception) -> None:
        self._is_on = False
        say_once("adapter numerics", f"losses are not looked at, and training goes on: {error}")


def say_left_out(step: int, rank: int) -> None:
    """Say once on rank 0 that a step makes nothing of its batches, on the way back from bad numbers."""
    if rank == 0:
        say_once(
            f"left out:{step}",
            f"the batch of step {step} is left out: its numbers were bad, and the run was rolled back",
        )


class EvaluationBeat:
    """The heartbeat `eval_batch` of each batch of an evaluation, so that a long one shows that it moves.

    For the thread that trains. None before the first step: what is before it is the start-up, whose end is that step.
    """

    __slots__ = ("beat",)

    def __init__(self) -> None:
        """Be closed."""
        self.beat: Beat | None = None
        """What was begun."""

    def begin(self) -> None:
        """Open it, unless it is open; it stays within the step that was completed last."""
        beat = lookup.find_own_beat(EVALUATION)
        if beat is None or not beat.lane.recorder.page.words[W_FIRST_BEAT_NS]:
            return
        step = beat.lane.current_step() if beat.lane.step_is_global else None
        if beat.begin(monotonic_ns(), step):
            self.beat = beat

    def end(self) -> None:
        """Close it, and count it."""
        beat, self.beat = self.beat, None
        if beat is not None:
            beat.end(monotonic_ns())

    def drop(self) -> None:
        """Close it without counting, after an exception or behind the last batch."""
        beat, self.beat = self.beat, None
        if beat is not None:
            beat.drop(monotonic_ns())


class HookedSection:
    """A section that one hook begins and another one ends; for the thread that trains."""

    __slots__ = ("_kind", "_name", "block")

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind
        self.block: Block | None = None
        """What was begun; None where that is the script's, or nothing is recorded."""

    def begin(self) -> None:
        """Open it, unless it is open."""
        block = lookup.find_own_block(self._name, self._kind)
        if block is not None and block.begin(monotonic_ns()):
            self.block = block

    def end(self) -> None:
        """Close it, and count it."""
        block, self.block = self.block, None
        if block is not None:
            block.end(monotonic_ns())

    def drop(self) -> None:
        """Close it without counting, after an exception."""
        block, self.block = self.block, None
        if block is not None:
            block.drop(monotonic_ns())


@attrs.frozen
class SessionOptions:
    """The options of a callback, which begins its session later; `overrides` are single settings by field name."""

    run_dir: str | os.PathLike[str] | None
    settings: Settings | None
    overrides: Mapping[str, Any]

    def __attrs_post_init__(self) -> None:
        """Raise ConfigError for a wrong one now, not hours later."""
        if self.overrides:
            load_settings(arguments=self.overrides, strict_env=False)

    def begin(self, caller: str, *, without: Collection[str] = ()) -> Session | None:
        """Return the session of this process; raises as `begin_session`."""
        overrides = {name: value for name, value in self.overrides.items() if name not in without}
        return begin_session(caller, self.run_dir, self.settings, overrides)


def checkpointer(
    session: Session,
    writer: Callable[[Path], object],
    stager: Stager | None = None,
    state: Mapping[str, Any] | None = None,
) -> Checkpointer:
    """Return what saves for a framework that writes by itself, with the options of the session.

    `stager`: takes what `writer` writes for a save in the background. `state`: what is saved beside it. Raises
    `ConfigError` and `RunDirectoryError` as `Checkpointer`.
    """
    settings = session.settings
    made = Checkpointer(
        {} if state is None else state,
        run_dir=session.run_dir,
        every=settings.checkpoint_every,
        keep=settings.checkpoint_keep,
        in_background=settings.checkpoint_async,
        group_readable=settings.group_readable,
        journal=session.journal,
        writer=writer,
        stager=stager,
    )
    made.time_left = preemption.time_left
    return made


def numbered(**kinds: Iterable[Any]) -> dict[str, Any]:
    """Return objects of some kinds by the name of their class and their number among those of that class."""
    found: dict[str, Any] = {}
    for kind, items in kinds.items():
        for item in items:
            name = f"{kind} {type(item).__name__}"
            number = sum(other.startswith(name) for other in found)
            found[f"{name} {number}" if number else name] = item
    return found


def say_not_copied(error: Exception) -> None:
    """Say once that a state was written while the training waited, since it cannot be copied."""
    say_once(
        "state not copied",
        f"a save in the background was written while the training waited: its state cannot be copied "
        f"({type(error).__name__}: {error})",
    )


def check_first_step(first_step: Any) -> None:
    """Raise ConfigError unless `attach(first_step=...)` is a number of steps, or None."""
    is_number = isinstance(first_step, int) and not isinstance(first_step, bool) and first_step >= 0
    if first_step is not None and not is_number:
        raise ConfigError(
            f"attach(first_step={first_step!r}): expected how many steps are complete, 0 or more, or None"
        )


def framework(module: str, package: str) -> ModuleType:
    """Import the framework of an adapter; raises MissingExtraError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is there; something that it needs is not
        raise MissingExtraError(f"this adapter needs {package}: pip install {package}") from None


C = TypeVar("C", bound="Late")


class Late:
    """A class that gets more bases with its first object: those of `framework_bases()`, which may import them."""

    def __new__(cls, *_args: Any, **_options: Any) -> Any:
        """Make an object of this class with the bases; raises what `framework_bases` raises."""
        if hasattr(cls, "_late"):
            return object.__new__(cls)
        made: Any = _with_bases
        return object.__new__(made(cls, cls.framework_bases()))

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return the classes of the framework that an object has to be of."""
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """Pickle as the class that stands in its module: launchers send trainers to other processes."""
        cls = type(self)
        return _make, (getattr(cls, "_late", cls),), dict(vars(self))


@functools.cache
def _with_bases(cls: Any, bases: tuple[type, ...]) -> Any:
    named = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    return type(cls.__name__, (cls, *bases), {**named, "_late": cls})


def _make(cls: type[C]) -> C:
    return cls.__new__(cls)  # type: ignore[no-any-return]
