"""`Run`, `start_run` and `@resilient`: one object that resumes, beats, saves and ends a training.

There is one current run in a process: plain threads and autograd's threads do not inherit context variables,
so it is a module-level reference.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import attrs

from resilience_sdk import numerics, preemption
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.settings import Settings, load_settings, override_settings
from resilience_sdk.errors import ConfigError, Preempted, ResilienceError
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.rank.all_ranks import finish, has_peers, session_on_all_ranks
from resilience_sdk.rank.checkpoints import save_at_stop, say_how_to_resume, time_left
from resilience_sdk.rank.data import END, Walk, has_state, next_batch
from resilience_sdk.rank.degraded import NoCheckpointer, pageless_session
from resilience_sdk.rank.identity import refuse_fresh_start
from resilience_sdk.rank.lifecycle import ensure_started, has_failed_to_start
from resilience_sdk.rank.loop_proof import LoopProof
from resilience_sdk.rank.schedule_length import length_of
from resilience_sdk.rank.session import Session
from resilience_sdk.system.installation import refusal

Batch = TypeVar("Batch")
OnPreempt = Literal["raise", "return"]

_current: Run | None = None


def is_stepping() -> bool:
    """Tell whether a loop over `Run.steps` is under way, which beats and checks for preemption by itself."""
    return _current is not None and _current.is_stepping


def current_run() -> Run:
    """Return the run that this process is in; raises `ResilienceError` outside of one. Any thread."""
    if _current is None:
        raise ResilienceError("no run is active: call it inside `with resilience_sdk.start_run(...)`")
    return _current


class Run:
    """One training on one rank, made by `start_run`. Its methods belong to the thread that trains.

    `step` is the number of completed steps over all epochs, and so the number of the next one; `preempted`
    tells whether the last `steps` ended because the job was asked to leave.
    """

    def __init__(self, session: Session | None, state: Mapping[str, Any] | None) -> None:
        self.session = session
        self.step = 0
        self.preempted = False
        self._walk = Walk()
        self._claimed_epochs = 0
        self._has_epochs = False  # `epochs` was called
        self._body: _Body | None = None  # of the loop over them that is under way
        self._has_open_body = False  # whose steps are done, and which is not saved yet
        # Weakly: a loop that is left by `break` must drop its last reference, and so end its heartbeat.
        self._active: weakref.ref[Generator[Any, None, None]] | None = None
        self._previous: Run | None = None
        self._is_entered = self._is_resumed = self._is_done = False
        self._is_to_save = state is not None
        self._limits: tuple[int | None, ...] = ()  # of the first loop: epochs, steps
        self.checkpointer = self._make_checkpointer(state)
        self._proof = self._make_proof(state)

    def _make_checkpointer(self, state: Mapping[str, Any] | None) -> Checkpointer | NoCheckpointer:
        if self.session is None:
            if state is not None and has_failed_to_start():
                say_once(
                    "nothing saved",
                    "start_run(state=...): NOTHING IS SAVED or resumed in this run, for the reason above; end it, "
                    "and start it again when that is repaired",
                )
            return NoCheckpointer()
        if state is None:
            say_once("no state", "start_run() has no state=...: this run saves no checkpoints and resumes none")
            return NoCheckpointer()
        settings = self.session.settings
        checkpointer = Checkpointer(
            state,
            run_dir=self.session.run_dir,
            every=settings.checkpoint_every,
            keep=settings.checkpoint_keep,
            in_background=settings.checkpoint_async,
            group_readable=settings.group_readable,
            journal=self.session.journal,
        )
        checkpointer.position = self._walk
        checkpointer.time_left = preemption.time_left
        return checkpointer

    def _make_proof(self, state: Mapping[str, Any] | None) -> LoopProof | None:
        is_saving = self.session is not None and not isinstance(self.checkpointer, NoCheckpointer)
        if self.session is None or state is None or not is_saving or self.session.settings.resume_check == "off":
            return None
        self._walk.prints.is_checked = True
        optimizers = [item for item in state.values() if isinstance(getattr(item, "param_groups", None), list)]
        proof = LoopProof(self.session, self._walk.prints, optimizers, lambda: self.checkpointer.skipped_steps)
        proof.length = lambda: length_of(state.values(), *self._limits)
        return proof

    @property
    def values(self) -> dict[str, Any]:
        """Plain JSON values that travel with the checkpoint, such as the best accuracy so far."""
        return self.checkpointer.values

    @property
    def epoch(self) -> int:
        """The number of the epoch, from 0."""
        return self._walk.epoch

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 0: how often the ranks were started again within this job."""
        return 0 if self.session is None else self.session.attempt

    # -- the block

    def __enter__(self) -> Run:
        global _current
        if self._is_entered:
            raise ResilienceError("a run can be entered once: call start_run() again for another one")
        self._is_entered = True
        self._previous, _current = _current, self
        try:
            # Here if possible, so that run.values is there before the loop. A process group may come later.
            if group_is_ready() or not has_peers():
                self._resume()
        except BaseException:
            _current = self._previous
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        try:
            # A loop that was left by an exception is still inside its heartbeat: the traceback holds it.
            self._leave_steps()
            if self._proof is not None:
                self._proof.close()
            is_clean = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
            if is_clean and not self.preempted:
                if self._has_open_body and self._leave_body():
                    self._stop("raise", is_saved=True)
                self._end()
            else:
                self._say_what_is_kept()
        finally:
            _current = self._previous

    def _say_what_is_kept(self) -> None:
        good = self.checkpointer.last_good
        if self.session is not None:
            say_how_to_resume(self.session, None if good is None else good.step)

    def _end(self) -> None:
        if not self._is_done:
            heartbeat.done()
        self._require_saved()
        if self._is_recorded_somewhere():
            finish(self.session, self.step)

    def _require_saved(self) -> None:
        """Raise `NotSavedError` where the last state of the training could not be saved: it has not finished."""
        own = self.checkpointer
        if isinstance(own, NoCheckpointer):
            return
        own.wait(time_left())  # ranks may hear of its end one after the other, and what follows is collective
        if own.unsaved is None:
            return
        if not own.has_waited and (group_is_ready() or not has_peers()):
            own.save(self.step, last=True)  # that of an end that did not look like one, as of one epoch of several
        own.raise_unsaved()

    def _save_end(self, *, anew: bool = False) -> bool:
        """Save what is the last state, and wait where that may help; tell whether to stop after it."""
        return self.checkpointer.save_patiently(self.step, anew=anew).leaves

    # -- the loop

    def steps(
        self,
        loader: Iterable[Batch],
        *,
        epochs: int = 1,
        max_steps: int | None = None,
        on_preempt: OnPreempt = "raise",
    ) -> Iterator[tuple[int, Batch]]:
        """Yield `(step, batch)` over `epochs` passes through `loader`, from where the last attempt was.

        Every iteration is a heartbeat with the number of the step, the wait for data is section `data`, and
        checkpoints are saved between two steps. In a distributed job all ranks must get as many batches.
        Each call takes the next `epochs` epochs, and saves at the end. With something between two epochs (an
        evaluation, a scheduler's step) call it inside a loop over `Run.epochs`, of which it takes the epoch.

        A step is complete when the next one is asked for. So one that is left by `break` or an exception
        does not count; end early with `max_steps` instead.

        Args:
            loader: Any iterable. With `state_dict` and `load_state_dict` it is restored exactly, without
                them its batches are read again up to the place. `set_epoch` is called where there is one.
            epochs: How many epochs this call takes.
            max_steps: End when this many steps are complete, over all calls and attempts.
            on_preempt: What happens when the job is asked to leave: `raise` raises `Preempted`, `return` ends
                the iteration and sets `preempted`.

        Raises:
            ConfigError: An argument is wrong.
            CheckpointError: There is a checkpoint, but it cannot be loaded.
        """
        _check_arguments("steps", epochs, max_steps, on_preempt)
        self._limits = self._limits or (epochs, max_steps)
        self._leave_steps()
        self._resume()
        if self._body is not None:
            self._body.enter_steps(self.epoch, epochs, max_steps, on_preempt)
            first, max_steps, on_preempt = self.epoch, self._body.max_steps, self._body.on_preempt
        elif self._has_epochs:
            raise ConfigError("run.steps() outside of the loop over run.epochs(), which holds all epochs of a run")
        else:
            self._walk.leave_tails()
            first = self._claimed_epochs
            self._claimed_epochs += epochs
        steps = self._iterate(loader, first, first + epochs, max_steps, on_preempt)
        self._active = weakref.ref(steps)
        return steps

    def epochs(self, epochs: int, *, max_steps: int | None = None, on_preempt: OnPreempt = "raise") -> Iterator[int]:
        """Yield the number of each epoch that is not complete, from 0 to `epochs` - 1; `steps` inside takes that one.

        An epoch is complete when the next one is asked for, or the loop is left by `break` behind its steps: what
        follows `steps` in the body has been done then, and is done once. A resume behind the last step of an epoch goes
        on with it. A save is made at the end of the steps and another one at that of the body, where a stop that was
        asked for is heeded, too; so all ranks must leave the loop alike.

        Args:
            epochs: How many epochs the training has, over all attempts.
            max_steps: End with the body in which this many steps are complete, over all attempts.
            on_preempt: As that of `steps`. After `return` leave the body, for it begins anew at the next attempt.

        Raises:
            ConfigError: An argument is wrong, it is called twice, or behind `steps`; from `steps`: it is called outside
                of the loop, twice in one body, or with an option that belongs here.
            CheckpointError: There is a checkpoint, but it cannot be loaded.

        Example:
            for epoch in run.epochs(90):
                for step, batch in run.steps(loader):
                    train_step(batch)
                scheduler.step()
                run.values["accuracy"] = evaluate(model)
        """
        _check_arguments("epochs", epochs, max_steps, on_preempt)
        if self._claimed_epochs or self._has_epochs:
            when = "a second time" if self._has_epochs else "after run.steps()"
            raise ConfigError(f"run.epochs({epochs}) {when}: one loop over it holds all epochs of a run")
        self._has_epochs = True
        self._limits = (epochs, max_steps)
        self._resume()
        return self._iterate_epochs(epochs, _Body(max_steps, on_preempt))

    def _iterate_epochs(self, epochs: int, body: _Body) -> Generator[int, None, None]:
        walk = self._walk
        walk.has_tail, self._body = True, body

        def has_next() -> bool:
            return walk.epoch < epochs and (walk.owes_tail or not self._is_enough(body.max_steps))

        try:
            while has_next():
                walk.enter_body()
                body.has_steps = self._has_open_body = False
                yield walk.epoch
                self._leave_steps()
                if self.preempted:
                    return
                if self._close_body(has_next):
                    self._stop(body.on_preempt, is_saved=True)
                    return
                is_asked = has_next() and preemption.check(StepsDone(self.step))
                if is_asked and not self.checkpointer.holds(self.step):
                    self._stop(body.on_preempt)
                    return
            self._is_done = True
            heartbeat.done()
        finally:
            self._body = None

    def _close_body(self, has_next: Callable[[], bool] = bool) -> bool:
        """Save behind the body of an epoch: what it has changed after its last step is in no checkpoint yet.

        Tell whether to stop after it, which was asked for while the last of them waited for a disk.
        """
        self._has_open_body = False
        self._walk.finish_tail()
        self._take_up_deadlines()  # a save waits for all ranks
        numerics.settle()
        is_stopped = False
        if has_next():
            if not self.checkpointer.holds(self.step):
                self.checkpointer.save(self.step, anew=True)
        else:
            is_stopped = self._save_end(anew=True)
        heartbeat.done()
        return is_stopped

    def _leave_body(self) -> bool:
        """Save where the loop over epochs was left by `break`, if that can be done; tell whether to stop after it."""
        if isinstance(self.checkpointer, NoCheckpointer) or group_is_ready() or not has_peers():
            return self._close_body()
        if self.session is not None and self.session.identity.rank == 0:
            say(
                "what followed the last step is not saved: the process group is gone; end the `with` block of the run "
                "before it is destroyed"
            )
        return False

    def _take_up_deadlines(self) -> None:
        if self.session is not None and self.session.recorder is not None:
            self.session.recorder.begin()

    def _is_enough(self, max_steps: int | None) -> bool:
        return max_steps is not None and self.step >= max_steps

    def _iterate(
        self, loader: Iterable[Batch], first: int, last: int, max_steps: int | None, on_preempt: OnPreempt
    ) -> Generator[tuple[int, Batch], None, None]:
        walk = self._walk
        walk.enter_window(first)
        is_enough = self._is_enough(max_steps)
        is_worked = False
        if self.session is not None and walk.has_batches_before(last) and not is_enough:
            listening.begin(self._save_s)  # before the loader forks its workers
            if self.session.recorder is not None:
                self.session.recorder.user_beats()  # what is read again before the first step belongs to none
            self._take_up_deadlines()  # the end of an earlier call has ended them all
        while walk.has_batches_before(last) and not is_enough:
            batches = self._start_epoch(loader)
            while True:
                batch = next_batch(batches)
                if batch is END:
                    walk.finish_batches()
                    break
                if self.step in self.checkpointer.skipped_steps:
                    self._say_skipped()
                else:
                    if self._proof is not None:
                        self._proof.note(self.step, walk.epoch, walk.batches, batch)
                    with heartbeat("step", step=self.step):
                        yield self.step, batch
                    is_worked = True
                walk.batches += 1
                self.step += 1
                is_enough = self._is_enough(max_steps)
                if is_enough:
                    walk.finish_steps()
                    break  # the save below is of this step
                if preemption.check(StepsDone(self.step)):
                    if self.checkpointer.holds(self.step):
                        continue  # and stop behind the next optimizer step: what it needs is saved nowhere
                    self._stop(on_preempt)
                    return
                self.checkpointer.maybe_save(self.step)
            if is_enough and walk.is_at_length() and next_batch(batches) is END:
                walk.finish_batches()
        self._find_loader(loader)
        walk.enter_tail(loader, getattr(self.checkpointer, "restore_rng", _nothing))
        if is_worked:
            numerics.settle()  # the last step's numbers are not judged yet, and the save is to be good
            if self._body is not None or first > 0:  # a later save is to come, as that of the epoch's body
                if self._body is None or not self.checkpointer.holds(self.step):
                    self.checkpointer.save(self.step)
            elif self._save_end():
                self._stop(on_preempt, is_saved=True)
                return
        self._has_open_body = self._body is not None
        self._is_done = True
        heartbeat.done()

    def _say_skipped(self) -> None:
        if self.session is None or self.session.identity.rank == 0:
            say(f"the batch of step {self.step} is left out: its numbers were bad, and the run was rolled back")

    def _save_s(self) -> float:
        return float(getattr(self.checkpointer, "expected_save_s", 0.0) or 0.0)

    def _stop(self, on_preempt: OnPreempt, *, is_saved: bool = False) -> None:
        """Save at the agreed step and leave; all ranks are here. `is_saved`: what can be saved is."""
        self.preempted = True
        if not is_saved:
            save_at_stop(self.checkpointer, self.step, self.session)
        heartbeat.done()
        if on_preempt == "raise":
            raise Preempted

    def _start_epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        checkpointer = self.checkpointer
        if isinstance(checkpointer, NoCheckpointer):
            return self._walk.start_epoch(loader, _nothing, is_speaker=False)
        self._find_loader(loader)
        rank = 0 if self.session is None else self.session.identity.rank
        return self._walk.start_epoch(loader, checkpointer.restore_rng, is_speaker=rank == 0)

    def _find_loader(self, loader: Iterable[Any]) -> None:
        if isinstance(self.checkpointer, Checkpointer):
            if has_state(loader):
                self.checkpointer.add_data("run.loader", loader)
            self.checkpointer.note_walked(loader)

    def _resume(self) -> None:
        if self._is_resumed:
            return
        # Without state nothing here is collective: one rank alone may have such a run, or no gloo to meet by.
        is_asked = self._is_to_save and group_is_ready() and self._is_recorded_somewhere()
        if is_asked and session_on_all_ranks(lambda: self.session) is None:
            self._save_nothing()
        if not isinstance(self.checkpointer, NoCheckpointer):
            find_ranks()  # raises now what the first save would raise hours later
        if self.session is not None and self.session.may_resume:
            self.step = self.checkpointer.resume()
            if self.session.run_dir.is_finished() and self.session.identity.rank == 0:
                say_once(
                    "finished",
                    f"{self.session.run_dir.path} is finished: training there is complete; name another run directory "
                    "to start over",
                )
        self._is_resumed = True

    def _is_recorded_somewhere(self) -> bool:
        """Tell whether any rank may have a session; with the SDK switched off, none has."""
        return self.session is not None or has_failed_to_start()

    def _save_nothing(self) -> None:
        """Do without a checkpointer, whose saves would wait for a rank that has none."""
        values = self.checkpointer.values
        self.checkpointer = NoCheckpointer()
        self.checkpointer.values.update(values)

    @property
    def is_stepping(self) -> bool:
        """Whether a loop over `steps` is under way."""
        steps = self._active() if self._active is not None else None
        return steps is not None and inspect.getgeneratorstate(steps) in (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)

    def _leave_steps(self) -> None:
        steps = self._active() if self._active is not None else None
        if steps is not None:
            steps.close()
        self._active = None


