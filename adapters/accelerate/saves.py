"""The state of a training with Accelerate on disk, in directories of Accelerate's.

A directory is there as a whole or not at all, whether the script saves or we do.

Ours is not registered with `register_for_checkpointing`: Accelerate refuses to load a directory with another number of
such objects, so a run that was begun without us could not be resumed with us, nor the other way round.

Accelerate writes straight into the directory that will be loaded. Here it writes into another one beside it, which gets
the name when all ranks have written (`checkpoint.whole_directory`).

Ranks wait for one another only where those of Accelerate do: in a save with numbered directories, and with FSDP. Many
scripts save on the main process alone, which is right where nothing is sharded: who waited for the others there would
wait for ever. So there each rank adds its own.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience_sdk.adapters._base import Patches, framework, say_not_copied
from resilience_sdk.checkpoint.manifest import InvalidCheckpointError
from resilience_sdk.checkpoint.ranks import Alone, find_ranks, raise_together
from resilience_sdk.checkpoint.whole_directory import UNFINISHED, merge
from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.environ import environment
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.errors import CheckpointError
from resilience_sdk.straggler import section

if TYPE_CHECKING:
    from resilience_sdk.adapters.accelerate.attached import Attached
    from resilience_sdk.checkpoint.capture import Staging

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def number_of(name: str) -> int | None:
    """Return the number in the name of a directory, None if it is no such name."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else int(match[1])


def in_order(names: Iterable[str]) -> list[str]:
    """Return those of the names that are numbered, the oldest first."""
    found = [(number, name) for name in names if (number := number_of(name)) is not None]
    return [name for _, name in sorted(found)]


def to_remove(names: Iterable[str], limit: int | None) -> list[str]:
    """Return which to remove so that `limit` stay, one at the least; None = all stay."""
    return [] if limit is None else in_order(names)[: -max(limit, 1)]


FILE = "resilience.json"
_VERSION = 1


def read_file(directory: Path) -> Mapping[str, Any] | None:
    """Return what our file in a directory tells, None if there is none; raises CheckpointError."""
    try:
        text = read_text(directory / FILE)
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


