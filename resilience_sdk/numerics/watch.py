"""`check()`: what a training calls once per step, and what follows from a bad value.

It keeps the values of this call, judges those of the call before, and returns. Files are written in a thread, unless
the process is about to end over it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from resilience_sdk.core import console
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import ConfigError, NumericsError
from resilience_sdk.incidents import IncidentStore, event_fields
from resilience_sdk.numerics.anomaly import GRAD_NORM_FACTOR, LOSS_FACTOR, QUIET_STEPS, Trouble, UsualValues, found_in
from resilience_sdk.numerics.deferred_read import DeferredRead, StepNumbers
from resilience_sdk.numerics.recording import AttemptPlace, record
from resilience_sdk.recorder import lookup

if TYPE_CHECKING:
    from resilience_sdk.core.journal import EventSink

Policy = Literal["warn", "rollback", "raise"]

_POLICIES = ("warn", "rollback", "raise")
_INFINITY = float("inf")
_POINTS = 500  # of the curve of the loss: the next one comes after this part of the training's age
_LEAST_PAUSE_S = 1.0
_LATE = 8  # by how many steps a loss on a device is read late, at most


class NumericsRank(Protocol):
    """A rank whose numbers are watched: its session, which is asked when there is trouble."""

    restarts: bool
    """Whether somebody starts the ranks again when one raises."""
    skip_batches: int
    """How many batches, from the bad one on, are left out after a rollback."""

    @property
    def policy(self) -> str:
        """Return what adapters do about bad values: a `Policy`, or `off`."""
        ...

    @property
    def journal(self) -> EventSink:
        """Its journal."""

    def rank(self) -> int:
        """Return its number."""

    def place(self) -> AttemptPlace:
        """Return the job and its attempt; the size of the world may be known late."""

    def step(self) -> tuple[int, bool]:
        """Return this thread's step, -1 before the first, and whether all ranks and attempts number it alike."""

    def store(self) -> IncidentStore:
        """Return where its incidents are written."""

    def page(self) -> Mapping[int, Mapping[str, Any]]:
        """Return its page by its number, as incidents keep it: how far the training had come."""


