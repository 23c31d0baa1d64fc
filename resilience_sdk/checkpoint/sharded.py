"""State that is spread over the ranks (FSDP2, FSDP, tensor parallel), by torch.distributed.checkpoint.

Every rank writes its own part into `sharded/`, and DCP's metadata say how the parts make up each tensor. So any
other number of ranks, and one process without sharding, can read it. Names are those of the parameters, also in
the state of an optimizer.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from resilience_sdk.checkpoint.manifest import SHARDED, FileEntry, is_listable
from resilience_sdk.core.plain_file import open_to_read
from resilience_sdk.errors import CheckpointError, ConfigError

_CHUNK = 1 << 20


def find_sharded(entries: Mapping[str, Any]) -> set[str]:
    """Return the names of those entries of `state` that are spread over ranks; the same on all of them."""
    modules = [item for item in entries.values() if isinstance(item, nn.Module) and _is_sharded_module(item)]
    # Also FSDP's parameters that look like plain ones, of which each rank has another piece.
    spread = {id(parameter) for module in modules for parameter in module.parameters()}
    found = set()
    for name, item in entries.items():
        if isinstance(item, nn.Module):
            is_spread = _is_sharded_module(item)
        elif isinstance(item, torch.optim.Optimizer):
            parameters = [parameter for group in item.param_groups for parameter in group["params"]]
            is_spread = any(_is_distributed(one) or id(one) in spread for one in parameters)
        else:
            is_spread = _is_distributed(item)
        found |= {name} if is_spread else set()
    return found


def _is_sharded_module(item: nn.Module) -> bool:
    return any(_is_distributed(tensor) for tensor in item.parameters()) or _has_fsdp1(item)


def _is_distributed(value: Any) -> bool:
    # Before torch 2.5 under another name. A program that has such tensors has imported one of them.
    modules = map(sys.modules.get, ("torch.distributed.tensor", "torch.distributed._tensor"))
    kinds = tuple(module.DTensor for module in modules if module is not None and hasattr(module, "DTensor"))
    return isinstance(value, kinds)


def _has_fsdp1(item: nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and any(isinstance(part, module.FullyShardedDataParallel) for part in item.modules())


def find_owner(name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module of `modules` that has all parameters of an optimizer; `ConfigError` with the cure else."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules.values():
        if wanted <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise ConfigError(
        f"state[{name!r}] is an optimizer of sharded parameters, and no module in state has all of them: put the "
        f"module into state too (several in one torch.nn.ModuleList), since its parameters are saved by their names"
    )


def capture(entries: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what DCP writes of `entries`, this rank's part. Collective for some kinds of sharding.

    An optimizer among them has taken a step: DCP gives one without state a state by a step of its own.
    """
    if not entries:
        return {}  # without DCP, whose first import takes a second of the thread that trains
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    captured: dict[str, Any] = {}
    for name, item in entries.items():
        if isinstance(item, torch.optim.Optimizer):
            captured[name] = get_optimizer_state_dict(find_owner(name, item, modules), item)
        elif isinstance(item, nn.Module):
            captured[name] = get_model_state_dict(item)
        else:
            captured[name] = item.detach() if isinstance(item, torch.Tensor) else item
    return captured


def save(directory: Path, captured: Mapping[str, Any], ranks: Any) -> None:
    """Write this rank's part into `directory/sharded`, which exists. Collective; raises on all ranks or none."""
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(captured), storage_writer=_writer(directory), **_group(ranks, dcp.save))


class Writing:
    """A copy of this rank's part of `captured` in the memory of the host, and its writing in a thread. Collective.

    `group` is a gloo group of all ranks that nothing else uses meanwhile. A rank that cannot copy its part takes part
    with nothing, since the others would wait for it; `result` raises what was wrong. Making it raises no `Exception`.
    """

    def __init__(self, directory: Path, captured: Mapping[str, Any], group: Any) -> None:
        self._error: Exception | None = None
        self._future: Any = None
        try:
            self._future = _begin_save(directory, captured, group)
        except Exception as error:  # noqa: BLE001 - no memory, a tensor of a kind that cannot be copied: DCP's many
            self._error = error
            with contextlib.suppress(Exception):
                self._future = _begin_save(directory, {}, group)

    def result(self) -> None:
        """Wait until all ranks have written; raises what was wrong here, or on any rank."""
        try:
            if self._future is not None:
                self._future.result()
        finally:
            if self._error is not None:
                raise self._error


