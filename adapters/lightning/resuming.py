"""The resume of a fit: which checkpoint, and how Lightning comes to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilience_sdk.adapters.lightning.saving import OwnLoader, find_part
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError


class Resume:
    """The resume of one fit; of the thread that trains, on all ranks."""

    def __init__(self, trainer: Any, checkpointer: Checkpointer, own_loader: OwnLoader) -> None:
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._own_loader = own_loader
        self._path: Path | None = None

    def choose(self) -> None:
        """Agree on the newest valid checkpoint. Collective; raises CheckpointError."""
        if self._checkpointer.resume():
            good = self._checkpointer.last_good
            self._path = None if good is None else find_part(good.path)

    def load(self, *, asked: bool) -> None:
        """Let Lightning load it. `asked`: the user has our path, and gives it to `fit` as `ckpt_path`.

        Before Lightning restores the model: at the setup, or when the strategy is set up, as that one needs it. A
        `ckpt_path` that the user gives is loaded after this, and so has precedence.
        """
        if self._path is None or asked:
            return
        connector = getattr(self._trainer, "_checkpoint_connector", None)
        start = getattr(connector, "resume_start", None)
        if start is None:
            raise CheckpointError(
                f"{self._path} is to be resumed, and this version of Lightning does not let a callback do it: "
                "call trainer.fit(model, ckpt_path=callback.ckpt_path)"
            )
        start(str(self._path))

    def loaded(self, checkpoint: dict[str, Any]) -> None:
        """Take note of what Lightning loads, and put this rank's own position of the data into it."""
        other = getattr(self._trainer, "ckpt_path", None)
        if self._path is None or (other and Path(other).absolute() != self._path.absolute()):
            if self._path is not None and self._trainer.is_global_zero:
                say(f"fit(ckpt_path={str(other)!r}) is resumed, not {self._path}")
            self._path = None
            return
        self._own_loader.put_into(checkpoint)

    def restore_random_numbers(self) -> None:
        """Set the generators as they were at the save: before the first batch, after all that Lightning sets up."""
        if self._path is not None:
            self._checkpointer.restore_rng()