class NumericsWatch:
    """The numbers of one rank. The thread that trains."""

    def __init__(self, side: NumericsRank) -> None:
        self._side = side
        self._reading = DeferredRead()
        self._losses, self._grad_norms = UsualValues(LOSS_FACTOR), UsualValues(GRAD_NORM_FACTOR)
        self.is_waiting = False
        """Whether anything was given that `judge` has not come to yet."""
        self._calls = -1
        self._policy: Policy = "warn"
        self._is_asked = False  # the script calls `check` itself, and adapters keep away
        self._takes_notes = False  # of adapters, whose policy was chosen
        self._good_in_a_row: int | None = None  # None: nothing is wrong
        self._writer: threading.Thread | None = None
        self._is_ending = False
        self._newest: StepNumbers | None = None
        """What was read last, for whoever draws it; written in each call and read now and then by `tell`."""
        self.heard: Callable[[int, float], None] | None = None
        """Called with the number of a global step and its loss, once that was read anyway; not with a scaled one."""
        self._scaled: deque[int] = deque(maxlen=_LATE)
        """The newest steps whose loss was scaled: what was usual before them decides how, and another attempt has other
        ones before."""
        self._told: object = None
        self._began_s = self._next_s = time.monotonic()

    def check(self, loss: Any, grad_norm: Any, policy: Policy) -> Trouble | None:
        """See `check`."""
        self._is_asked, self._takes_notes = True, False
        if policy != self._policy:
            self._choose(policy)
        found = self.judge()
        self._calls += 1
        step, is_global = self._side.step()
        self._reading.put(step if step >= 0 else self._calls, is_global, loss, grad_norm)
        return found

    def note(self, step: int | None, loss: Any, grad_norm: Any, *, is_scaled: bool = False) -> None:
        """Take the values of a step for an adapter, by the setting `numerics`; `judge_steps` looks at them.

        `step` is the number of the global step, None: that of the heartbeat. `is_scaled`: the loss was, to be that of
        a usual step. Nothing where the script calls `check` itself. Raises ConfigError where a value is no number.
        """
        if not (self._takes_notes or self._begins_to_take_notes()):
            return
        number, is_global = self._side.step() if step is None else (step, True)
        if is_scaled:
            self._scaled.append(number)
        is_calm = self._good_in_a_row is None and not self.is_waiting
        if is_calm and grad_norm is None and type(loss) is float and self._losses.takes(loss):
            # As nearly always on a CPU: there is nothing left to be judged at the next step.
            self._newest = number, is_global, loss, None
            if self.heard is not None and is_global and not is_scaled:
                self.heard(number, loss)
        else:
            self._reading.put(number, is_global, loss, grad_norm)
            self.is_waiting = True

    def _begins_to_take_notes(self) -> bool:
        """Begin with the policy of the setting, and tell whether there is one, and no `check` of the script."""
        policy: Any = self._side.policy
        if not self._is_asked and policy != "off":
            if policy != self._policy:
                self._choose(policy)
            self._takes_notes = True
        return self._takes_notes

    def disown(self) -> None:
        """Take nothing more from adapters, in a forked child: the numbers are its parent's."""
        self._is_asked, self._takes_notes, self.is_waiting = True, False, False

    def judge(self, *, wait: bool = False) -> Trouble | None:
        """Judge the values that are there; return the first trouble among them. May raise NumericsError."""
        first = None
        ready = self._reading.ready(wait=wait)
        self.is_waiting = self._reading.is_waiting
        for values in ready:
            self._newest = values
            if self.heard is not None and values[1] and values[2] is not None and values[0] not in self._scaled:
                self.heard(values[0], values[2])
            trouble = self._look(*values)
            if trouble is None:
                if self._good_in_a_row is not None:
                    self._note_good(values[0])
            else:
                first = first or trouble
                self._act(trouble)
        return first

    def tell(self, *, at_once: bool = False) -> None:
        """Journal the newest values on rank 0, where some time has passed. On the helper thread, or at the end."""
        newest, now_s = self._newest, time.monotonic()
        if newest is None or newest is self._told or not (at_once or now_s >= self._next_s) or self._side.rank() != 0:
            return
        self._told = newest
        self._next_s = now_s + max(_LEAST_PAUSE_S, (now_s - self._began_s) / _POINTS)
        step, is_global, loss, grad_norm = newest
        values = {"loss": _as_json(loss), "grad_norm": _as_json(grad_norm)}
        self._side.journal.emit(Event.LOSS, step=step, is_global=is_global, **values)

    def _look(self, step: int, is_global: bool, loss: float | None, grad_norm: float | None) -> Trouble | None:
        if loss is not None and not self._losses.takes(loss):
            return self._trouble(step, is_global, "loss", loss, self._losses)
        if grad_norm is not None and not self._grad_norms.takes(grad_norm):
            return self._trouble(step, is_global, "grad_norm", grad_norm, self._grad_norms)
        return None

    def _trouble(
        self, step: int, is_global: bool, name: Literal["loss", "grad_norm"], value: float, usual: UsualValues
    ) -> Trouble:
        found = found_in(value)
        middle = usual.middle if found is None else None
        usual.add(value)
        return Trouble(self._side.rank(), step, name, found or "spike", value, is_global, middle)

    def _choose(self, policy: Policy) -> None:
        if policy not in _POLICIES:
            raise ConfigError(f'numerics.check(policy={policy!r}): expected "warn", "rollback" or "raise"')
        self._policy = policy
        if policy == "rollback" and not self._side.restarts:
            self._say_only_warns("nobody starts this job again when it goes back; start it with `resilience run`")

    def _act(self, trouble: Trouble) -> None:
        is_first, self._good_in_a_row = self._good_in_a_row is None, 0
        leaves = self._policy == "raise" or (self._policy == "rollback" and self._can_go_back(trouble))
        if not is_first and not leaves:
            return
        action = {"raise": "restart", "rollback": "rollback"}[self._policy] if leaves else "none"
        self._side.journal.emit(
            Event.NUMERICS,
            step=trouble.step,
            what=trouble.name,
            found=trouble.found,
            value=repr(trouble.value),
            usual=trouble.usual,
            is_global=trouble.is_global,
            action=action,
            skip_batches=self._side.skip_batches if action == "rollback" else 0,
        )
        if leaves or self._is_ending:
            self._record(trouble, action)
            if leaves:
                self._leave(trouble)
            return
        self._writer = threading.Thread(
            target=self._record, args=(trouble, action), name="resilience-numerics", daemon=True
        )
        self._writer.start()

    def _can_go_back(self, trouble: Trouble) -> bool:
        if self._side.restarts and not trouble.is_global:
            self._say_only_warns("its steps have no numbers; use Run.steps, or heartbeat(step=step)")
        return self._side.restarts and trouble.is_global

    def _say_only_warns(self, why: str) -> None:
        if console.say_once("numerics rollback", f'numerics: "rollback" only warns: {why}'):
            self._side.journal.emit(Event.DEGRADED, what="numerics", why=why)

    def _leave(self, trouble: Trouble) -> NoReturn:
        goes_back = "; going back to the last good checkpoint" if self._policy == "rollback" else ""
        raise NumericsError(f"{trouble.text}{goes_back}")

    def _note_good(self, step: int) -> None:
        self._good_in_a_row = (self._good_in_a_row or 0) + 1
        if self._good_in_a_row >= QUIET_STEPS:
            self._good_in_a_row = None
            self._side.journal.emit(Event.NUMERICS, step=step, found="good", action="none")

    def _record(self, trouble: Trouble, action: str) -> None:
        """Write the incident, and say it where it is news. Any thread; never raises."""
        side = self._side
        try:
            recorded = record(side.store(), trouble, side.place(), action, time.time(), side.page())
        except Exception as error:  # noqa: BLE001 - never hurt the run
            if console.say_once("numerics", f"{trouble.text}; the incident cannot be written: {error}"):
                side.journal.emit(Event.DEGRADED, what="numerics", why=str(error))
            return
        if recorded is not None and recorded.is_news:
            incident = recorded.incident
            console.say(f"NUMERICS: {incident.evidence[0].text} (incident {incident.id})")
            side.journal.emit(Event.INCIDENT, step=trouble.step, **event_fields(incident))

    def close(self, *, wait: bool) -> None:
        """Judge what is left, and let the files be written: the end of the process."""
        self._is_ending = True
        self._policy = "warn"
        self.judge(wait=wait)
        self.tell(at_once=True)
        if self._writer is not None:
            self._writer.join(timeout=5.0)