def _begin_save(directory: Path, captured: Mapping[str, Any], group: Any) -> Any:
    import torch.distributed.checkpoint as dcp

    # A group for one rank too: DCP asks that the group, by default the program's own, works on the CPU.
    begun = dcp.async_save(dict(captured), storage_writer=_writer(directory), process_group=group)
    return getattr(begun, "upload_completion", begun)


def _writer(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    return FileSystemWriter(directory / SHARDED, single_file_per_rank=True, sync_files=True)


def _group(ranks: Any, function: Any) -> dict[str, Any]:
    """Return among whom `function` of DCP agrees; one rank alone needs nobody, where torch lets it say so."""
    if ranks.size > 1:
        return {"process_group": ranks.group}
    return {"no_dist": True} if "no_dist" in inspect.signature(function).parameters else {}


def places_in(directory: Path) -> set[str]:
    """Return the names of the directories into which DCP has written, for us or for a framework."""
    return {path.parent.name for path in directory.glob("*/.metadata") if is_listable(f"{path.parent.name}/.metadata")}


def entries_of(directory: Path, place: str, rank: int, *, mode: int) -> list[FileEntry]:
    """Return the entries of what DCP has written there for one rank (rank 0: the metadata too); raises `OSError`.

    Read back, since DCP writes by itself; what it read from is still in the memory of the system.
    """
    names = [name for name in sorted(os.listdir(directory / place)) if name.startswith(f"__{rank}_")]
    names += [".metadata"] if rank == 0 else []
    return [entry_of(directory, f"{place}/{name}", mode=mode) for name in names]


def entry_of(directory: Path, name: str, *, mode: int) -> FileEntry:
    """Return the entry of a file that is there already, by reading and syncing it; raises `OSError`."""
    path = directory / name
    os.chmod(path, mode)
    crc = size = 0
    with open_to_read(path) as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
        os.fsync(file.fileno())
    return FileEntry(name, size, crc)


def load(directory: Path, templates: dict[str, Any], ranks: Any) -> None:
    """Read the checkpoint into `templates`, whose tensors tell each rank's part. Collective."""
    import torch.distributed.checkpoint as dcp

    dcp.load(templates, storage_reader=dcp.FileSystemReader(directory / SHARDED), **_group(ranks, dcp.load))


def apply(entries: Mapping[str, Any], modules: Mapping[str, nn.Module], loaded: Mapping[str, Any]) -> None:
    """Put what `load` has read into the live objects."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    for name, item in entries.items():
        if isinstance(item, nn.Module):
            set_model_state_dict(item, loaded[name])
    for name, item in entries.items():
        if isinstance(item, torch.optim.Optimizer):
            set_optimizer_state_dict(find_owner(name, item, modules), item, optim_state_dict=loaded[name])


def apply_whole(name: str, item: Any, saved: Any, modules: Mapping[str, nn.Module]) -> None:
    """Spread a state that was saved whole, by one rank for all, over the parts of a sharded object."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    if isinstance(item, nn.Module):
        set_model_state_dict(item, saved, options=options)
    elif isinstance(item, torch.optim.Optimizer):
        if not saved["state"]:
            item.load_state_dict(saved)
            return
        owner = find_owner(name, item, modules)
        set_optimizer_state_dict(owner, item, optim_state_dict=_by_name(item, owner, saved), options=options)
    else:
        raise CheckpointError(f"the checkpoint has a whole tensor, state[{name!r}] is sharded: distribute it yourself")


def _by_name(item: torch.optim.Optimizer, owner: nn.Module, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with the names of parameters instead of their numbers in order."""
    names = {id(parameter): name for name, parameter in owner.named_parameters()}
    ordered = [names[id(parameter)] for group in item.param_groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(ordered):
        raise ValueError(f"{len(numbers)} parameters in the checkpoint, {len(ordered)} here")
    name_of: dict[Any, str] = dict(zip(numbers, ordered, strict=True))
    groups = [{**group, "params": _named(group["params"], name_of)} for group in saved["param_groups"]]
    return {"state": {name_of[number]: state for number, state in saved["state"].items()}, "param_groups": groups}


def _named(numbers: Iterable[Any], name_of: Mapping[Any, str]) -> list[str]:
    return [name_of[number] for number in numbers]
