"""`ResilienceCallback`: everything that the SDK has, for one trainer, and the hooks that all callbacks of ours share.

`lightning.pytorch` and `pytorch_lightning` are copies of one another, and neither knows the other's classes. A callback
of ours is one of both, as far as they are there.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from resilience_sdk.adapters._base import Late, Patches, SessionOptions, framework
from resilience_sdk.adapters.lightning import fit as roles
from resilience_sdk.adapters.lightning.fit import Fit
from resilience_sdk.adapters.lightning.saves import find_part
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import ConfigError, MissingExtraError, Preempted
from resilience_sdk.rank import Session
from resilience_sdk.rank.all_ranks import session_on_all_ranks
from resilience_sdk.rank.lifecycle import current
from resilience_sdk.straggler.published import FIELDS as CONTROLLED
from resilience_sdk.straggler.published import checked, controlled, read_settings, values_of, write_settings

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _import_one() -> Any:
    try:
        return framework(PACKAGES[0], "lightning")
    except MissingExtraError:
        if importlib.util.find_spec(PACKAGES[1]) is None:
            raise
        return framework(PACKAGES[1], "pytorch_lightning")


_SEAMS = ("callbacks", "strategy", "profiler", "fit_loop", "global_step", "save_checkpoint", "fast_dev_run")


def check(trainer: Any) -> None:
    """Raise ConfigError where a trainer lacks what we build on: it is of another framework, or of another time."""
    missing = [name for name in _SEAMS if not hasattr(trainer, name)]
    if not missing and not hasattr(trainer.strategy, "restore_checkpoint_after_setup"):
        missing = ["strategy.restore_checkpoint_after_setup"]
    if missing:
        kind = type(trainer)
        raise ConfigError(
            f"{kind.__module__}.{kind.__qualname__} has no {', '.join(missing)}: these callbacks are for the "
            "Trainer of lightning.pytorch or pytorch_lightning, 2.5 or newer; for a loop of your own use "
            "resilience_sdk.adapters.pytorch.attach"
        )


def warn(trainer: Any) -> None:
    """Say what the user should know, once, on rank 0."""
    if not trainer.is_global_zero:
        return
    env = environ.environment()
    if environ.NVRX_MONITOR in env and environ.INTERNAL_NVRX not in env:
        say_once(
            "ft_launcher",
            "STARTED BY ft_launcher: its monitors hear no heartbeat of this script, so it restarts nothing that hangs, "
            "and its workload control is not served; hangs are reported here, not restarted. Start with "
            "`resilience run` in its place: it takes torchrun's options, --fault-tol-cfg-path and --ft-param-*",
        )
    if trainer.world_size > 1:
        for name in deadlocking(trainer.callbacks):
            say_once(
                f"on exception:{name}",
                f"{name} saves when a rank raises, in a collective that the other ranks are not in: an exception on "
                "one of several ranks then hangs the job. Remove it: a killed or failed job resumes from the newest "
                "checkpoint of the run directory",
            )


def deadlocking(callbacks: Iterable[Any]) -> list[str]:
    """Return the names of what would save in `on_exception`. Pure."""
    found = []
    for callback in callbacks:
        name = type(callback).__name__
        if any(base.__name__ == "OnExceptionCheckpoint" for base in type(callback).__mro__):
            found.append(name)
        elif getattr(callback, "save_on_exception", False):
            found.append(f"{name}(save_on_exception=True)")
    return found


_FITTING = "fit"
_IN_EACH_STEP = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks of Lightning in each step that no callback of ours has a use for."""


