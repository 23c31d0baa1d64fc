"""One rank's part in a save: its state is copied to the host, written and, on rank 0, committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from resilience_sdk._version import __version__
from resilience_sdk.checkpoint import payload, sharded
from resilience_sdk.checkpoint.manifest import MANIFEST_NAME, SHARDED, FileEntry, Manifest, is_listable
from resilience_sdk.checkpoint.ranks import Ranks, describe
from resilience_sdk.checkpoint.state import StateMap, capture_rng
from resilience_sdk.checkpoint.store import CheckpointStore
from resilience_sdk.checkpoint.trackers import capture_trackers
from resilience_sdk.core.console import say_once


class Staging:
    """Keeps its buffers from one save to the next: pages that are new cost several times the copy itself.

    So it holds as much memory as the state from the first save on, and a copy is valid until the next one.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, value: Any) -> Any:
        """Return a copy of a captured state that shares nothing with it; tensors are on the CPU."""
        used: dict[str, torch.Tensor] = {}
        copied = self._copy(value, "", used, {})
        self._buffers = used
        return copied

    def _copy(self, value: Any, place: str, used: dict[str, torch.Tensor], seen: dict[Any, Any]) -> Any:
        if isinstance(value, torch.Tensor):
            key = _identity(value)
            if key not in seen:  # tied weights stay tied
                seen[key] = used[place] = self._copy_tensor(value.detach(), place)
            return seen[key]
        if isinstance(value, Mapping):
            made: Any = type(value)()
            for number, (key, item) in enumerate(value.items()):
                made[key] = self._copy(item, f"{place}/{number}", used, seen)
            if hasattr(value, "__dict__"):
                vars(made).update(vars(value))  # the `_metadata` of a module's state
            return made
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self._copy(item, f"{place}/{number}", used, seen) for number, item in enumerate(value))
        return bytearray(value) if isinstance(value, bytearray) else value

    def _copy_tensor(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            return tensor.to("cpu", copy=True)
        return buffer.copy_(tensor)


def _identity(tensor: torch.Tensor) -> Any:
    """Return what two tensors share that are the same memory seen alike: `state_dict()` makes an object per name."""
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return id(tensor)
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


@attrs.frozen
class RankPart:
    """What one rank writes. `spread` is this rank's part of what is sharded; `shared` is empty but on rank 0."""

    document: Mapping[str, Any]
    own: Mapping[str, Any]
    shared: Mapping[str, Any]
    spread: Mapping[str, Any]
    values: str
    writer: Callable[[Path], object] | None = None
    """Writes more files, on all ranks at once: a framework that saves by itself."""


def capture_part(
    state: StateMap, position: Any, rank: int, values: str, writer: Callable[[Path], object] | None = None
) -> RankPart:
    """Take this rank's part of the live objects by reference, and its data position.

    Collective for some kinds of sharding. Whatever a `state_dict()` raises passes through.
    """
    document = {
        "rng": capture_rng(),
        "position": position,
        "trackers": capture_trackers(),
    }
    spread = sharded.capture(state.sharded, state.modules)
    return RankPart(document, state.capture_rank(), state.capture_shared() if rank == 0 else {}, spread, values, writer)


def copy_part(part: RankPart, staging: Staging) -> RankPart:
    """Return a copy that the training cannot change; what is spread is copied by torch.distributed.checkpoint."""
    copied = staging.copy({"own": part.own, "shared": part.shared})
    return attrs.evolve(part, own=copied["own"], shared=copied["shared"])


def write_part(part: RankPart, directory: Path, ranks: Ranks, *, mode: int, spread: Any = None) -> dict[str, Any]:
    """Write one rank's files and return what rank 0 must know; an error is part of the answer. Never raises.

    Collective where there is something spread, unless `spread` is the future of its writing.
    """
    rank = ranks.rank
    try:
        # First what is collective: a rank that failed before it would leave the others waiting in it.
        if spread is not None:
            spread.result()
        elif part.spread:
            sharded.save(directory, part.spread, ranks)
        places = {SHARDED} if part.spread else set()
        if part.writer is not None:
            part.writer(directory)
            places |= sharded.places_in(directory)  # each rank reads its own back: one alone would read the whole model
        entries = [one for place in sorted(places) for one in sharded.entries_of(directory, place, rank, mode=mode)]
        entries += payload.write_rank(directory, rank, part.document, part.own, mode=mode)
        if rank == 0:
            entries += payload.write_shared(directory, part.shared, part.values, sorted(part.spread), mode=mode)
    except BaseException as error:
        # A save that fails must not end the training. What DCP raises is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            raise
        return {"error": _with_space(describe(error), directory)}
    return {"error": None, "files": [entry.to_json() for entry in entries]}


def seal(store: CheckpointStore, parts: list[Any], unfinished: Path, step: int, token: str, now: float) -> Manifest:
    """Commit on rank 0 what all ranks have written; raises `OSError`, and nothing is visible then."""
    files = tuple(FileEntry.from_json(entry) for part in parts for entry in part["files"])
    files += foreign_entries(unfinished, {entry.name for entry in files}, store)
    manifest = Manifest(step, len(parts), files, now, {"resilience_sdk": __version__})
    store.commit(unfinished, manifest, token)
    return manifest


def foreign_entries(directory: Path, known: set[str], store: CheckpointStore) -> tuple[FileEntry, ...]:
    """Return the entries of what somebody else has written here, made safe to keep; raises `OSError`.

    A framework writes by its own rules: with the modes of the user's umask, without a sync, and under names that a
    manifest must not list, or no reader would take it. These stay where they are.
    """
    folders = sorted(path for path in directory.iterdir() if path.is_dir())
    found = []
    for place in (directory, *folders):
        for path in sorted(place.iterdir()):
            relative = path.relative_to(directory).as_posix()
            if relative in known or relative == MANIFEST_NAME or path.is_dir():
                continue
            entry = sharded.entry_of(directory, relative, mode=store.file_mode)
            if is_listable(relative):
                found.append(entry)
            else:
                say_once(
                    f"unlisted:{relative}",
                    f"{relative!r} is saved, but not checked at a resume: a manifest cannot list its name",
                )
    for folder in folders:
        os.chmod(folder, store.directory_mode)
    return tuple(found)


def first_error(parts: list[dict[str, Any]], step: int | None = None) -> str | None:
    """Return why these parts are no checkpoint (of `step`), naming the rank, or None."""
    for rank, part in enumerate(parts):
        if part["error"]:
            # What DCP has told all ranks of names the rank already.
            is_named = len(parts) == 1 or part["error"].startswith("rank ")
            return str(part["error"]) if is_named else f"rank {rank}: {part['error']}"
        if step is not None and part["step"] != step:
            return f"rank {rank} saves step {part['step']}, rank 0 step {step}: all ranks must save at one step"
    return None


def _with_space(reason: str, directory: Path) -> str:
    """Return `reason`, and that the disk is full where torch's own writers have swallowed that."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return reason
    is_full = status.f_blocks > 0 and (status.f_bavail == 0 or status.f_files > 0 == status.f_favail)
    return f"{reason}; the file system is full" if is_full and "No space left" not in reason else reason
