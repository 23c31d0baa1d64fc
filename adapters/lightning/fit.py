"""One fit: what a callback of ours does from the setup of a trainer to its teardown."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any, Protocol

from resilience_sdk import lanes, preemption
from resilience_sdk.adapters._base import StepBeat, checkpointer
from resilience_sdk.adapters.lightning import roles, saving
from resilience_sdk.adapters.lightning.complete import is_complete
from resilience_sdk.adapters.lightning.resuming import Resume
from resilience_sdk.adapters.lightning.sections import FitSections
from resilience_sdk.adapters.lightning.signals import let_ranks_leave, replace_handlers
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.console import say_once
from resilience_sdk.errors import Preempted
from resilience_sdk.heartbeats import heartbeat
from resilience_sdk.preemption import rank as listening
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.session import Session
from resilience_sdk.session.ending import finish, reopen
from resilience_sdk.session.last_save import save_at_stop, say_how_to_resume

_TRAINED: weakref.WeakKeyDictionary[Session, int] = weakref.WeakKeyDictionary()
"""Sessions in which a fit has been, and how many steps the furthest had completed."""


class Saves(Protocol):
    """What can save at a stop."""

    def save(self, step: int) -> bool:
        """Save after `step` completed steps; tell whether that worked. Collective."""
        ...


class Fit:
    """One fit of one trainer, of the thread that trains. What it does is its `role`, see `roles`."""

    def __init__(
        self,
        trainer: Any,
        role: frozenset[str],
        session: Session,
        *,
        resumes: bool,
        log: logging.Logger,
        signals: tuple[int, ...] = (),
    ) -> None:
        """Hang on what is there at the setup. Collective, if it saves.

        `resumes`: load the newest checkpoint. `signals`: those to leave, beside those of the settings.
        """
        self.trainer = trainer
        self._role = role
        self._session = session
        self._log = log
        self._signals = signals
        self._step = -1
        self._is_worked = False
        self._has_ended = False
        self._is_trial = bool(trainer.fast_dev_run)  # saves nothing, completes nothing
        self._beat = StepBeat() if roles.BEAT in role else None
        recorder = lanes.recorder()
        if recorder is not None and roles.BEAT in role:
            recorder.begin()  # an earlier fit has ended all deadlines
        if roles.FINISH in role and not self._is_trial:
            reopen(session)
        self.sections = FitSections(trainer) if roles.SECTIONS in role else None
        self._checkpointer: Checkpointer | None = None
        self.resume: Resume | None = None
        if roles.CHECKPOINT in role and not self._is_trial:
            try:
                self._prepare_saves(resumes=resumes and session not in _TRAINED)
            except BaseException:  # the callback has no fit yet that it could end
                self._release()
                raise

    # -- checkpoints

    def _prepare_saves(self, *, resumes: bool) -> None:
        session = self._session
        name = saving.part_name(self.trainer.strategy)
        if name is None:
            strategy = type(self.trainer.strategy).__name__
            say_once("strategy", f"no checkpoints are saved or resumed: {strategy} has a way of its own to write them")
            return
        self._checkpointer = checkpointer(session, saving.Writer(self.trainer, name))
        own = saving.OwnLoader(self.trainer)
        self._checkpointer.add_data("lightning.loader", own)
        if resumes and session.may_resume:
            self.resume = Resume(self.trainer, self._checkpointer, own)
            self.resume.choose()

    def _saver(self) -> Saves | None:
        if self._checkpointer is not None:
            return self._checkpointer
        return None if self._is_trial else saving.LastCheckpoint(self.trainer)

    def _expected_save_s(self) -> float:
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_save_s

    # -- the training

    def train_starts(self, module: Any) -> None:
        """Take the signals over, and time the model, which is wrapped by now."""
        self._step = int(self.trainer.global_step)
        earlier = _TRAINED.get(self._session)
        if self._checkpointer is not None and earlier is not None and self._step < earlier:
            self._checkpointer = None
            say_once(
                "another fit",
                f"this fit saves no checkpoints: those in {self._session.run_dir.path} are of an earlier one in this "
                f"process, of {earlier} steps; give each training a process and a run directory of its own",
            )
        if roles.PREEMPTION in self._role:
            replace_handlers(self.trainer, self._signals)
            listening.begin(self._expected_save_s)
        if self.sections is not None:
            self.sections.attach(module)
            if self.resume is not None and self._checkpointer is not None:
                self.sections.profiler.before_fetch = self.resume.restore_random_numbers

    def batch_starts(self) -> None:
        """Begin the heartbeat of an optimizer step, with its first batch."""
        if self._beat is not None:
            self._beat.begin(self._step)

    def batch_ends(self) -> None:
        """End it with the batch that made the step; then stop if all ranks agreed to, or save if it is time."""
        step = int(self.trainer.global_step)
        if step == self._step:
            return  # gradients are accumulated
        self._step, self._is_worked = step, True
        if self._beat is not None:
            self._beat.end()
        if roles.PREEMPTION in self._role and preemption.check(step):
            self._stop(step)
        if self._checkpointer is not None:
            self._checkpointer.maybe_save(step)

    def _stop(self, step: int) -> None:
        """Save and leave; all ranks are here, behind the same step."""
        if self.trainer.is_global_zero:
            for line in lines_of_stop(listening.handlers()):
                self._log.warning(line)
        if self._beat is None:
            heartbeat.done()  # progress is what optimizers do, and these deadlines would go on in the save
        saver = self._saver()
        if saver is not None:
            save_at_stop(saver, step, self._session)
        heartbeat.done()
        let_ranks_leave(self.trainer)
        raise Preempted

    def eval_starts(self) -> None:
        """Begin section `eval`; a step that is not complete does not count its time."""
        if self._beat is not None:
            self._beat.interrupt()
        if self.sections is not None:
            self.sections.eval.begin()

    def eval_ends(self) -> None:
        """End section `eval`."""
        if self.sections is not None:
            self.sections.eval.end()

    def epoch_ends(self) -> None:
        """Leave a step that the last batches did not complete, as with manual optimization: a save may come now."""
        if self._beat is not None:
            self._beat.interrupt()

    def train_ends(self) -> None:
        """Save once more: what has run its course can be resumed, or looked at, too. Collective."""
        self._has_ended = True
        if self._beat is not None:
            self._beat.drop()
        if self._checkpointer is not None and self._is_worked:
            self._checkpointer.save(int(self.trainer.global_step))

    # -- the end

    def ends(self) -> None:
        """Set the finished flag, and leave the trainer as it was. Collective."""
        self._release()
        is_over = (
            roles.FINISH in self._role and not self._is_trial and is_complete(self.trainer, has_ended=self._has_ended)
        )
        if is_over:
            finish(self._session, int(self.trainer.global_step))

    def fails(self, error: BaseException) -> None:
        """Leave the trainer as it was, after an exception. No collective: the other ranks may be elsewhere."""
        self._release(is_leaving=isinstance(error, Preempted))
        good = None if self._checkpointer is None else self._checkpointer.last_good
        how = "stopped" if isinstance(error, Preempted) else f"the training ended by {type(error).__name__}"
        say_how_to_resume(self._session, None if good is None else good.step, how)

    def _release(self, *, is_leaving: bool = False) -> None:
        if self._beat is not None:
            self._beat.drop()
        if self.sections is not None:
            self.sections.detach()
        if roles.PREEMPTION in self._role and not is_leaving:  # who leaves may be signalled again
            listening.give_back()
        if roles.BEAT in self._role:
            heartbeat.done()
        if self._step >= 0:
            _TRAINED[self._session] = max(self._step, _TRAINED.get(self._session, 0))


def lines_of_stop(handlers: Handlers | None) -> list[str]:
    """Return what is logged of a stop, in NeMo's words; of the signal only where this rank has heard one."""
    heard = None if handlers is None else handlers.heard
    lines = [] if heard is None else [f"Received signal {heard}, initiating graceful stop"]
    return [*lines, "Preemption detected, saving checkpoint and exiting"]


def path_to_load(checkpointer: Checkpointer) -> Path | None:
    """Return what `fit(ckpt_path=...)` takes, by this rank alone; None = start fresh. Raises CheckpointError."""
    found = checkpointer.find()
    return None if found is None else saving.find_part(found.path)