class SdkCallback(Late):
    """A callback with some duties (see `fit.role_of`). Its hooks run in the thread that trains, on every rank.

    It acts in `fit` alone: `validate`, `test` and `predict` are left as they are. It may be used for one fit after
    another, and holds nothing between them.
    """

    duties: frozenset[str] = frozenset()
    is_automatic = False
    """Nobody asked for it in code: it steps aside where somebody has put in another one of ours."""
    stops_for_stragglers = False
    signals: tuple[int, ...] = ()
    """Those to leave, beside those of the settings."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        settings: Settings | None = None,
        overrides: dict[str, Any] | None = None,
        logger_name: str | None = "resilience_sdk.lightning",
    ) -> None:
        """Check the options; nothing is started before the fit."""
        self._options = SessionOptions(run_dir, settings, dict(overrides or {}))
        self._logger_name = logger_name
        self._fit: Fit | None = None
        self._unused_hooks = Patches()
        self._resumes = False
        self._has_told = False  # the path to resume, so that the fit is given it

    @classmethod
    def framework_bases(cls) -> tuple[type, ...]:
        """Return the `Callback` of each package that is there; raises MissingExtraError without Lightning."""
        loaded = [sys.modules[name] for name in PACKAGES if hasattr(sys.modules.get(name), "Callback")]
        return tuple(module.Callback for module in loaded or [_import_one()])

    # -- for the kinds of callbacks

    def begins(self, fit: Fit) -> None:
        """Do what is particular to this callback, when a fit begins in which it has a part."""

    def batch_begins(self, fit: Fit) -> None:
        """Do what is particular to it before a batch of the training or of an evaluation."""

    def steps(self, fit: Fit) -> None:
        """Do what is particular to it after a batch."""

    def fails(self, fit: Fit, error: Exception) -> None:
        """Do what is particular to it where the fit ends by an exception of this rank."""

    def leaves(self, fit: Fit) -> None:
        """Do what is particular to it where all ranks leave behind the same step."""

    def ends(self, fit: Fit) -> None:
        """Give up what `begins` has taken."""

    def _session(self) -> Session | None:
        return self._options.begin(type(self).__name__)

    # -- hooks of Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin: the process group is there, the model is not restored yet. Collective where it saves."""
        if stage != _FITTING:
            return
        check(trainer)
        role = roles.role_of(self, trainer.callbacks)
        session = session_on_all_ranks(self._session) if role else None
        if session is None:
            return
        session.settle()
        warn(trainer)
        log = logging.getLogger(self._logger_name)
        self._fit = Fit(trainer, role, session, resumes=self._resumes, log=log, signals=self.signals)
        self._leave_unused_hooks_out()
        self.begins(self._fit)
        if not trainer.strategy.restore_checkpoint_after_setup:
            self._load()

    def _leave_unused_hooks_out(self) -> None:
        """Have Lightning pass by the hooks that do nothing, for this fit: around each it would do more than we in all.

        It calls those that can be called. What a subclass has put in their place is called as ever.
        """
        for name in _IN_EACH_STEP:
            if any(getattr(type(self), name, None) is getattr(base, name, self) for base in self.framework_bases()):
                self._unused_hooks.replace(self, name, None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load what a strategy loads only when it is set up."""
        if self._fit is not None and trainer.strategy.restore_checkpoint_after_setup:
            self._load()

    def _load(self) -> None:
        if self._fit is not None and self._fit.checkpoints is not None:
            self._fit.checkpoints.load(asked=self._has_told)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Correct what is this rank's own in what all ranks have loaded."""
        if self._fit is not None:
            self._fit.loaded(checkpoint)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Let what we save say where in a batch or an epoch it is."""
        if self._fit is not None:
            self._fit.mark(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals over, time the model."""
        if self._fit is not None:
            self._fit.train_starts(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        if self._fit is not None:
            self.batch_begins(self._fit)
            self._fit.batch_starts(batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step, and agree on whether it is the last one."""
        if self._fit is not None:
            self.steps(self._fit)
            self._fit.batch_ends(outputs)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the evaluation."""
        if self._fit is not None:
            self._fit.eval_starts()

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a batch of an evaluation."""
        if self._fit is not None:
            self.batch_begins(self._fit)
            self._fit.eval_batch_starts()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """End it."""
        if self._fit is not None:
            self._fit.eval_batch_ends()

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
        self._unused_hooks.detach()
        if fit is not None:
            self.ends(fit)
            fit.ends()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the trainer as it was. No collective: the other ranks may be elsewhere."""
        fit, self._fit = self._fit, None
        self._unused_hooks.detach()
        if fit is not None:
            if isinstance(exception, Preempted):
                self.leaves(fit)
            elif isinstance(exception, Exception):
                self.fails(fit, exception)
            self.ends(fit)
            fit.fails(exception)

    def __reduce__(self) -> Any:
        """Leave the fit behind: a copy, or a callback in another process, has none."""
        make, args, state = super().__reduce__()
        return make, args, {**state, "_fit": None}


def stop_options(stop: bool | float | None, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that `stop_if_detected=` of a callback means; None: none. Raises ConfigError. Pure."""
    if stop is None:
        return {}
    if not isinstance(stop, float):
        return {"stop_if_detected": stop} | ({} if stop else {"stop_below_relative": 0.0, "stop_below_individual": 0.0})
    if not 0.0 < stop <= 1.0:
        raise ConfigError(
            f"stop_if_detected={stop!r}: expected True, False, or a score above 0 and up to 1 such as 0.7"
        )
    if "stop_below_relative" in others:
        raise ConfigError(
            f"stop_if_detected={stop!r}, stop_below_relative={others['stop_below_relative']!r}: both mean the same, "
            "give one of them"
        )
    return {"stop_if_detected": False, "stop_below_relative": stop}


def apply_options(session: Session, options: Mapping[str, Any]) -> None:
    """Let the options of the callback count in a job whose monitor was started with others. On rank 0.

    In the first attempt they also replace what an earlier job of the run directory has left.
    """
    if not options or session.identity.rank != 0:
        return
    path = session.run_dir.path
    try:
        text = read_settings(path)
        known = {} if text is None else values_of(text, "settings.json")
        standing = controlled(session.settings) | (known if session.attempt == 0 else {})
        changed = {name: value for name, value in options.items() if standing[name] != value}
        if {**known, **changed} != known:
            write_settings(path, json.dumps({**known, **changed}, indent=1) + "\n")
    except Exception as error:  # noqa: BLE001 - reports as the job was started are better than no training
        say_once("straggler options", f"straggler reports are as the job was started: {error}")


class ResilienceCallback(SdkCallback):
    """Watches, saves, resumes and ends a fit; for `lightning.pytorch` and `pytorch_lightning`, on every rank.

    Each optimizer step is a heartbeat; `data fwd bwd comm_wait optim eval checkpoint` are sections.
    Checkpoints are saved by `trainer.save_checkpoint` into the run directory as a whole or not at all, and the newest
    one is resumed by the next `fit` of the same command. When the job is asked to leave, all ranks save behind the same
    step and raise `Preempted`, so that the process ends with 75. Both come behind all hooks of a batch, or of the epoch
    that it completes, so its place among the callbacks does not matter. What fails in it does not end the training.

    Args:
        run_dir: Where everything is written; without it the launcher's, the setting, or a new directory.
        save: Save checkpoints into the run directory, and resume from there. Without it that is left to Lightning,
            and a stop saves where `ModelCheckpoint` does.
        resume: Load the newest checkpoint of the run directory when the first fit of this process begins.
        stop_if_detected: True: all ranks save and leave with 76 when a straggler is sure, by the SDK's own verdict
            (from 3 to 5 % on, lasting ten seconds). A float above 0 and up to 1: when a report has a rank whose score
            as a whole against the fastest rank is below it (0.7: it takes 1 / 0.7 of that one's time), and at nothing
            else. False: at neither. None, the default: as the settings have it.
        settings: All options; without it those of the launcher and the environment.
        **overrides: Single options by field name, such as `checkpoint_every="10min"`.

    Raises:
        ConfigError: An option is wrong; at the fit: the trainer has two callbacks for the same.
        MissingExtraError: Neither of the two packages is installed.
        RunDirectoryError, CheckpointError: At the fit: the directory cannot be used, what is there not be resumed.

    Example:
        trainer = Trainer(callbacks=[ResilienceCallback("runs/a", checkpoint_every="10min")])
        trainer.fit(model)
    """

    duties = frozenset({roles.BEAT, roles.SECTIONS, roles.PREEMPTION, roles.CHECKPOINT, roles.FINISH, roles.NUMERICS})

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        save: bool = True,
        resume: bool = True,
        stop_if_detected: bool | float | None = None,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        overrides = stop_options(stop_if_detected, overrides) | overrides
        super().__init__(run_dir, settings=settings, overrides=overrides)
        self._live = {name: overrides[name] for name in CONTROLLED if name in overrides}
        self.stops_for_stragglers = bool(stop_if_detected)
        self._resumes = bool(resume)
        if not save:
            self.duties = self.duties - {roles.CHECKPOINT}

    def begins(self, fit: Fit) -> None:
        """Tell the monitor of the job what is asked for."""
        apply_options(fit.session, checked(self._live, type(self).__name__))

    def _session(self) -> Session | None:
        # What the monitor reads while it runs is not too late where the launcher has begun the session already.
        return self._options.begin(type(self).__name__, without=() if current() is None else self._live)

    @property
    def ckpt_path(self) -> str | None:
        """What the next fit resumes, for `fit(ckpt_path=callback.ckpt_path)`; None: it starts fresh.

        A fit resumes by itself too; give it the path where `weights_only=False` has to go with it, or where a version
        of Lightning does not let a callback load. Every rank reads every byte once. Raises CheckpointError.
        """
        session = self._session()
        if session is None or not session.may_resume:
            return None
        readable = session.settings.group_readable
        found = Checkpointer({}, run_dir=session.run_dir, group_readable=readable, journal=session.journal).find()
        self._has_told = found is not None
        return None if found is None else str(find_part(found.path))


def callbacks_from_environment() -> list[Any]:
    """Return what Lightning adds to every trainer: our callback if `RESILIENCE_AUTO=1`, else nothing."""
    if not environ.is_automatic(environ.environment()):
        return []
    callback = ResilienceCallback()
    callback.is_automatic = True
    return [callback]
