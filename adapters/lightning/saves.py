"""The checkpoints of one fit: saved and loaded by the trainer's own means, on all ranks, never into a deadlock."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from resilience_sdk import straggler
from resilience_sdk.adapters._base import Patches, checkpointer, errors_kept, numbered, say_not_copied
from resilience_sdk.adapters.lightning.loops import Loops
from resilience_sdk.checkpoint.manifest import MANIFEST_NAME, SHARDED
from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.core.console import say
from resilience_sdk.errors import CheckpointError
from resilience_sdk.rank import Session

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


def save(trainer: Any, path: Path) -> None:
    """Save; raises what the writing raised, but after the barrier in which the other ranks wait. Collective."""
    strategy = trainer.strategy
    if part_name(strategy) != FILE:
        trainer.save_checkpoint(path, weights_only=False)
        return
    with _innermost_io(strategy) as writes, errors_kept(writes, "save_checkpoint"):
        trainer.save_checkpoint(path, weights_only=False)


@contextmanager
def _innermost_io(strategy: Any) -> Iterator[Any]:
    """Let what really writes checkpoints be the strategy's; a wrapper (asynchronous, mirroring) may do so later."""
    plain = innermost = strategy.checkpoint_io
    while hasattr(innermost, "checkpoint_io"):
        innermost = innermost.checkpoint_io
    strategy.checkpoint_io = innermost
    try:
        yield innermost
    finally:
        strategy.checkpoint_io = plain


class CheckpointStaging:
    """Takes what a trainer would save between its `dump_checkpoint` and its `CheckpointIO`; a `Stager`.

    For checkpoints that are one file. Keeps its copies' memory from one save to the next.
    """

    def __init__(self, trainer: Any) -> None:
        from resilience_sdk.checkpoint.capture import Staging

        self._trainer = trainer
        self._staging = Staging()

    def __call__(self, directory: Path) -> Callable[[], object]:
        """Take it; on all ranks, where Lightning calls collectives. Raises what Lightning or a copy raises."""
        given: list[tuple[Any, ...]] = []
        patches = Patches()
        with _innermost_io(self._trainer.strategy) as writes:
            plain = writes.save_checkpoint
            patches.replace(writes, "save_checkpoint", lambda *arguments, **_: given.append(arguments))
            try:
                self._trainer.save_checkpoint(directory / FILE, weights_only=False)
            finally:
                patches.detach()
        if not given:
            return lambda: None  # another rank writes
        [(checkpoint, path, *_)] = given
        try:
            copied = self._staging.copy_all(checkpoint)
        except Exception as error:  # noqa: BLE001 - what callbacks and hyperparameters hold may be anything
            say_not_copied(error)
            plain(checkpoint, path)
            return lambda: None
        return lambda: plain(copied, path)


def save_last(trainer: Any, step: int) -> None:
    """Save where Lightning's own `ModelCheckpoint` would, as its last: `fit(ckpt_path="last")` finds it. Collective."""
    callback = trainer.checkpoint_callback
    directory = Path(getattr(callback, "dirpath", None) or trainer.default_root_dir)
    name = getattr(callback, "CHECKPOINT_NAME_LAST", "last") + getattr(callback, "FILE_EXTENSION", ".ckpt")
    try:
        save(trainer, directory / name)
    except Exception as error:  # noqa: BLE001 - a save that fails must not hinder the stop
        say(f"{directory / name} could not be saved: {describe(error)}")
        return
    if trainer.is_global_zero:
        say(f'saved after step {step}: {directory / name}; fit(ckpt_path="last") resumes it')


def written_since(directory: str | os.PathLike[str], known: Collection[str], since_s: float) -> list[str]:
    """Return what was written into a directory since then, of which a callback that is resumed does not know."""
    found = []
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            path = os.path.join(directory, entry.name)
            if path not in known and entry.stat().st_mtime > since_s:
                found.append(path)
    return sorted(found)


class LostFiles(Patches):
    """The files of `ModelCheckpoint` from the part of a training that is lost and repeated.

    They are written over when their step is made again. Lightning would keep them beside new ones, named `-v1`.
    """

    def __init__(self, trainer: Any, since_s: float) -> None:
        """Find them. Collective: rank 0 looks."""
        super().__init__()
        for callback in trainer.checkpoint_callbacks:
            plain = getattr(callback, "file_exists", None)
            if plain is None or not getattr(callback, "dirpath", None):
                continue
            known = {str(path) for path in getattr(callback, "best_k_models", ())}
            known |= {str(getattr(callback, name, "")) for name in ("best_model_path", "last_model_path")}
            is_first = trainer.is_global_zero
            found = written_since(callback.dirpath, known, since_s) if is_first else []
            lost = set(trainer.strategy.broadcast(found))
            if lost:
                self.replace(callback, "file_exists", _without(plain, lost))


