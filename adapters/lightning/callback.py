"""`ResilienceCallback`: everything that the SDK has, for one trainer."""

from __future__ import annotations

import os
from typing import Any

from resilience_sdk.adapters.lightning import roles
from resilience_sdk.adapters.lightning.base import SdkCallback
from resilience_sdk.adapters.lightning.fit import path_to_load
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.settings import Settings


class ResilienceCallback(SdkCallback):
    """Watches, saves, resumes and ends a fit; for `lightning.pytorch` and `pytorch_lightning`, on every rank.

    Each optimizer step is a heartbeat; `data fwd bwd comm_wait optim eval checkpoint` are sections.
    Checkpoints are saved by `trainer.save_checkpoint` into the run directory as a whole or not at all, and the newest
    one is resumed by the next `fit` of the same command. When the job is asked to leave, all ranks save behind the same
    step and raise `Preempted`, so that the process ends with 75. Put it behind callbacks whose state it is to save with
    the step that they have seen. What fails in it does not end the training.

    Args:
        run_dir: Where everything is written; without it the launcher's, the setting, or a new directory.
        save: Save checkpoints into the run directory, and resume from there. Without it that is left to Lightning,
            and a stop saves where `ModelCheckpoint` does.
        resume: Load the newest checkpoint of the run directory when the first fit of this process begins.
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

    duties = frozenset({roles.BEAT, roles.SECTIONS, roles.PREEMPTION, roles.CHECKPOINT, roles.FINISH})

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        save: bool = True,
        resume: bool = True,
        settings: Settings | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__(run_dir, settings=settings, overrides=overrides)
        self._resumes = bool(resume)
        if not save:
            self.duties = self.duties - {roles.CHECKPOINT}

    @property
    def ckpt_path(self) -> str | None:
        """What the next fit resumes, for `fit(ckpt_path=callback.ckpt_path)`; None: it starts fresh.

        A fit resumes by itself too; give it the path where `weights_only=False` has to go with it, or where a version
        of Lightning does not let a callback load. Every rank reads every byte once. Raises CheckpointError.
        """
        session = self._session()
        if session is None or not session.may_resume:
            return None
        settings = session.settings
        finder = Checkpointer(
            {}, run_dir=session.run_dir, group_readable=settings.group_readable, journal=session.journal
        )
        path = path_to_load(finder)
        self._has_told = path is not None
        return None if path is None else str(path)