class StateSaves:
    """The state of one accelerator, written and read by its own methods as they were before we came.

    `save_state` and `load_state` are what the script calls meanwhile.
    """

    def __init__(self, accelerator: Any, handle: Attached) -> None:
        self._accelerator = accelerator
        self._handle = handle
        self._save = accelerator.save_state
        self._load = accelerator.load_state
        self._stagings: dict[int, Staging] = {}

    @property
    def is_keeper(self) -> bool:
        """Whether this rank makes and names the directories: one of all ranks, or one of each node that saves."""
        on_each_node = self._accelerator.project_configuration.save_on_each_node
        return bool(self._accelerator.is_local_main_process if on_each_node else self._accelerator.is_main_process)

    def write(self, directory: Path, **options: Any) -> None:
        """Write into a directory that is there; on all ranks, collective where the model is sharded."""
        with self._own_names():
            self._save(output_dir=str(directory), **options)
        write_registered(self._accelerator, directory)
        if self.is_keeper:
            write_whole(directory / FILE, json.dumps({"v": _VERSION, **self._handle.describe()}))
        if own := self._handle.describe_own():
            write_whole(directory / self._own_file, json.dumps({"v": _VERSION, **own}))

    @property
    def _own_file(self) -> str:
        return _file_of(int(self._accelerator.process_index))

    def has_all_of_node(self, directory: Path) -> bool:
        """Tell whether each rank of this node has kept something there."""
        me = self._accelerator
        first = int(me.process_index) - int(me.local_process_index)
        rest = int(me.num_processes) - first
        told = environment().get("LOCAL_WORLD_SIZE", "")
        count = min(int(told), rest) if told.isdigit() else rest
        return all((directory / _file_of(first + number)).exists() for number in range(count))

    def read_own(self, directory: Path, rank: int | None = None) -> Mapping[str, Any] | None:
        """Return what a rank alone, this one, has kept there; None where it has nothing, or nothing of this version."""
        try:
            saved = json.loads(read_text(directory / (self._own_file if rank is None else _file_of(rank))))
        except (OSError, ValueError):
            return None
        return saved if isinstance(saved, dict) and saved.get("v") == _VERSION else None

    def stage(self, directory: Path) -> Callable[[], object]:
        """Take what `write` would write, and return what writes it, for a thread; raises what taking raises.

        Accelerate gives each state to one function that writes it: that is heard, and called later with a copy. What
        comes another way (random numbers, scaler, samplers, all of a sharded model) is written at once.
        """
        serializers, given = framework("accelerate.checkpointing", "accelerate"), list[Callable[[], object]]()
        plain, is_keeper = serializers.save, self.is_keeper

        def keep(state: Any, file: Any, *args: Any, **options: Any) -> None:
            if not isinstance(state, Mapping):
                plain(state, file, *args, **options)
            elif is_keeper:  # Accelerate writes it on no other rank
                try:
                    copied = self._staging_of(len(given)).copy_all(state)
                except Exception as error:  # noqa: BLE001 - what the script has registered may be anything
                    say_not_copied(error)
                    plain(state, file, *args, **options)
                else:
                    given.append(lambda: plain(copied, file, *args, **options))

        patches = Patches()
        patches.replace(serializers, "save", keep)
        try:
            self.write(directory)
        finally:
            patches.detach()
        return lambda: [write() for write in given]

    def _staging_of(self, number: int) -> Staging:
        from resilience_sdk.checkpoint.capture import Staging

        return self._stagings.setdefault(number, Staging())

    def load(self, directory: Path, *args: Any, **options: Any) -> None:
        """Load from a directory whose file of ours was read: what cannot be must not be half loaded. As `write`."""
        with self._own_names():
            self._load(str(directory), *args, **options)
        load_registered(self._accelerator, directory)

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

    # -- what the script calls

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> Path:
        """As `Accelerator.save_state`, but whole or not at all.

        Collective where Accelerate's own is, with numbered directories and FSDP: then it raises on all ranks what fails
        on one.
        """
        configuration = self._accelerator.project_configuration
        is_numbered = bool(configuration.automatic_checkpoint_naming)
        if output_dir is None and not is_numbered:
            raise CheckpointError("save_state(): name the directory, or set automatic_checkpoint_naming")
        meets, is_keeper = is_numbered or self._is_spread, self.is_keeper
        ranks = find_ranks() if meets else Alone()
        target = Path(output_dir or "").expanduser().absolute()
        if is_numbered:
            configuration.iteration = ranks.broadcast(configuration.iteration)  # a rank may have loaded alone
            target = (self._directory / f"checkpoint_{self._accelerator.save_iteration}").absolute()
        own_name = "" if meets else f".{self._accelerator.process_index}"
        unfinished = place_beside(target, is_numbered=is_numbered) / f".{target.name}{own_name}{UNFINISHED}"

        def begin() -> None:
            if is_keeper and is_numbered and target.exists():
                raise CheckpointError(
                    f"save_state: {target} is there already; call accelerator.load_state() first to go on behind it, "
                    "or set accelerator.project_configuration.iteration"
                )
            if is_keeper or not meets:
                shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was killed
                unfinished.mkdir(parents=True)

        def end() -> None:
            if is_keeper or not meets:
                merge(unfinished, target, is_last=is_keeper)

        with section("checkpoint", kind="io"):
            raise_together(ranks, begin)
            raise_together(ranks, lambda: self.write(unfinished, safe_serialization=safe_serialization, **options))
            raise_together(ranks, end)
        configuration.iteration += 1
        if is_keeper and is_numbered:
            for name in to_remove(os.listdir(target.parent), configuration.total_limit):
                shutil.rmtree(target.parent / name, ignore_errors=True)
        return target

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> None:
        """As `Accelerator.load_state`, but only what is whole; goes on counting the directories.

        Collective with FSDP alone, as Accelerate's own is. Elsewhere one rank may load what it evaluates, but only when
        the training has ended: its count of steps, by which all ranks agree on saves, is another one from there on.
        """
        ranks = find_ranks() if self._is_spread else Alone()
        configuration, directory = self._accelerator.project_configuration, self._directory
        source = None if input_dir is None else Path(input_dir).expanduser()
        if source is None and configuration.automatic_checkpoint_naming:
            name = ranks.broadcast(raise_together(ranks, lambda: newest(directory) if ranks.rank == 0 else None))
            source = None if name is None else directory / name

        def examine() -> tuple[Path, Mapping[str, Any] | None]:
            if source is None or not source.is_dir():
                raise CheckpointError(
                    f"load_state: {source or directory} has no checkpoint to load; give load_state() its directory"
                )
            if (source / UNFINISHED).exists():
                raise CheckpointError(
                    f"load_state: {source} is half written, since a save was killed: load an older one"
                )
            return source, read_file(source)

        place, saved = raise_together(ranks, examine)  # what is loaded may be sharded: all begin, or none
        self._handle.load(place, saved, *args, **options)
        if (number := number_of(place.name)) is not None:
            configuration.iteration = number + 1

    @property
    def _directory(self) -> Path:
        return Path(self._accelerator.project_dir or ".", "checkpoints")

    @property
    def _is_spread(self) -> bool:
        """Whether Accelerate needs all ranks to save and to load, where there are several."""
        return bool(self._accelerator.num_processes == 1) or kind_of(self._accelerator) == "FSDP"

    # -- the last save before a stop

    def save(self, step: int) -> bool:
        """Save where Accelerate numbers the directories; tell whether that worked. Collective."""
        try:
            place = self.save_state()
        except Exception as error:  # noqa: BLE001 - a save that fails must not hinder the stop
            say_once("last save", f"the state after step {step} could not be saved: {error}")
            return False
        say_once("last save", f"saved after step {step}: {place}; accelerator.load_state() resumes it")
        return True