def _without(exists: Callable[..., bool], lost: set[str]) -> Callable[..., bool]:
    def file_exists(filepath: Any, trainer: Any) -> bool:
        is_there = exists(filepath, trainer)  # collective
        if is_there and str(filepath) in lost:
            lost.discard(str(filepath))  # it is written now
            return False
        return is_there

    return file_exists


MARK = "resilience_sdk"
"""Under which a checkpoint of Lightning says where in the loops it was made."""
_OF_TUNERS = (".lr_find_", ".scale_batch_size_")
"""How the files begin that Lightning's tuners save before they try something out, and load behind it."""


class FitCheckpoints:
    """The checkpoints of one fit in the run directory; of the thread that trains, on all ranks.

    A part of each is every rank's own: its place in the data and its metrics, for Lightning saves rank 0's alone.
    """

    def __init__(self, trainer: Any, session: Session, name: str, loops: Loops | None) -> None:
        self._trainer = trainer
        self._name = name
        self._loops = loops
        self._resumed: Path | None = None
        self._own: dict[str, Any] = {}
        self.checkpointer = checkpointer(session, self._write, CheckpointStaging(trainer) if name == FILE else None)
        self.checkpointer.add_data("lightning.loader", self)
        self.checkpointer.also_held(self._holders)

    def _holders(self) -> dict[str, Any]:
        """Return what may hold generators of its own, by names that are the same in each attempt."""
        trainer = self._trainer
        found = {"module": getattr(trainer, "lightning_module", None), "data": getattr(trainer, "datamodule", None)}
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        return found | numbered(optimizer=trainer.optimizers, scheduler=schedulers, callback=trainer.callbacks)

    def _write(self, directory: Path) -> None:
        save(self._trainer, directory / self._name)

    def state_dict(self) -> dict[str, Any]:
        """Return what is this rank's own."""
        own = {} if self._loops is None else {"place": self._loops.capture()}
        loop = self._trainer.fit_loop.on_save_checkpoint()
        return own | ({"loaders": loop["combined_loader"]} if loop.get("combined_loader") else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep what was saved, until Lightning asks for it."""
        self._own = dict(state)

    def choose(self) -> None:
        """Agree on the newest valid checkpoint. Collective; raises CheckpointError."""
        if self.checkpointer.resume():
            good = self.checkpointer.last_good
            self._resumed = None if good is None else find_part(good.path)

    def load(self, *, asked: bool) -> None:
        """Let Lightning load it. `asked`: the user has our path, and gives it to `fit` as `ckpt_path`.

        Before Lightning restores the model: at the setup, or when the strategy is set up, as that one needs it. A
        `ckpt_path` that the user gives is loaded after this, and so has precedence.
        """
        if self._resumed is None or asked:
            return
        connector = getattr(self._trainer, "_checkpoint_connector", None)
        start = getattr(connector, "resume_start", None)
        if start is None:
            raise CheckpointError(
                f"{self._resumed} is to be resumed, and this version of Lightning does not let a callback do it: "
                "call trainer.fit(model, ckpt_path=callback.ckpt_path)"
            )
        with straggler.section("resume", kind="io"):
            start(str(self._resumed))

    def loaded(self, checkpoint: dict[str, Any]) -> None:
        """Put this rank's own part in the place of rank 0's in what Lightning has loaded."""
        if self._resumed is None:
            return
        other = getattr(self._trainer, "ckpt_path", None)
        if other and Path(other).name.startswith(_OF_TUNERS):
            return  # which give back by it what they have tried out
        if other and Path(other).absolute() != self._resumed.absolute():
            if self._trainer.is_global_zero:
                say(f"fit(ckpt_path={str(other)!r}) is resumed, not {self._resumed}")
            self._resumed = None
            return
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if self._own.get("loaders") and loop.get("combined_loader"):
            loop["combined_loader"] = self._own["loaders"]
        if self._loops is not None:
            # Of another number of ranks there is the mark alone.
            self._loops.resume(checkpoint, self._own.get("place") or checkpoint.get(MARK))

    @property
    def is_resumed(self) -> bool:
        """Whether the fit goes on from one of them."""
        return self._resumed is not None

    def find_lost_files(self) -> LostFiles | None:
        """Return what lets callbacks write over what they wrote after the resumed checkpoint. Collective."""
        good = self.checkpointer.last_good
        if self._resumed is None or good is None:
            return None
        try:
            since_s = os.stat(good.path / MANIFEST_NAME).st_mtime
        except OSError:
            since_s = float("inf")
        return LostFiles(self._trainer, since_s)

    def restore_random_numbers(self) -> None:
        """Set the generators as they were at the save."""
        if self._resumed is not None:
            self.checkpointer.restore_rng()