@attrs.define
class _Body:
    """The options of a loop over `Run.epochs`, and what its body has done."""

    max_steps: int | None
    on_preempt: OnPreempt
    has_steps: bool = False

    def enter_steps(self, epoch: int, epochs: int, max_steps: int | None, on_preempt: OnPreempt) -> None:
        """Take note of a call of `steps` with these options. Raises `ConfigError`."""
        if self.has_steps:
            raise ConfigError(
                f"run.steps() a second time in epoch {epoch}: in a loop over run.epochs() it takes the whole epoch"
            )
        given = [("epochs", epochs, 1), ("max_steps", max_steps, None), ("on_preempt", on_preempt, "raise")]
        for name, value, default in given:
            if value != default:
                raise ConfigError(
                    f"steps({name}={value!r}) inside of run.epochs(): {name} is an option of the outer loop, "
                    f"run.epochs(..{'' if name == 'epochs' else f', {name}={value!r}'})"
                )
        self.has_steps = True


def _check_arguments(caller: str, epochs: Any, max_steps: Any, on_preempt: Any) -> None:
    for name, value in (("epochs", epochs), ("max_steps", max_steps)):
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not is_number and not (name == "max_steps" and value is None):
            raise ConfigError(f"{caller}({name}={value!r}): expected a whole number, 0 or more")
    if on_preempt not in ("raise", "return"):
        raise ConfigError(f'{caller}(on_preempt={on_preempt!r}): expected "raise" or "return"')


