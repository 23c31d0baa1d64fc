"""How a save of a `Trainer` becomes one that is there as a whole or not at all, and that the run directory knows of."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from resilience_sdk.adapters._base import checkpointer
from resilience_sdk.adapters.transformers import again, marks, pointers
from resilience_sdk.adapters.transformers.rotation import rotate
from resilience_sdk.checkpoint.commit import remove_tree
from resilience_sdk.checkpoint.ranks import find_ranks, raise_together
from resilience_sdk.console import say
from resilience_sdk.errors import ResilienceError
from resilience_sdk.session import Session
from resilience_sdk.straggler import section


class Saves:
    """The saves of one training; of the thread that trains, on all ranks. `is_known`: to the run directory."""

    def __init__(self, trainer: Any, session: Session, *, is_known: bool) -> None:
        self._trainer = trainer
        self._plain: Callable[[], object] = _nothing
        self._count = 0
        self._checkpointer = checkpointer(session, self._write) if is_known else None

    @property
    def expected_save_s(self) -> float:
        """Seconds that a save takes, as the last one did; 0 before the first. Any thread."""
        return 0.0 if self._checkpointer is None else self._checkpointer.expected_save_s

    @property
    def last_step(self) -> int | None:
        """How many steps the newest complete checkpoint of this training has."""
        good = None if self._checkpointer is None else self._checkpointer.last_good
        return None if good is None else good.step

    def save(self, plain: Callable[[], object]) -> bool:
        """Let the trainer save, and mark what it wrote; tell whether all of it is there. Collective.

        A save that fails is said, and the training goes on. The trainer's own limit is applied after it.
        """
        self._plain = plain
        is_saved = self._save()
        if self._trainer.args.should_save:
            self._tidy(is_saved=is_saved)
        return is_saved

    def _tidy(self, *, is_saved: bool) -> None:
        directory = self._directory
        if is_saved:
            again.drop(directory)
            state, args = self._trainer.state, self._trainer.args
            with suppress(OSError):
                rotate(directory.parent, state.best_model_checkpoint, args.save_total_limit)
            return
        if marks.examine(directory).fault is not None:
            remove_tree(directory)  # the disk may be full
        with suppress(OSError):
            again.put_back(directory.parent)

    def _save(self) -> bool:
        if self._checkpointer is not None:
            self._count += 1
            self._checkpointer.values["saves"] = self._count  # a step may be saved twice, at the end of an epoch
            try:
                return self._checkpointer.save(self._step)
            except ResilienceError as error:  # on all ranks: another process writes in the run directory
                say(f"checkpoints are saved, but the run directory does not know of them: {error}")
                self._checkpointer = None
        try:
            with section("checkpoint", kind="io"):
                self._write(None)
        except Exception as error:  # noqa: BLE001 - the same on all ranks; a save that fails ends no training
            say(f"checkpoint at step {self._step} failed: {error}; training goes on")
            return False
        return True

    def _write(self, directory: Path | None) -> None:
        """Write on all ranks, then mark it; raises on all ranks what one raises."""
        ranks = find_ranks()
        is_keeper = self._trainer.args.should_save
        # One by one: no rank writes into a directory that is moved.
        raise_together(ranks, lambda: again.set_aside(self._directory) if is_keeper else None)
        # Apart: the trainer's save may be collective, so one rank that failed before it would leave the others there.
        raise_together(ranks, lambda: marks.begin(self._directory))
        raise_together(ranks, self._write_own)
        raise_together(ranks, lambda: self._seal(directory if ranks.rank == 0 else None, ranks.size))

    def _write_own(self) -> None:
        trainer = self._trainer
        limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        keeping = KeepsErrors(trainer.save_model)
        before = trainer.__dict__.get("save_model")
        trainer.save_model = keeping
        try:
            self._plain()
        finally:
            trainer.args.save_total_limit = limit
            if before is None:
                del trainer.save_model
            else:
                trainer.save_model = before
        if keeping.error is not None:
            raise keeping.error

    def _seal(self, directory: Path | None, ranks: int) -> None:
        if self._trainer.args.should_save:
            marks.seal(self._directory, self._step, ranks)
        if directory is not None:
            pointers.put(directory, self._directory)

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    @property
    def _directory(self) -> Path:
        return Path(self._trainer._get_output_dir(trial=None)) / f"checkpoint-{self._step}"


class KeepsErrors:
    """A `save_model` that keeps its error: only some ranks write there, and all may meet in a barrier after it."""

    def __init__(self, save: Callable[..., object]) -> None:
        self._save = save
        self.error: Exception | None = None

    def __call__(self, *args: Any, **options: Any) -> None:
        """Save, or keep why not."""
        try:
            self._save(*args, **options)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait
            self.error = error


def _nothing() -> None:
    """What is saved before anything is."""
