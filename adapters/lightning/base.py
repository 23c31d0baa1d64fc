"""The hooks that all callbacks of ours share: each hands on to the `Fit` that its role has begun."""

from __future__ import annotations

import logging
import os
from typing import Any

from resilience_sdk.adapters.lightning import roles, surroundings
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.lightning.framework import LateCallback
from resilience_sdk.session import Session
from resilience_sdk.session.on_all_ranks import session_on_all_ranks
from resilience_sdk.session.run_start import begin_session
from resilience_sdk.settings import Settings, load_settings

_FITTING = "fit"


class SdkCallback(LateCallback):
    """A callback with some duties (see `roles`). Its hooks run in the thread that trains, on every rank.

    It acts in `fit` alone: `validate`, `test` and `predict` are left as they are. It may be used for one fit after
    another, and holds nothing between them.
    """

    duties: frozenset[str] = frozenset()
    is_automatic = False
    stops_for_stragglers = False
    signals: tuple[int, ...] = ()
    """Those to leave, beside those of the settings."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        settings: Settings | None = None,
        overrides: dict[str, Any] | None = None,
        logger_name: str = "resilience_sdk.lightning",
    ) -> None:
        """Check the options; nothing is started before the fit."""
        self._run_dir = None if run_dir is None else os.fspath(run_dir)
        self._settings = settings
        self._overrides = dict(overrides or {})
        if self._overrides:
            load_settings(arguments=self._overrides, strict_env=False)
        self._logger_name = logger_name
        self._fit: Fit | None = None
        self._resumes = False
        self._has_told = False  # the path to resume, so that the fit is given it

    # -- for the kinds of callbacks

    def begins(self, fit: Fit, session: Session) -> None:
        """Do what is particular to this callback, when a fit begins in which it has a part."""

    def steps(self, fit: Fit) -> None:
        """Do what is particular to it after a batch."""

    def ends(self) -> None:
        """Give up what `begins` has taken. May be repeated."""

    def _session(self) -> Session | None:
        return begin_session(_shown_name(self), self._run_dir, self._settings, self._overrides)

    # -- hooks of Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin: the process group is there, the model is not restored yet. Collective where it saves."""
        if stage != _FITTING:
            return
        surroundings.check(trainer)
        role = roles.role_of(self, trainer.callbacks)
        session = session_on_all_ranks(self._session) if role else None
        if session is None:
            return
        session.settle()
        surroundings.warn(trainer)
        log = logging.getLogger(self._logger_name)
        self._fit = Fit(trainer, role, session, resumes=self._resumes, log=log, signals=self.signals)
        self.begins(self._fit, session)
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._load()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load what a strategy loads only when it is set up."""
        if self._fit is not None and trainer.strategy.restore_checkpoint_after_setup:
            self._load()

    def _load(self) -> None:
        if self._fit is not None and self._fit.resume is not None:
            self._fit.resume.load(asked=self._has_told)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Correct what is this rank's own in what all ranks have loaded."""
        if self._fit is not None and self._fit.resume is not None:
            self._fit.resume.loaded(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals over, time the model."""
        if self._fit is not None:
            self._fit.train_starts(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        if self._fit is not None:
            self._fit.batch_starts()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step; save, or stop. Collective, if it is time."""
        if self._fit is not None:
            self.steps(self._fit)
            self._fit.batch_ends()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the evaluation."""
        if self._fit is not None:
            self._fit.eval_starts()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """End it."""
        if self._fit is not None:
            self._fit.eval_ends()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Begin what comes between two epochs."""
        if self._fit is not None:
            self._fit.epoch_ends()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what the training came to. Collective."""
        if self._fit is not None:
            self._fit.train_ends()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End. Collective."""
        fit, self._fit = self._fit, None
        if fit is not None:
            self.ends()
            fit.ends()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the trainer as it was. No collective: the other ranks may be elsewhere."""
        fit, self._fit = self._fit, None
        if fit is not None:
            self.ends()
            fit.fails(exception)

    def __reduce__(self) -> Any:
        """Leave the fit behind: a copy, or a callback in another process, has none."""
        make, args, state = super().__reduce__()
        return make, args, {**state, "_fit": None}


def _shown_name(callback: SdkCallback) -> str:
    return type(callback).__name__