def _nothing() -> None:
    """Restore nothing: there is no checkpoint."""


# Read by nobody but the rank itself, so `start_run` may still set them in a job that runs already.
_OPTIONS_OF_STEPS = frozenset({"epochs", "max_steps", "on_preempt"})
_OPTIONS_OF_THE_RANK = frozenset(
    {"checkpoint_every", "checkpoint_keep", "checkpoint_async", "numerics", "resume_check"}
)


def start_run(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    **overrides: Any,
) -> Run:
    """Return the run of this process, to be entered with `with`.

    Args:
        run_dir: Where everything is written; without it the setting, the scheduler's job, or a new directory.
        state: What a checkpoint holds, by name (see `Checkpointer`); None = nothing is saved.
        settings: All options; without it those of the launcher and the environment.
        **overrides: Single options by field name, such as `checkpoint_every="10min"`.

    Raises:
        ConfigError: An option or an entry of `state` is wrong; the message names it and the cure. Or `state` is given,
            and the SDK was imported from a zip archive, from which it cannot work.
        RunDirectoryError: `run_dir` cannot be used.
        DirectoryInUseError: Another job uses it; with `state`, also where a setting or `RESILIENCE_RUN_DIR` names it.
            Not under a foreign launcher, where `<name>.2` is used and that is said.

    Example:
        with start_run("runs/a", state={"model": model, "optimizer": optimizer}) as run:
            for step, batch in run.steps(loader, epochs=3):
                train_step(batch)
    """
    for name in _OPTIONS_OF_STEPS & overrides.keys():
        raise ConfigError(
            f"start_run({name}={overrides[name]!r}): {name} is an option of the loop: run.steps({name}=...)"
        )
    if state is not None and (why := refusal()) is not None:
        raise ConfigError(why)  # training without the saves that it asks for would cost more than this
    session = begin_session("start_run", run_dir, settings, overrides, resumes=state is not None)
    return Run(session, state)


