"""`ResilienceCallback`: everything that the SDK has, for one `Trainer`, and one `Trainer.train()` under it."""

from __future__ import annotations

import functools
import os
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from resilience_sdk import preemption, straggler
from resilience_sdk.adapters._base import (
    EvaluationBeat,
    HookedSection,
    Late,
    Patches,
    SessionOptions,
    StepBeat,
    StepLoss,
    framework,
    refuse_second,
    say_failed,
    say_left_out,
)
from resilience_sdk.adapters.transformers.saving import (
    TrainerSaves,
    checked,
    checkpoint_of_run,
    put_back_on_all_ranks,
)
from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import finish, reopen, session_on_all_ranks
from resilience_sdk.rank.checkpoints import fits, say_how_to_resume
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.model_hooks import Guard


class ResilienceCallback(Late):
    """Watches, resumes and ends the trainings of one `transformers.Trainer`; on every rank.

    Each optimizer step is a heartbeat; `data fwd bwd comm_wait optim eval checkpoint` are sections. The trainer saves
    when and where its arguments say, and each checkpoint is marked when all ranks have written theirs: only such are
    resumed, and the last of them is never deleted. `train()` resumes the newest one that the run directory knows of,
    that is of an earlier attempt of the same job, or of a run directory that was named. When the job is asked to
    leave, all ranks save behind the same step and raise `Preempted`, so that the process ends with 75. What fails in
    it does not end the training.

    Args:
        run_dir: Where everything is written; without it the launcher's, the setting, or a new directory.
        resume: Let the first `train()` of this process resume by itself, where it is not told what to resume.
        settings: All options; without it those of the launcher and the environment.
        **overrides: Single options by field name, such as `preempt_time=120`.

    Raises:
        ConfigError: An option is wrong; at the trainer: it has such a callback, or is none that can be watched.
        MissingExtraError: Transformers is not installed.
        RunDirectoryError, CheckpointError: At `train()`: the directory cannot be used, what is there not be resumed.

    Example:
        trainer = Trainer(model, args, train_dataset=data, callbacks=[ResilienceCallback("runs/a")])
        trainer.train()
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        resume: bool = True,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        self._options = SessionOptions(run_dir, settings, overrides)
        self._resumes = bool(resume)
        self._trainer: Any = None
        self._patches = Patches()
        self._training: Training | None = None

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return `TrainerCallback`; raises MissingExtraError without Transformers."""
        return (framework("transformers.trainer_callback", "transformers").TrainerCallback,)

    # -- in which trainer

    def attach(self, trainer: Any) -> None:
        """Be the callback of `trainer`, before it trains; not needed with `Trainer(callbacks=[...])`. May be repeated.

        Raises:
            ConfigError: `trainer` is no `Trainer`, has another callback of ours, or this one is in another trainer.
        """
        check(trainer)
        if environ.is_disabled(environ.environment()):
            lookup.recorder()  # says so
            return
        self._refuse_second(trainer)
        if self._trainer is not None and self._trainer is not trainer:
            raise ConfigError(
                "this ResilienceCallback is in another Trainer already: make one for each, or call its detach() first"
            )
        if self not in callbacks_of(trainer):
            trainer.add_callback(self)
        if self._trainer is None:
            self._trainer = trainer
            self._patches.replace(trainer, "train", functools.partial(self._train, trainer.train))

    def _refuse_second(self, trainer: Any) -> None:
        if any(isinstance(one, ResilienceCallback) and one is not self for one in callbacks_of(trainer)):
            raise ConfigError(
                "Trainer(callbacks=...) has two ResilienceCallbacks, and both would save and stop: remove one of them"
            )

    def detach(self) -> None:
        """Leave the trainer, with all as it was before; between two trainings. May be repeated."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            self._patches.detach()
            trainer.remove_callback(self)

    # -- a training

    def _train(self, plain: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train by the trainer's own `train`, from what is resumed."""
        asked = resume_from_checkpoint
        if self._trainer is None or self._training is not None:
            # Detached below what somebody has put around it, or that calls it twice.
            return plain(asked, *args, **options)
        refuse_second()  # by hand, or by the adapter of Accelerate
        session = session_on_all_ranks(lambda: self._options.begin("ResilienceCallback"))
        if session is None:
            return plain(asked, *args, **options)
        session.settle()
        preemption.time_left()  # a signal in the start-up, the load of a checkpoint too, is answered behind a step
        trial = args[0] if args else options.get("trial")
        training = Training(self._trainer, session, is_trial=trial is not None)
        try:
            path = training.resume_from(asked, by_itself=self._resumes)
            self._training = training
            result = plain(path, *args, **options)
        except BaseException as error:
            training.fails(error)
            raise
        finally:
            self._training = None
        training.ends()
        return result

    def _is_unknown(self) -> bool:
        return self._trainer is None and not environ.is_disabled(environ.environment())

    # -- hooks of the trainer

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Be in the trainer that is made here."""
        trainer = calling_trainer(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin: model, optimizer and what was resumed are there."""
        if self._is_unknown():
            self._refuse_second(calling_trainer(self))
            raise ConfigError(
                "ResilienceCallback was added to a Trainer that was made before, and does not know it: call "
                "callback.attach(trainer) before trainer.train(), or give it as Trainer(callbacks=[...])"
            )
        if self._training is not None:
            self._training.begins()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End at once, where nothing is left to do."""
        if self._training is not None:
            self._training.epoch_begins(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a step."""
        if self._training is not None:
            self._training.step_begins(state)
        elif self._is_unknown():
            raise ConfigError(
                "ResilienceCallback was added to a Trainer that trains already: add it before train(), as "
                "Trainer(callbacks=[...]) or by callback.attach(trainer)"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End it."""
        if self._training is not None:
            self._training.step_ends(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave, where the trainer was told to stop for that, and has saved."""
        if self._training is not None:
            self._training.epoch_ends()

    def __reduce__(self) -> Any:
        """Leave the training behind: a copy has none."""
        make, args, state = super().__reduce__()
        return make, args, {**state, "_training": None}


# What is called or wrapped on a trainer. It exists from Transformers 4.46 on.
SEAMS = (
    "train",
    "training_step",
    "get_batch_samples",
    "evaluate",
    "prediction_step",
    "_save_checkpoint",
    "_get_output_dir",
)


def calling_trainer(callback: Any) -> Any:
    """Return the trainer that is calling a hook of `callback` right now; None where it cannot be told.

    Hooks are given everything but the trainer. It is the object whose method is on the stack, and which has the
    callback.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if any(one is callback for one in callbacks_of(found)):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def callbacks_of(trainer: Any) -> list[Any]:
    """Return the callbacks that an object has in the way of a `Trainer`."""
    handler = getattr(trainer, "__dict__", {}).get("callback_handler")
    found = getattr(handler, "callbacks", None)
    return found if isinstance(found, list) else []


def check(trainer: Any) -> None:
    """Raise `ConfigError` unless `trainer` is a `Trainer`, of a version that has all seams."""
    kind = type(trainer)
    if "callback_handler" not in getattr(trainer, "__dict__", {}) or not hasattr(trainer, "args"):
        raise ConfigError(
            f"ResilienceCallback.attach({trainer!r}): expected a transformers.Trainer, or an object of a subclass; for "
            "a loop of your own use resilience_sdk.adapters.pytorch, with Accelerate resilience_sdk.adapters.accelerate"
        )
    missing = [name for name in SEAMS if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"ResilienceCallback: {kind.__module__}.{kind.__qualname__} has no {missing[0]}(), which it needs: "
            "pip install 'transformers>=4.46', or use resilience_sdk.adapters.pytorch.attach(model, optimizer)"
        )


def torch_optimizer(trainer: Any) -> Any:
    """Return the optimizer that really steps, inside of what Accelerate has put around it; None = not known."""
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer if hasattr(optimizer, "register_step_pre_hook") else None


def warn(trainer: Any) -> None:
    """Say what the user should know, once, on rank 0. Nothing here changes anything."""
    args = trainer.args
    if args.process_index != 0:
        return
    if getattr(args, "enable_jit_checkpoint", False):
        say_once(
            "jit checkpoint",
            "TrainingArguments(enable_jit_checkpoint=True): its handler of SIGTERM has no say, since it would save "
            "on the rank that got the signal while the others wait for it; this callback saves on all: leave it out",
        )
    if args.save_only_model:
        say_once(
            "only model",
            "TrainingArguments(save_only_model=True): a resume begins with a fresh optimizer and schedule; leave it "
            "out where a job is to go on as if it had never stopped",
        )
    if args.fsdp and not (trainer.is_fsdp_enabled and _is_sharded(trainer.model_wrapped)):
        say_once(
            "fsdp",
            f"TrainingArguments(fsdp={args.fsdp!r}): FSDP is asked for, but the model is not sharded, as on a CPU: "
            "each rank holds and saves all of it; leave it out, or start on accelerators",
        )
    if getattr(trainer, "is_deepspeed_enabled", False):
        say_once(
            "deepspeed",
            "DeepSpeed steps its optimizer inside of the backward: section `optim` is empty, and `bwd` has it; "
            "heartbeat, stop and checkpoints are as ever",
        )


def _is_sharded(model: Any) -> bool:
    names = {type(part).__name__ for part in (model, *model.parameters())}
    return bool(names & {"DTensor", "FullyShardedDataParallel"})


def handlers_before(trainer: Any) -> dict[int, Any]:
    """Return the handlers that were there before the trainer's own just-in-time checkpoint, by signal number."""
    managers = [getattr(callback, "jit_manager", None) for callback in callbacks_of(trainer)]
    found = [getattr(one, "_original_sigterm_handler", None) or signal.SIG_DFL for one in managers if one is not None]
    return {signal.SIGTERM: found[-1]} if found else {}


_INPUT = "input_ids"  # as the Trainer assumes of models that do not say


def tell_sizes(method: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Return `get_batch_samples` of a trainer such that it tells how large its batches are: one for each forward.

    A size is known without the device, wherever the tensor is.
    """
    name = getattr(model, "main_input_name", _INPUT)
    guard = Guard(_say_untold)

    def get_batch_samples(*args: Any, **options: Any) -> Any:
        found = method(*args, **options)
        if guard.is_on:
            try:
                # What can be iterated once is the trainer's.
                for batch in found[0] if isinstance(found[0], (list, tuple)) else ():
                    size = _size(batch, name)
                    if size is not None:
                        straggler.work(size)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                guard.fail(error)
        return found

    return get_batch_samples


def _say_untold(error: Exception) -> None:
    say_once(
        "batch sizes",
        f"ResilienceCallback: how large batches are is not told any more, and training goes on: "
        f"{type(error).__name__}: {error}",
    )


def _size(batch: Any, name: str) -> int | None:
    """Return how many elements the main input has; None for batches of another kind."""
    count = getattr(batch.get(name), "numel", None) if isinstance(batch, Mapping) else None
    size = count() if callable(count) else None
    return size if type(size) is int else None


def timed(method: Callable[..., Any], section: HookedSection | EvaluationBeat) -> Callable[..., Any]:
    """Return a method of a trainer with a section around it; what it raises passes, and does not count."""

    def call(*args: Any, **options: Any) -> Any:
        section.begin()
        try:
            result = method(*args, **options)
        except BaseException:
            section.drop()
            raise
        section.end()
        return result

    return call


def heard(method: Callable[..., Any], losses: StepLoss) -> Callable[..., Any]:
    """Return `training_step` of a trainer such that it tells the loss of each micro-batch."""

    def training_step(*args: Any, **options: Any) -> Any:
        loss = method(*args, **options)
        losses.add(loss)
        return loss

    return training_step


class TrainerPatches(Patches):
    """What is hung on a trainer for the time of one training."""

    def __init__(self, trainer: Any, losses: StepLoss) -> None:
        """Hang it on, once the trainer has wrapped its model and made its optimizer."""
        super().__init__()
        try:
            fetch = timed(trainer.get_batch_samples, HookedSection("data", "io"))
            self.replace(trainer, "get_batch_samples", tell_sizes(fetch, trainer.model))
            self.replace(trainer, "evaluate", timed(trainer.evaluate, HookedSection("eval", "compute")))
            self.replace(trainer, "prediction_step", timed(trainer.prediction_step, EvaluationBeat()))
            if numerics.is_on():
                self.replace(trainer, "training_step", heard(trainer.training_step, losses))
            self.on_detach(straggler.attach(trainer.model_wrapped, torch_optimizer(trainer)).detach)
        except BaseException:
            self.detach()
            raise


_TRAINED: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()
"""Sessions in which a training has been, and where the first one saves: the run directory knows of its checkpoints."""


class Training:
    """One training of one trainer, of the thread that trains. `is_trial`: one of a search, which saves by itself."""

    def __init__(self, trainer: Any, session: Session, *, is_trial: bool) -> None:
        self._trainer = trainer
        self._session = session
        self._is_trial = is_trial
        self._is_stopping = self._is_over = False
        self._resumed_step: int | None = None
        self._beat = StepBeat()
        self._losses = StepLoss()
        self._bad_steps: frozenset[int] = frozenset()
        self._guard = Guard(self._failed)
        self._saves: TrainerSaves | None = None
        self._patches: TrainerPatches | None = None
        recorder = lookup.recorder()
        if recorder is not None:
            recorder.begin()  # an earlier training has ended all deadlines
        if not is_trial:
            reopen(session)

    def resume_from(self, asked: str | bool | None, *, by_itself: bool) -> str | None:
        """Return what `train(resume_from_checkpoint=asked)` loads. Collective; raises CheckpointError."""
        found, output_dir = None, str(self._trainer.args.output_dir)
        put_back_on_all_ranks(output_dir, is_keeper=self._trainer.args.should_save)
        is_first = by_itself and asked is None and not self._is_trial and self._session not in _TRAINED
        if is_first and self._session.may_resume:
            with straggler.section("resume", kind="io"):
                found, self._bad_steps = checkpoint_of_run(self._session, output_dir)
        return checked(asked, output_dir, found)

    def begins(self) -> None:
        """Take the signals over, time the model, which is wrapped by now, and see to what is saved."""
        self._release()  # where a batch size was too large for the memory, and is tried smaller
        trainer = self._trainer
        self._resumed_step = int(trainer.state.global_step) or None
        warn(trainer)
        patches = self._patches = TrainerPatches(trainer, self._losses)
        if self._bad_steps:
            self._leave_out(patches)
        self._is_over = 0 < trainer.state.max_steps <= trainer.state.global_step
        if self._is_over:
            # The trainer looks at its limit behind a step: what was complete would be trained one step further.
            patches.replace(trainer, "get_batch_samples", lambda *_, **__: ([], None))
        if not self._is_trial:
            self._saves = TrainerSaves(trainer, self._session, is_known=self._is_known())
            patches.replace(trainer, "_save_checkpoint", self._saves.save)
        if behind := handlers_before(trainer):
            listening.take_over(behind)
        listening.begin(self._expected_save_s)

    def _leave_out(self, patches: TrainerPatches) -> None:
        """Let steps whose numbers were bad make nothing of their batches: no forward, no gradients, no change.

        They count as steps for the trainer and its schedules.
        """
        import torch

        trainer = self._trainer
        if getattr(trainer, "is_deepspeed_enabled", False) or getattr(trainer.accelerator, "scaler", None) is not None:
            say_once(
                "left out",
                "batches whose numbers were bad are trained on again: neither DeepSpeed nor a gradient scaler (fp16) "
                "can do a step without a loss",
            )
            return
        plain = trainer.training_step

        def training_step(*args: Any, **options: Any) -> Any:
            step = int(trainer.state.global_step)
            if step not in self._bad_steps:
                return plain(*args, **options)
            say_left_out(step, int(trainer.args.process_index))
            return torch.zeros((), device=trainer.args.device)

        patches.replace(trainer, "training_step", training_step)

    def _is_known(self) -> bool:
        place = os.path.abspath(self._trainer.args.output_dir)
        first = _TRAINED.setdefault(self._session, place)
        if first != place:
            say_once(
                "another training",
                f"{place}: these checkpoints are resumed only by train(resume_from_checkpoint=last_checkpoint(...)), "
                f"the run directory knows those of {first}; give each training a process and a run directory",
            )
        return bool(first == place)

    def _expected_save_s(self) -> float:
        return 0.0 if self._saves is None else self._saves.expected_save_s

    # -- steps

    def epoch_begins(self, control: Any) -> None:
        """Tell the trainer to stop where what was resumed is complete."""
        if self._is_over:
            control.should_training_stop = True

    # What a callback does is never compiled, so these are no `Hook`s, which ask for that.

    def step_begins(self, state: Any) -> None:
        """Begin a step: its first batch is there."""
        if self._guard.is_on:
            try:
                if self._is_stopping:
                    self.leave()  # another callback has told the trainer to go on
                self._beat.begin(int(state.global_step))
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self._guard.fail(error)

    def step_ends(self, state: Any, control: Any) -> None:
        """End it; then stop if all ranks agreed to. May raise NumericsError."""
        if self._guard.is_on:
            losses = self._losses
            if losses.watch is not None and losses.watch.is_waiting:
                numerics.judge_steps()
            try:
                step = int(state.global_step)
                losses.end(step - 1)
                self._beat.end()
                if preemption.check(StepsDone(step)):
                    self._stop(step, control)
            except Exception as error:  # noqa: BLE001 - as above
                self._guard.fail(error)

    def _stop(self, step: int, control: Any) -> None:
        # The trainer saves behind this hook, with what callbacks after this one have seen of the step.
        self._is_stopping = True
        control.should_save = fits(self._saves, step, self._session)
        if self._saves is not None:
            self._saves.is_stopping = True
        control.should_evaluate = False
        control.should_training_stop = True

    def epoch_ends(self) -> None:
        """Leave if a stop was agreed; else leave a step that the last batches did not complete: a save may come now."""
        self.leave()
        self._beat.interrupt()

    def leave(self) -> None:
        """End the process here, if a stop was agreed: behind the save, before the trainer evaluates or deletes."""
        if not self._is_stopping:
            return
        heartbeat.done()
        trainer = self._trainer
        try:  # trackers close their runs in it, and are told of no other end
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
        except Exception as error:  # noqa: BLE001 - the job leaves all the same, with the code that requeues it
            say_once("train end", f"on_train_end of a callback failed: {type(error).__name__}: {error}")
        raise Preempted

    # -- the end

    def ends(self) -> None:
        """Set the finished flag, and leave the trainer as it was. Collective."""
        numerics.settle()
        self._release()
        heartbeat.done()
        if not self._is_trial:
            finish(self._session, int(self._trainer.state.global_step))

    def fails(self, error: BaseException) -> None:
        """Leave the trainer as it was, after an exception. No collective: the other ranks may be elsewhere."""
        saved = None if self._saves is None else self._saves.last_step
        self._release()
        heartbeat.done()
        how = "stopped" if isinstance(error, Preempted) else f"the training ended by {type(error).__name__}"
        say_how_to_resume(self._session, saved or self._resumed_step, how)

    def _release(self) -> None:
        self._beat.drop()
        if self._patches is not None:
            self._patches.detach()
            self._patches = None

    def _failed(self, error: Exception) -> None:
        self._beat.drop()
        say_failed("ResilienceCallback", "heartbeats and preemption", error)
