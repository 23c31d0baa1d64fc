"""The script's own `save_state` and `load_state`: a directory is there as a whole or not at all.

Accelerate writes straight into the directory that will be loaded. Here it writes into another one beside it, which gets
the name when all ranks have written. Into a directory that exists, the files are moved one by one; as long as that
lasts a mark in it keeps it from being loaded.

Ranks wait for one another only where those of Accelerate do. Many scripts save on the main process alone, which is
right where nothing is sharded: who waited for the others there would wait for ever. So there each rank adds its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience_sdk.adapters.accelerate.numbered import in_order, number_of, to_remove
from resilience_sdk.adapters.accelerate.prepared import kind_of
from resilience_sdk.adapters.accelerate.states import States
from resilience_sdk.checkpoint.ranks import Alone, find_ranks, raise_together
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError
from resilience_sdk.straggler import section

UNFINISHED = ".resilience-unfinished"


class OwnSaves:
    """Stands in for the two methods of one accelerator, as attributes of the object; `restore()` ends that."""

    def __init__(self, accelerator: Any, states: States, load: Callable[..., None]) -> None:
        """`load(directory, ...)` loads, with the other arguments of `load_state`."""
        self._accelerator = accelerator
        self._states = states
        self._load = load
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state

    def restore(self) -> None:
        """Give the accelerator its own methods back. May be repeated."""
        for name in ("save_state", "load_state"):
            if vars(self._accelerator).get(name) == getattr(self, name):
                delattr(self._accelerator, name)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        """As `Accelerator.save_state`, but whole or not at all.

        Collective where Accelerate's own is, with numbered directories and FSDP: then it raises on all ranks what fails
        on one.
        """
        configuration = self._accelerator.project_configuration
        is_numbered = bool(configuration.automatic_checkpoint_naming)
        if output_dir is None and not is_numbered:
            raise CheckpointError("save_state(): name the directory, or set automatic_checkpoint_naming")
        target = (self._numbered() if is_numbered else Path(output_dir or "").expanduser()).absolute()
        ranks, own_name = (find_ranks(), "") if self._meets else (Alone(), f".{self._accelerator.process_index}")
        unfinished = _place_beside(target, is_numbered=is_numbered) / f".{target.name}{own_name}{UNFINISHED}"
        is_keeper = self._states.is_keeper

        def begin() -> None:
            if is_keeper and is_numbered and target.exists():
                raise CheckpointError(
                    f"save_state: {target} is there already; call accelerator.load_state() first to go on behind it, "
                    "or set accelerator.project_configuration.iteration"
                )
            if is_keeper or own_name:
                _begin(unfinished)

        def end() -> None:
            if is_keeper:
                _commit(unfinished, target)
            elif own_name:
                _add(unfinished, target)

        with section("checkpoint", kind="io"):
            raise_together(ranks, begin)
            raise_together(
                ranks, lambda: self._states.write(unfinished, safe_serialization=safe_serialization, **options)
            )
            raise_together(ranks, end)
        configuration.iteration += 1
        if is_keeper and is_numbered:
            _retire(target.parent, configuration.total_limit)
        return target

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """As `Accelerator.load_state`, but only what is whole; goes on counting the directories. Collective."""
        ranks = find_ranks()
        configuration = self._accelerator.project_configuration
        if input_dir is not None or not configuration.automatic_checkpoint_naming:
            source = Path(input_dir).expanduser() if input_dir is not None else None
        else:
            name = ranks.broadcast(newest(self._directory()) if ranks.rank == 0 else None)
            source = None if name is None else self._directory() / name
        if source is None or not source.is_dir():
            wanted = input_dir or self._directory()
            raise CheckpointError(f"load_state: {wanted} has no checkpoint to load; give load_state() its directory")
        if (source / UNFINISHED).exists():
            raise CheckpointError(f"load_state: {source} is half written, since a save was killed: load an older one")
        self._load(source, *args, **options)
        if (number := number_of(source.name)) is not None:
            configuration.iteration = number + 1

    def _directory(self) -> Path:
        return Path(self._accelerator.project_dir or ".", "checkpoints")

    def _numbered(self) -> Path:
        return self._directory() / f"checkpoint_{self._accelerator.save_iteration}"

    @property
    def _meets(self) -> bool:
        """Whether all ranks save together, as Accelerate itself needs them to."""
        accelerator = self._accelerator
        is_numbered = bool(accelerator.project_configuration.automatic_checkpoint_naming)
        return is_numbered or accelerator.num_processes == 1 or kind_of(accelerator) == "FSDP"


def newest(directory: Path) -> str | None:
    """Return the name of the newest numbered checkpoint that is whole, and say which newer ones are not."""
    for name in reversed(in_order(os.listdir(directory) if directory.is_dir() else ())):
        if not (directory / name / UNFINISHED).exists():
            return name
        say(f"{directory / name} is half written, and is passed over")
    return None


def _place_beside(target: Path, *, is_numbered: bool) -> Path:
    """Return where to write what becomes `target`: on the same file system, where this process may write."""
    parent = target.parent
    if is_numbered:
        return parent.parent  # not among the numbered ones: Accelerate alone would take it for one
    is_apart = os.path.ismount(target) or (parent.is_dir() and not os.access(parent, os.W_OK))
    return target if is_apart else parent


def _begin(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was killed
    unfinished.mkdir(parents=True)


def _commit(unfinished: Path, target: Path) -> None:
    _sync_all(unfinished)
    if not target.exists() and _takes_name(unfinished, target):
        return
    mark = target / UNFINISHED
    mark.touch()
    _sync(target)
    _move_into(unfinished, target)
    mark.unlink()


def _add(unfinished: Path, target: Path) -> None:
    """Add what this rank alone has written. Before the main process has, that is not whole, and marked so."""
    mark = unfinished / UNFINISHED
    mark.touch()
    _sync_all(unfinished)
    if not _takes_name(unfinished, target):
        mark.unlink()
        _move_into(unfinished, target)


def _takes_name(unfinished: Path, target: Path) -> bool:
    """Make a directory the target in one step, unless that is there, or becomes so meanwhile; tell whether it is."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        return False
    _sync(target.parent)
    return True


def _move_into(unfinished: Path, target: Path) -> None:
    for path in unfinished.iterdir():
        place = target / path.name
        if place.is_dir():
            shutil.rmtree(place)
        path.rename(place)
    _sync(target)
    unfinished.rmdir()


def _sync_all(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _retire(directory: Path, limit: int | None) -> None:
    """Remove what is too much, now that a newer one is whole."""
    for name in to_remove(os.listdir(directory), limit):
        shutil.rmtree(directory / name, ignore_errors=True)
