"""The state of a training in a directory: what Accelerate writes, and beside it a file of ours.

Ours is not registered with `register_for_checkpointing`: Accelerate refuses to load a directory with another number of
such objects, so a run that was begun without us could not be resumed with us, nor the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resilience_sdk.errors import CheckpointError

FILE = "resilience.json"
_VERSION = 1


class States:
    """Writes and reads the state of one accelerator, by its own methods as they were before we came."""

    def __init__(self, accelerator: Any, describe: Callable[[], Mapping[str, Any]]) -> None:
        """`describe()` returns what our file holds, a JSON value."""
        self._accelerator = accelerator
        self._describe = describe
        self._save = accelerator.save_state
        self._load = accelerator.load_state

    @property
    def is_keeper(self) -> bool:
        """Whether this rank makes and names the directories: one of all ranks, or one of each node that saves."""
        on_each_node = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if on_each_node else self._accelerator.is_main_process)

    def write(self, directory: Path, **options: Any) -> None:
        """Write into a directory that is there; on all ranks, collective where the model is sharded."""
        with self._own_names():
            self._save(output_dir=str(directory), **options)
        if self.is_keeper:
            (directory / FILE).write_text(json.dumps({"v": _VERSION, **self._describe()}))

    def load(self, directory: Path, *args: Any, **options: Any) -> None:
        """Load from a directory whose file of ours was read: what cannot be must not be half loaded. As `write`."""
        with self._own_names():
            self._load(str(directory), *args, **options)

    @contextmanager
    def _own_names(self) -> Iterator[None]:
        """Let a directory be named by us where Accelerate numbers them, and leave its count as it is."""
        configuration = self._accelerator.project_configuration
        naming, iteration = configuration.automatic_checkpoint_naming, configuration.iteration
        configuration.automatic_checkpoint_naming = False
        try:
            yield
        finally:
            configuration.automatic_checkpoint_naming, configuration.iteration = naming, iteration


def read_file(directory: Path) -> Mapping[str, Any] | None:
    """Return what our file in a directory tells, None if there is none; raises CheckpointError."""
    try:
        text = (directory / FILE).read_text()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{directory / FILE} cannot be read: {error.strerror}") from error
    try:
        saved = json.loads(text)
        is_ours = isinstance(saved, dict) and saved.get("v") == _VERSION and isinstance(saved.get("step"), int)
    except ValueError:
        is_ours = False
    if not is_ours:
        raise CheckpointError(f"{directory / FILE} is damaged, or of a newer version: remove it to load without it")
    found: Mapping[str, Any] = saved
    return found