def _as_json(value: float | None) -> float | str | None:
    """Return a number as JSON knows it, and one that it does not know as text: `nan`, `inf`."""
    return value if value is None or -_INFINITY < value < _INFINITY else repr(value)


_side: NumericsRank | None = None
_watch: NumericsWatch | None = None


def listen(side: NumericsRank) -> None:
    """Take what the session gives. Called by the session."""
    global _side
    _side = side


def check(*, loss: Any = None, grad_norm: Any = None, policy: Policy = "warn") -> Trouble | None:
    """Look for NaN, infinity and spikes, one call late; return what was wrong with the values of an earlier call.

    Call it once per optimizer step, on every rank, with the rank's own loss and the norm that
    `clip_grad_norm_` returns (numbers, or tensors of one element on any device). It never waits for a device: the
    values are copied behind the work that makes them and judged at the next call or, where the device is further
    behind, at a later one. A spike is a value far above those of the last 128 steps.

    Args:
        loss: The loss, before it is averaged over ranks: then a bad one names its rank.
        grad_norm: The norm of the gradients, after they were reduced.
        policy: `warn` prints a line and writes an incident. `rollback` raises too, where somebody starts the ranks
            again: they go on from the last checkpoint before the bad step, and `Run.steps` leaves out its batch.
            `raise` raises in any case.

    Raises:
        NumericsError: With `raise` and `rollback`, in the call after a bad value.
        ConfigError: A value is no number, or the policy is none of these.
    """
    watch = _watch
    if watch is None:
        watch = _start()
        if watch is None:
            return None
    try:
        return watch.check(loss, grad_norm, policy)
    except NumericsError as error:
        raise error.with_traceback(None) from None  # of our frames: what counts is where the training stood


def is_on() -> bool:
    """Tell whether adapters are to look for bad values: something is recorded, and the setting is not `off`."""
    return lookup.recorder() is not None and _side is not None and _side.policy != "off"


def watch_of_adapters() -> NumericsWatch | None:
    """Return what takes the values of steps from adapters; None where nothing is recorded."""
    return _watch or _start()


def judge_steps() -> None:
    """Judge what was noted before and has come from the device.

    Raises:
        NumericsError: The setting is `rollback` or `raise`, and a value was bad.
    """
    watch = _watch
    if watch is None or not watch.is_waiting:
        return
    try:
        watch.judge()
    except NumericsError as error:
        raise error.with_traceback(None) from None  # as in `check`


def settle() -> None:
    """Judge what has not been judged yet, waiting for the device: before a save that is to be good.

    Raises like `check`. `Run.steps` calls it at its end.
    """
    if _watch is not None:
        _watch.judge(wait=True)


def tell() -> None:
    """Journal the newest values where it is time to. Called by the helper thread of a rank."""
    if _watch is not None:
        _watch.tell()


def close(*, wait: bool) -> None:
    """End with the process: judge and write what the last step left, after a wait for the device. Never raises."""
    if _watch is not None:
        try:
            _watch.close(wait=wait)
        except Exception as error:  # noqa: BLE001 - the device may be the reason why the process ends
            console.say_once("numerics", f"the last values were not judged: {error}")


def _start() -> NumericsWatch | None:
    global _watch
    if lookup.recorder() is None or _side is None:  # the former starts the session, which calls `listen`
        return None
    _watch = NumericsWatch(_side)
    return _watch


def _forget() -> None:
    global _side, _watch
    if _watch is not None:
        _watch.disown()
    _side = _watch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
