"""The script's own `save_state` and `load_state`: a directory is there as a whole or not at all.

Accelerate writes straight into the directory that will be loaded. Here it writes into another one beside it, which gets
the name when all ranks have written. Into a directory that exists, the files are moved one by one; as long as that
lasts a mark in it keeps it from being loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilience_sdk.adapters.accelerate.numbered import in_order, number_of, to_remove
from resilience_sdk.adapters.accelerate.states import States
from resilience_sdk.checkpoint.ranks import find_ranks, raise_together
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
        """As `Accelerator.save_state`, but whole or not at all. Collective; raises on all ranks what fails on one."""
        ranks = find_ranks()
        configuration = self._accelerator.project_configuration
        target = self._numbered() if configuration.automatic_checkpoint_naming else Path(output_dir or ".").expanduser()
        target = target.absolute()
        # Not among the numbered ones: Accelerate alone would take it for one.
        beside = target.parent.parent if configuration.automatic_checkpoint_naming else target.parent
        unfinished = beside / f".{target.name}{UNFINISHED}"
        is_keeper = self._states.is_keeper
        with section("checkpoint", kind="io"):
            raise_together(ranks, lambda: _begin(unfinished) if is_keeper else None)
            raise_together(
                ranks, lambda: self._states.write(unfinished, safe_serialization=safe_serialization, **options)
            )
            raise_together(ranks, lambda: _commit(unfinished, target) if is_keeper else None)
        configuration.iteration += 1
        if is_keeper and configuration.automatic_checkpoint_naming:
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
        target = self._directory() / f"checkpoint_{self._accelerator.save_iteration}"
        if target.exists():
            raise CheckpointError(
                f"save_state: {target} is there already; call accelerator.load_state() first to go on behind it, or "
                "set accelerator.project_configuration.iteration"
            )
        return target


def newest(directory: Path) -> str | None:
    """Return the name of the newest numbered checkpoint that is whole, and say which newer ones are not."""
    for name in reversed(in_order(os.listdir(directory) if directory.is_dir() else ())):
        if not (directory / name / UNFINISHED).exists():
            return name
        say(f"{directory / name} is half written, and is passed over")
    return None


def _begin(unfinished: Path) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was killed
    unfinished.mkdir(parents=True)


def _commit(unfinished: Path, target: Path) -> None:
    for path in unfinished.rglob("*"):
        _sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        unfinished.rename(target)
        _sync(target.parent)
        return
    mark = target / UNFINISHED
    mark.touch()
    _sync(target)
    for path in unfinished.iterdir():
        place = target / path.name
        if place.is_dir():
            shutil.rmtree(place)
        path.rename(place)
    _sync(target)
    mark.unlink()
    unfinished.rmdir()


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
