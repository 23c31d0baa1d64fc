"""A `Trainer.train()` under the SDK: its steps, its saves, its stop, and what is timed of it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk import preemption, straggler
from resilience_sdk.adapters._base import (
    EvaluationBeat,
    HookedSection,
    Patches,
    StepBeat,
    StepLoss,
    say_failed,
    say_left_out,
)
from resilience_sdk.adapters.transformers.evaluations import Evaluations
from resilience_sdk.adapters.transformers.place import LoaderPlace
from resilience_sdk.adapters.transformers.proof import TrainerProof
from resilience_sdk.adapters.transformers.resuming import Resumption
from resilience_sdk.adapters.transformers.saving import (
    TrainerSaves,
    checked,
    checkpoint_of_run,
    put_back_on_all_ranks,
)
from resilience_sdk.adapters.transformers.seams import handlers_before, torch_optimizer, warn
from resilience_sdk.core.console import say_once
from resilience_sdk.errors import Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import finish, reopen
from resilience_sdk.rank.checkpoints import fits, say_how_to_resume
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.model_hooks import Guard

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

    def __init__(self, trainer: Any, losses: StepLoss, place: LoaderPlace | None = None) -> None:
        """Hang it on, once the trainer has wrapped its model and made its optimizer."""
        super().__init__()
        if place is not None:
            self.on_detach(place.leave)
        try:
            counted = trainer.get_batch_samples if place is None else place.counted(trainer.get_batch_samples)
            fetch = timed(counted, HookedSection("data", "io"))
            self.replace(trainer, "get_batch_samples", tell_sizes(fetch, trainer.model))
            self.replace(trainer, "evaluate", timed(trainer.evaluate, HookedSection("eval", "compute")))
            self.replace(trainer, "prediction_step", timed(trainer.prediction_step, EvaluationBeat()))
            if numerics.is_on():
                self.replace(trainer, "training_step", heard(trainer.training_step, losses))
            self.on_detach(straggler.attach(trainer.model_wrapped, torch_optimizer(trainer)).detach)
        except BaseException:
            self.detach()
            raise


def _value(option: Any) -> Any:
    """Return an option of the trainer's arguments that may be a member of an enumeration."""
    return getattr(option, "value", option)


_TRAINED: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()
"""Sessions in which a training has been, and where the first one saves: the run directory knows of its checkpoints."""


