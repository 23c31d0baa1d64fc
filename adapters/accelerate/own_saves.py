"""The script's own `save_state` and `load_state`: a directory is there as a whole or not at all.

Accelerate writes straight into the directory that will be loaded. Here it writes into another one beside it, which gets
the name when all ranks have written.

Ranks wait for one another only where those of Accelerate do: in a save with numbered directories, and with FSDP. Many
scripts save on the main process alone, which is right where nothing is sharded: who waited for the others there would
wait for ever. So there each rank adds its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.adapters.accelerate import whole
from resilience_sdk.adapters.accelerate.numbered import in_order, number_of, to_remove
from resilience_sdk.adapters.accelerate.prepared import kind_of
from resilience_sdk.adapters.accelerate.stand_in import StandIn
from resilience_sdk.adapters.accelerate.states import States, read_file
from resilience_sdk.checkpoint.ranks import Alone, find_ranks, raise_together
from resilience_sdk.console import say
from resilience_sdk.errors import CheckpointError
from resilience_sdk.straggler import section


class OwnSaves:
    """Stands in for the two methods of one accelerator, as attributes of the object; `restore()` ends that."""

    def __init__(self, accelerator: Any, states: States, load: Callable[..., None]) -> None:
        """`load(directory, saved, ...)` loads, where our file tells `saved`, with what else `load_state` was given."""
        self._accelerator = accelerator
        self._states = states
        self._load = load
        self.restore = StandIn(accelerator, save_state=self.save_state, load_state=self.load_state).restore
        """Gives the accelerator its own methods back. May be repeated."""

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        """As `Accelerator.save_state`, but whole or not at all.

        Collective where Accelerate's own is, with numbered directories and FSDP: then it raises on all ranks what fails
        on one.
        """
        configuration = self._accelerator.project_configuration
        is_numbered = bool(configuration.automatic_checkpoint_naming)
        if output_dir is None and not is_numbered:
            raise CheckpointError("save_state(): name the directory, or set automatic_checkpoint_naming")
        meets = is_numbered or self._is_spread
        ranks, own_name = (find_ranks(), "") if meets else (Alone(), f".{self._accelerator.process_index}")
        if is_numbered:
            configuration.iteration = ranks.broadcast(configuration.iteration)  # a rank may have loaded alone
        target = (self._numbered() if is_numbered else Path(output_dir or "").expanduser()).absolute()
        unfinished = whole.place_beside(target, is_numbered=is_numbered) / f".{target.name}{own_name}{whole.UNFINISHED}"
        is_keeper = self._states.is_keeper

        def begin() -> None:
            if is_keeper and is_numbered and target.exists():
                raise CheckpointError(
                    f"save_state: {target} is there already; call accelerator.load_state() first to go on behind it, "
                    "or set accelerator.project_configuration.iteration"
                )
            if is_keeper or own_name:
                whole.begin(unfinished)

        def end() -> None:
            if is_keeper:
                whole.commit(unfinished, target)
            elif own_name:
                whole.add(unfinished, target)

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
        """As `Accelerator.load_state`, but only what is whole; goes on counting the directories.

        Collective with FSDP alone, as Accelerate's own is. Elsewhere one rank may load what it evaluates, but only when
        the training has ended: its count of steps, by which all ranks agree on saves, is another one from there on.
        """
        ranks = find_ranks() if self._is_spread else Alone()
        configuration = self._accelerator.project_configuration
        source = None if input_dir is None else Path(input_dir).expanduser()
        if source is None and configuration.automatic_checkpoint_naming:
            directory = self._directory()
            name = ranks.broadcast(raise_together(ranks, lambda: newest(directory) if ranks.rank == 0 else None))
            source = None if name is None else directory / name

        def examine() -> tuple[Path, Mapping[str, Any] | None]:
            if source is None or not source.is_dir():
                wanted = source or self._directory()
                raise CheckpointError(
                    f"load_state: {wanted} has no checkpoint to load; give load_state() its directory"
                )
            if (source / whole.UNFINISHED).exists():
                raise CheckpointError(
                    f"load_state: {source} is half written, since a save was killed: load an older one"
                )
            return source, read_file(source)

        place, saved = raise_together(ranks, examine)  # what is loaded may be sharded: all begin, or none
        self._load(place, saved, *args, **options)
        if (number := number_of(place.name)) is not None:
            configuration.iteration = number + 1

    def _directory(self) -> Path:
        return Path(self._accelerator.project_dir or ".", "checkpoints")

    def _numbered(self) -> Path:
        return self._directory() / f"checkpoint_{self._accelerator.save_iteration}"

    @property
    def _is_spread(self) -> bool:
        """Whether Accelerate needs all ranks to save and to load, where there are several."""
        return bool(self._accelerator.num_processes == 1) or kind_of(self._accelerator) == "FSDP"


def newest(directory: Path) -> str | None:
    """Return the name of the newest numbered checkpoint that is whole, and say which newer ones are not."""
    for name in reversed(in_order(os.listdir(directory) if directory.is_dir() else ())):
        if not (directory / name / whole.UNFINISHED).exists():
            return name
        say(f"{directory / name} is half written, and is passed over")
    return None


def _retire(directory: Path, limit: int | None) -> None:
    """Remove what is too much, now that a newer one is whole."""
    for name in to_remove(os.listdir(directory), limit):
        shutil.rmtree(directory / name, ignore_errors=True)
