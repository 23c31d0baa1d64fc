"""One `Trainer.train()`: what the callback does from its beginning to its end."""

from __future__ import annotations

import os
import weakref
from typing import Any

from resilience_sdk import lanes, preemption
from resilience_sdk.adapters._base import StepBeat
from resilience_sdk.adapters.transformers import resuming, surroundings
from resilience_sdk.adapters.transformers.pointers import checkpoint_of_run
from resilience_sdk.adapters.transformers.saving import Saves
from resilience_sdk.adapters.transformers.seams import Seams
from resilience_sdk.console import say_once
from resilience_sdk.errors import Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.preemption import rank as listening
from resilience_sdk.session import Session
from resilience_sdk.session.ending import finish, reopen
from resilience_sdk.session.last_save import fits, say_how_to_resume
from resilience_sdk.straggler.hooks import Guard

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
        self._guard = Guard(self._failed)
        self._saves: Saves | None = None
        self._seams: Seams | None = None
        recorder = lanes.recorder()
        if recorder is not None:
            recorder.begin()  # an earlier training has ended all deadlines
        if not is_trial:
            reopen(session)

    def resume_from(self, asked: str | bool | None, *, by_itself: bool) -> str | None:
        """Return what `train(resume_from_checkpoint=asked)` loads. Collective; raises CheckpointError."""
        found, output_dir = None, str(self._trainer.args.output_dir)
        resuming.put_back(output_dir, is_keeper=self._trainer.args.should_save)
        if by_itself and asked is None and not self._is_trial and self._session not in _TRAINED:
            found = checkpoint_of_run(self._session, output_dir) if self._session.may_resume else None
        return resuming.checked(asked, output_dir, found)

    def begins(self) -> None:
        """Take the signals over, time the model, which is wrapped by now, and see to what is saved."""
        self._release()  # where a batch size was too large for the memory, and is tried smaller
        trainer = self._trainer
        self._resumed_step = int(trainer.state.global_step) or None
        surroundings.warn(trainer)
        self._seams = Seams(trainer)
        self._is_over = 0 < trainer.state.max_steps <= trainer.state.global_step
        if self._is_over:
            # The trainer looks at its limit behind a step: what was complete would be trained one step further.
            self._seams.put("get_batch_samples", lambda *_, **__: ([], None))
        if not self._is_trial:
            self._saves = Saves(trainer, self._session, is_known=self._is_known())
            plain = trainer._save_checkpoint
            self._seams.put("_save_checkpoint", lambda *args, **options: self._save(lambda: plain(*args, **options)))
        if behind := surroundings.handlers_before(trainer):
            listening.take_over(behind)
        listening.begin(self._expected_save_s)

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

    def _save(self, plain: Any) -> None:
        if self._saves is not None:
            self._saves.save(plain)

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
        """End it; then stop if all ranks agreed to."""
        if self._guard.is_on:
            try:
                self._beat.end()
                step = int(state.global_step)
                if preemption.check(step):
                    self._stop(step, control)
            except Exception as error:  # noqa: BLE001 - as above
                self._guard.fail(error)

    def _stop(self, step: int, control: Any) -> None:
        # The trainer saves behind this hook, with what callbacks after this one have seen of the step.
        self._is_stopping = True
        control.should_save = fits(self._saves, step, self._session)
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
        if self._seams is not None:
            self._seams.detach()
            self._seams = None

    def _failed(self, error: Exception) -> None:
        self._beat.drop()
        say_once(
            "adapter failed",
            f"ResilienceCallback: a hook failed, heartbeats and preemption are switched off and training goes on: "
            f"{type(error).__name__}: {error}",
        )