class Training:
    """One training of one trainer, of the thread that trains. `is_trial`: one of a search, which saves by itself."""

    def __init__(self, trainer: Any, session: Session, *, is_trial: bool) -> None:
        self._trainer = trainer
        self._session = session
        self._is_trial = is_trial
        self._is_stopping = self._is_over = False
        self._has_chosen = False
        self._resumed_step: int | None = None
        self._beat = StepBeat()
        self._losses = StepLoss()
        self._bad_steps: frozenset[int] = frozenset()
        self._guard = Guard(self._failed)
        self._saves: TrainerSaves | None = None
        self._patches: TrainerPatches | None = None
        self._resumption: Resumption | None = None
        self._evaluations = Evaluations(trainer)
        self._proof = TrainerProof(trainer, session, lambda: self._bad_steps)
        self._owed: dict[str, bool] | None = None
        self._epoch_ends = False
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
        self._has_chosen = found is not None
        return checked(asked, output_dir, found)

    def prepare(self, path: str | None, *, restores_callbacks: bool, ignored_keys: Any = None) -> None:
        """Have the trainer begin where the checkpoint at `path` was made, or at its start. Collective."""
        if self._is_trial:
            return
        self._resumption = Resumption(
            self._trainer,
            path,
            is_chosen=self._has_chosen,
            restores_callbacks=restores_callbacks,
            ignored_keys=ignored_keys,
        )
        self._resumption.attach()
        if path is not None:
            self._proof.compare_with(*self._resumption.digests)

    def begins(self) -> None:
        """Take the signals over, time the model, which is wrapped by now, and see to what is saved."""
        self._release()  # where a batch size was too large for the memory, and is tried smaller
        trainer, resumption = self._trainer, self._resumption
        self._resumed_step = int(trainer.state.global_step) or None
        warn(trainer)
        place = None if resumption is None else resumption.begins(trainer.callback_handler.train_dataloader)
        if place is not None:
            self._proof.begins(place)
        patches = self._patches = TrainerPatches(trainer, self._losses, place)
        if self._bad_steps:
            self._leave_out(patches)
        self._is_over = 0 < trainer.state.max_steps <= trainer.state.global_step
        self._is_over = self._is_over or (resumption is not None and resumption.stops)
        patches.replace(trainer, "evaluate", self._evaluations.followed(trainer.evaluate))
        if self._is_over:
            self._train_no_more()
        if resumption is not None:
            self._evaluations.last_s = resumption.evaluation_s
            resumption.follow_logs(patches)
            handler = trainer.callback_handler
            patches.replace(handler, "on_epoch_begin", self._epoch_beginning(handler.on_epoch_begin))
            self._saves = TrainerSaves(trainer, self._session, is_known=self._is_known(), keep=self._keep)
            self._saves.extra_steps |= resumption.extra_steps
            patches.replace(trainer, "_save_checkpoint", self._saves.save)
            if callable(plain := getattr(trainer, "_determine_best_metric", None)):
                patches.replace(trainer, "_determine_best_metric", self._finding_best(plain))
        if behind := handlers_before(trainer):
            listening.take_over(behind)
        listening.begin(self._expected_save_s)

    def _finding_best(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `_determine_best_metric`, whose answer is whether to save with `save_strategy="best"`."""

        def determine_best_metric(*args: Any, **options: Any) -> bool:
            is_new = bool(plain(*args, **options))
            if is_new and self._saves is not None and _value(self._trainer.args.save_strategy) == "best":
                self._saves.extra_steps.discard(int(self._trainer.state.global_step))
            return is_new or self._is_stopping

        return determine_best_metric

    def _train_no_more(self) -> None:
        """Let no step be made any more: the trainer looks at its limit after a step, and would make one."""
        if self._patches is not None:
            self._patches.replace(self._trainer, "get_batch_samples", lambda *_, **__: ([], None))

    def _epoch_beginning(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `on_epoch_begin` of all callbacks, after whose first call the trainer does what was owed."""
        is_first = True

        def on_epoch_begin(*args: Any, **options: Any) -> Any:
            nonlocal is_first
            control = plain(*args, **options)
            resumption, was_first, is_first = self._resumption, is_first, False
            if was_first and resumption is not None:
                control = resumption.epoch_begun(control)
                if resumption.stops and not self._is_over:
                    self._is_over = True
                    self._train_no_more()
            return control

        return on_epoch_begin

    def _keep(self, directory: Path) -> None:
        """Write what this rank keeps beside a checkpoint."""
        if self._resumption is None:
            return
        self._proof.saved()
        extra = set() if self._saves is None else self._saves.extra_steps
        self._resumption.keep(
            directory,
            owed=self._owed,
            extra_steps=extra,
            is_ended=self._evaluations.has_ended,
            is_at_epoch_end=self._epoch_ends,
            evaluation_s=self._evaluations.last_s,
            digests=self._proof.digests(),
        )

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
        self._epoch_ends = False
        if self._resumption is not None and self._resumption.place is not None:
            self._resumption.place.epoch_begins()
        if self._is_over:
            control.should_training_stop = True

    # What a callback does is never compiled, so these are no `Hook`s, which ask for that.

    def step_begins(self, state: Any) -> None:
        """Begin a step: its first batch is there."""
        if self._guard.is_on:
            try:
                if self._is_stopping:
                    self.leave()  # another callback has told the trainer to go on
                self._evaluations.has_ended = False
                self._proof.step_begins()
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
                if self._resumption is not None:
                    self._resumption.step_ends()
                self._proof.step_ends(step - 1)
                losses.end(step - 1)
                self._beat.end()
                if preemption.check(StepsDone(step)):
                    self._stop(step, control)
            except Exception as error:  # noqa: BLE001 - as above
                self._guard.fail(error)

    def _stop(self, step: int, control: Any) -> None:
        # The trainer saves behind this hook, with what callbacks after this one have seen of the step.
        self._is_stopping = True
        is_due, save_is_due = bool(control.should_evaluate), bool(control.should_save)
        control.should_save = fits(self._saves, step, self._session)
        control.should_evaluate = False
        if control.should_save and self._saves is not None:
            self._saves.is_stopping = True
            if not save_is_due:
                self._saves.extra_steps.add(step)
            is_due, control.should_evaluate = self._evaluations.fit(is_due, self._expected_save_s(), step)
            if is_due and not control.should_evaluate:
                self._owed = {"save": save_is_due}
        else:
            control.should_training_stop = True

    def epoch_ends(self) -> None:
        """Leave if a stop was agreed; else leave a step that the last batches did not complete: a save may come now."""
        self._epoch_ends = True
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

    def ends(self, result: Any) -> Any:
        """Set the finished flag, leave the trainer as it was, and return what `train` returns. Collective."""
        numerics.settle()
        if self._resumption is not None:
            result = self._resumption.corrected(result)
        self._release()
        self._end_resumption()
        heartbeat.done()
        if not self._is_trial:
            finish(self._session, int(self._trainer.state.global_step))
        return result

    def fails(self, error: BaseException) -> None:
        """Leave the trainer as it was, after an exception. No collective: the other ranks may be elsewhere."""
        saved = None if self._saves is None else self._saves.last_step
        self._release()
        self._end_resumption()
        heartbeat.done()
        how = "stopped" if isinstance(error, Preempted) else f"the training ended by {type(error).__name__}"
        say_how_to_resume(self._session, saved or self._resumed_step, how)

    def _end_resumption(self) -> None:
        self._proof.detach()
        if self._resumption is not None:
            self._resumption.detach()
            self._resumption = None

    def _release(self) -> None:
        self._beat.drop()
        if self._patches is not None:
            self._patches.detach()
            self._patches = None

    def _failed(self, error: Exception) -> None:
        self._beat.drop()
        say_failed("ResilienceCallback", "heartbeats and preemption", error)
