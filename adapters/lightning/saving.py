"""How a trainer saves into a checkpoint of ours: by its own `save_checkpoint`, on all ranks, never into a deadlock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilience_sdk.checkpoint.manifest import SHARDED
from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.console import say

FILE = "lightning.ckpt"


def part_name(strategy: Any) -> str | None:
    """Return what the strategy writes in a checkpoint, a file or a directory; None = nothing that we can keep."""
    if type(strategy).__name__.startswith("DeepSpeed"):
        return None  # nested directories, by rank
    if getattr(strategy, "_state_dict_type", None) == "sharded" or getattr(
        strategy, "_save_distributed_checkpoint", False
    ):
        return SHARDED
    return FILE


def find_part(directory: Path) -> Path:
    """Return what Lightning loads of a checkpoint: `fit(ckpt_path=...)`."""
    return directory / FILE if (directory / FILE).exists() else directory / SHARDED


class Writer:
    """Saves one trainer, for a `Checkpointer`."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer = trainer
        self._name = name

    def __call__(self, directory: Path) -> None:
        """Write into a directory; raises what the writing raised. Collective."""
        save(self._trainer, directory / self._name, is_file=self._name == FILE)


def save(trainer: Any, path: Path, *, is_file: bool) -> None:
    """Save; raises what the writing raised, but after the barrier in which the other ranks wait. Collective."""
    if not is_file:
        trainer.save_checkpoint(path, weights_only=False)
        return
    strategy = trainer.strategy
    before = strategy.checkpoint_io
    keeping = strategy.checkpoint_io = KeepsErrors(_innermost(before))
    try:
        trainer.save_checkpoint(path, weights_only=False)
    finally:
        strategy.checkpoint_io = before
    if keeping.error is not None:
        raise keeping.error


class KeepsErrors:
    """A `CheckpointIO` that keeps the error of a save: only rank 0 writes, and all ranks meet in a barrier after it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.error: Exception | None = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Save, or keep why not."""
        try:
            self._inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait
            self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _innermost(io: Any) -> Any:
    """Return what writes the file: a wrapper (asynchronous, mirroring) may not have written it when it returns."""
    while hasattr(io, "checkpoint_io"):
        io = io.checkpoint_io
    return io


class OwnLoader:
    """The position of this rank's data loader, for the ranks whose own Lightning does not save: all but rank 0.

    A part of a checkpoint that every rank writes for itself.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._resumed: list[Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loaders that have one."""
        loop = self._trainer.fit_loop.on_save_checkpoint()
        return {"loaders": loop["combined_loader"]} if loop.get("combined_loader") else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until Lightning asks for it."""
        self._resumed = list(state.get("loaders") or ()) or None

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Replace rank 0's position in what Lightning has loaded, where this rank has one of its own."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._resumed is not None and loop.get("combined_loader"):
            loop["combined_loader"] = self._resumed


class LastCheckpoint:
    """Saves where Lightning's own `ModelCheckpoint` would, as its last: `fit(ckpt_path="last")` finds it."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def save(self, step: int) -> bool:
        """Save; tell whether that worked. Collective."""
        trainer = self._trainer
        callback = trainer.checkpoint_callback
        directory = Path(getattr(callback, "dirpath", None) or trainer.default_root_dir)
        name = getattr(callback, "CHECKPOINT_NAME_LAST", "last") + getattr(callback, "FILE_EXTENSION", ".ckpt")
        try:
            save(trainer, directory / name, is_file=part_name(trainer.strategy) == FILE)
        except Exception as error:  # noqa: BLE001 - a save that fails must not hinder the stop
            say(f"{directory / name} could not be saved: {describe(error)}")
            return False
        if trainer.is_global_zero:
            say(f'saved after step {step}: {directory / name}; fit(ckpt_path="last") resumes it')
        return True