def begin_session(
    caller: str,
    run_dir: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    resumes: bool = True,
) -> Session | None:
    """Return the session of this process with these options, as far as they still count; None: nothing is recorded.

    `caller` is what the user has called, for what is said; `resumes`: a directory beside one in use will not do. Raises
    as `start_run`.
    """
    overrides = overrides or {}
    if settings is not None and overrides:
        settings = override_settings(settings, overrides)
    elif overrides:
        # Checked even where a session is already running and cannot take them any more.
        load_settings(arguments=overrides, strict_env=False)
    named = None if run_dir is None else os.fspath(run_dir)
    session: Session | None = ensure_started(named, settings, overrides or None, resumes=resumes)
    if session is None:
        session = pageless_session(named, settings, overrides or None, resumes=resumes)
    if session is not None:
        session.declare()
    if session is not None and (resumes or named is not None):
        refuse_fresh_start(session.config)
    if session is not None and run_dir is not None and session.run_dir.path != Path(os.path.abspath(run_dir)):
        say_once("run_dir", f"{caller}({os.fspath(run_dir)!r}): this job writes to {session.run_dir.path} already")
    if session is not None:
        _take_options(caller, session, settings, overrides)
    return session


def _take_options(caller: str, session: Session, settings: Settings | None, overrides: Mapping[str, Any]) -> None:
    """Let the options of the code count in a session that the launcher started before the script.

    What only this rank reads can change now; what the job's monitor reads was settled by who started the job.
    """
    standing = session.settings
    wanted = override_settings(standing, overrides) if settings is None else settings
    named = set(overrides) if settings is None else wanted.explicit
    changed = {name for name in named if getattr(wanted, name) != getattr(standing, name)}
    session.settings = attrs.evolve(
        standing, **{name: getattr(wanted, name) for name in changed & _OPTIONS_OF_THE_RANK}
    )
    late = sorted(changed - _OPTIONS_OF_THE_RANK - {"run_dir"})
    if late and session.identity.rank == 0:
        options = " ".join(f"--{name.replace('_', '-')}" for name in late)
        say_once("late options", f"{caller}({late[0]}=...) is too late, the job runs: launch it with {options}")


