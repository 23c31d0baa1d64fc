"""`ResilienceCallback`: everything that the SDK has, for one `Trainer`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from resilience_sdk import environ, lanes
from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters._base import framework
from resilience_sdk.adapters._late import Late
from resilience_sdk.adapters.transformers import trainers
from resilience_sdk.adapters.transformers.training import Training
from resilience_sdk.errors import ConfigError
from resilience_sdk.session import Session
from resilience_sdk.session.on_all_ranks import session_on_all_ranks
from resilience_sdk.session.run_start import begin_session
from resilience_sdk.settings import Settings, load_settings


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
        self._run_dir = None if run_dir is None else os.fspath(run_dir)
        self._resumes = bool(resume)
        self._settings = settings
        self._overrides = dict(overrides)
        if self._overrides:
            load_settings(arguments=self._overrides, strict_env=False)
        self._trainer: Any = None
        self._plain_train: Any = None
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
        trainers.check(trainer)
        if environ.is_disabled(environ.environment()):
            lanes.recorder()  # says so
            return
        self._refuse_second(trainer)
        if self._trainer is not None and self._trainer is not trainer:
            raise ConfigError(
                "this ResilienceCallback is in another Trainer already: make one for each, or call its detach() first"
            )
        if self not in trainers.callbacks_of(trainer):
            trainer.add_callback(self)
        if self._trainer is None:
            self._trainer = trainer
            self._plain_train = vars(trainer).get("train")
            trainer.train = Watched(self, trainer.train)

    def _refuse_second(self, trainer: Any) -> None:
        if any(isinstance(one, ResilienceCallback) and one is not self for one in trainers.callbacks_of(trainer)):
            raise ConfigError(
                "Trainer(callbacks=...) has two ResilienceCallbacks, and both would save and stop: remove one of them"
            )

    def detach(self) -> None:
        """Leave the trainer, with all as it was before; between two trainings. May be repeated."""
        trainer, self._trainer = self._trainer, None
        plain, self._plain_train = self._plain_train, None
        if trainer is None:
            return
        own = vars(trainer)
        if isinstance(own.get("train"), Watched):  # else somebody has put another one around it, which stays
            own.pop("train")
            if plain is not None:
                own["train"] = plain
        trainer.remove_callback(self)

    # -- a training

    def watch(self, plain: Callable[[Any], Any], asked: Any, *, is_trial: bool) -> Any:
        """Train, by the trainer's own `train`, which takes what is resumed."""
        if self._trainer is None or self._training is not None:
            return plain(asked)  # detached below what somebody has put around it, or that calls it twice
        pytorch.refuse_second()  # by hand, or by the adapter of Accelerate
        session = session_on_all_ranks(self._session)
        if session is None:
            return plain(asked)
        session.settle()
        training = Training(self._trainer, session, is_trial=is_trial)
        try:
            path = training.resume_from(asked, by_itself=self._resumes)
            self._training = training
            result = plain(path)
        except BaseException as error:
            training.fails(error)
            raise
        finally:
            self._training = None
        training.ends()
        return result

    def _is_unknown(self) -> bool:
        return self._trainer is None and not environ.is_disabled(environ.environment())

    def _session(self) -> Session | None:
        return begin_session("ResilienceCallback", self._run_dir, self._settings, self._overrides)

    # -- hooks of the trainer

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Be in the trainer that is made here."""
        trainer = trainers.calling_trainer(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin: model, optimizer and what was resumed are there."""
        if self._is_unknown():
            self._refuse_second(trainers.calling_trainer(self))
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


class Watched:
    """The method `train` of a trainer that is watched."""

    def __init__(self, callback: ResilienceCallback, plain: Callable[..., Any]) -> None:
        self._callback = callback
        self._plain = plain

    def __call__(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Train as the trainer does."""
        trial = args[0] if args else options.get("trial")
        return self._callback.watch(
            lambda resumed: self._plain(resumed, *args, **options), resume_from_checkpoint, is_trial=trial is not None
        )