def _file_of(rank: int) -> str:
    return f"resilience-rank-{rank}.json"


def kind_of(accelerator: Any) -> str:
    """Return the name of the accelerator's distributed type, such as `MULTI_GPU`."""
    kind = accelerator.distributed_type
    return str(getattr(kind, "value", kind))


def place_beside(target: Path, *, is_numbered: bool) -> Path:
    """Return where to write what becomes `target`: on the same file system, where this process may write."""
    parent = target.parent
    if is_numbered:
        # Not among the numbered ones, where it can be helped: Accelerate alone would take it for one.
        return parent if _is_elsewhere(parent) else parent.parent
    is_apart = os.path.ismount(target) or (parent.is_dir() and not os.access(parent, os.W_OK))
    return target if is_apart else parent


def _is_elsewhere(directory: Path) -> bool:
    """Tell whether a directory is on another file system than its parent, or only that one cannot be written to."""
    if not directory.is_dir():
        return False
    above = directory.parent
    return directory.stat().st_dev != above.stat().st_dev or not os.access(above, os.W_OK)


def newest(directory: Path) -> str | None:
    """Return the name of the newest numbered checkpoint that is whole, and say which newer ones are not."""
    for name in reversed(in_order(os.listdir(directory) if directory.is_dir() else ())):
        if not (directory / name / UNFINISHED).exists():
            return name
        say(f"{directory / name} is half written, and is passed over")
    return None


_REGISTERED_BYTES = 1 << 20
"""Of the tensors of one object: a larger one (an average of the weights) is the same on all ranks as a rule.

One that is not is named by the comparison behind the resume.
"""


def write_registered(accelerator: Any, directory: Path) -> None:
    """Write the small registered objects of this rank: Accelerate writes those of the first alone."""
    import torch

    objects = getattr(accelerator, "_custom_objects", ())
    if not accelerator.process_index or not objects:
        return
    states = {str(number): item.state_dict() for number, item in enumerate(objects)}
    kept = {number: state for number, state in states.items() if sum(map(_bytes, _tensors(state))) <= _REGISTERED_BYTES}
    torch.save({"ranks": int(accelerator.num_processes), "objects": kept}, directory / _registered_file(accelerator))


def load_registered(accelerator: Any, directory: Path) -> None:
    """Put them back behind what Accelerate has loaded, with as many ranks as saved them."""
    from resilience_sdk.checkpoint.payload import read_tensors

    file = directory / _registered_file(accelerator)
    if not accelerator.process_index or not file.exists():
        return
    try:
        saved = read_tensors(file)
    except (InvalidCheckpointError, OSError, pickle.UnpicklingError) as error:  # that of the first rank counts
        say(f"what rank {accelerator.process_index} has registered is that of rank 0 now: {file} is not read: {error}")
        return
    if saved.get("ranks") != int(accelerator.num_processes):
        return
    for number, item in enumerate(getattr(accelerator, "_custom_objects", ())):
        if str(number) in saved["objects"]:
            item.load_state_dict(saved["objects"][str(number)])


def _registered_file(accelerator: Any) -> str:
    return f"resilience-registered-{int(accelerator.process_index)}.pt"


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "element_size"):
        yield value


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