F = TypeVar("F", bound=Callable[..., Any])


def resilient(train_step: F) -> F:
    """Decorate the function of one optimizer step: each call is a heartbeat, and ends with a check for preemption.

    Where a model is attached (`straggler.attach`), its sections are inside the heartbeat. When all ranks have
    agreed to stop, the call raises `Preempted` after its step is complete, on every rank at the same call; catch it
    around the loop, save, and raise it again. So all ranks must call it equally often. Inside `Run.steps` nothing is
    added, because the run does both. Takes functions and coroutine functions.

    Raises:
        ConfigError: It is put on something that is no function.
        TypeError: It is put on a generator function.

    Example:
        @resilience_sdk.resilient
        def train_step(batch): ...

        try:
            for batch in loader:
                train_step(batch)
        except resilience_sdk.Preempted:
            save()
            raise
    """
    if not callable(train_step):
        raise ConfigError(f"@resilient goes on the function of a train step, got {train_step!r}")
    beating = heartbeat()(train_step)

    if inspect.iscoroutinefunction(train_step):

        @functools.wraps(train_step)
        async def run_coroutine(*args: Any, **kwargs: Any) -> Any:
            if is_stepping():
                return await train_step(*args, **kwargs)
            result = await beating(*args, **kwargs)
            _leave_if_asked()
            return result

        return cast(F, run_coroutine)

    @functools.wraps(train_step)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_stepping():
            return train_step(*args, **kwargs)
        result = beating(*args, **kwargs)
        _leave_if_asked()
        return result

    return cast(F, run)


def _leave_if_asked() -> None:
    if preemption.check():
        heartbeat.done()  # saving may take any time
        raise Preempted
