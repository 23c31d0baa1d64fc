"""`ResilienceCallback`: everything that the SDK has, for one `Trainer`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from resilience_sdk import preemption
from resilience_sdk.adapters._base import (
    Late,
    Patches,
    SessionOptions,
    framework,
    refuse_second,
)
from resilience_sdk.adapters.transformers.seams import callbacks_of, calling_trainer, check
from resilience_sdk.adapters.transformers.training import Training
from resilience_sdk.core import environ
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError
from resilience_sdk.rank.all_ranks import session_on_all_ranks
from resilience_sdk.recorder import lookup


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
        restore_callbacks: Give the trainer's callbacks the state back that they had at the save (`ExportableState`:
            the patience of `EarlyStoppingCallback`), where the checkpoint is the SDK's choice.
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
        restore_callbacks: bool = True,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        self._options = SessionOptions(run_dir, settings, overrides)
        self._resumes = bool(resume)
        self._restores_callbacks = bool(restore_callbacks)
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
            ignored = args[1] if len(args) > 1 else options.get("ignore_keys_for_eval")
            training.prepare(path, restores_callbacks=self._restores_callbacks, ignored_keys=ignored)
            self._training = training
            result = plain(path, *args, **options)
        except BaseException as error:
            training.fails(error)
            raise
        finally:
            self._training = None
        return training.ends(result)

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
