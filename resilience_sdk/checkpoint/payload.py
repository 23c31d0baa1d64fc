"""The files of one checkpoint: what rank 0 writes for all, and what every rank writes for itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from resilience_sdk.checkpoint.commit import CheckedWriter, open_trusted, write_file
from resilience_sdk.checkpoint.manifest import (
    FileEntry,
)
from resilience_sdk.errors import CheckpointError

SHARED = "state.pt"


VALUES = "values.json"


SPREAD = "sharded.json"


# How long a directory made on another node may take to appear here (attribute caches of NFS).
_APPEARS_WITHIN_S = 5.0


_LOOK_AGAIN_S = 0.05


def rank_document(rank: int) -> str:
    """Return the name of the JSON file of one rank."""
    return f"rank-{rank:05d}.json"


def rank_tensors(rank: int) -> str:
    """Return the name of the file with state dicts and tensors of one rank."""
    return f"rank-{rank:05d}.pt"


def encode_values(values: Mapping[str, Any]) -> str:
    """Return plain values as JSON text; raises `CheckpointError` naming the one that is not plain."""
    for name, value in values.items():
        try:
            if not isinstance(name, str):
                raise TypeError("the name is no string")
            json.dumps(value, default=_scalar)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"values[{name!r}] cannot be saved ({error}): use numbers, strings, lists and dicts, and put "
                f"tensors and objects with state_dict() into state"
            ) from None
    return json.dumps(dict(values), default=_scalar)


def _scalar(value: Any) -> Any:
    # Metrics come out of numpy and torch as their own kinds of number.
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not plain")


def write_shared(
    directory: Path, shared: Mapping[str, Any], values: str, spread: list[str], *, mode: int
) -> list[FileEntry]:
    """Write what is the same on all ranks, and the names of what is spread over them; raises `OSError`."""
    entries = [
        write_file(directory, SHARED, _torch_save(shared), mode=mode),
        write_file(directory, VALUES, _text(values), mode=mode),
    ]
    if spread:
        entries.append(write_file(directory, SPREAD, _text(json.dumps({"entries": spread})), mode=mode))
    return entries


def write_rank(
    directory: Path, rank: int, document: Mapping[str, Any], tensors: Mapping[str, Any], *, mode: int
) -> list[FileEntry]:
    """Write what belongs to one rank; raises `OSError`, also where the directory is not shared."""
    _wait_for(directory)
    entries = [write_file(directory, rank_document(rank), _text(json.dumps(document)), mode=mode)]
    if tensors:
        entries.append(write_file(directory, rank_tensors(rank), _torch_save(tensors), mode=mode))
    return entries


def read_tensors(path: Path) -> Any:
    """Return the content of a .pt file on the CPU; raises `InvalidCheckpointError` or what torch raises."""
    with open_trusted(path) as file:
        return torch.load(file, map_location="cpu", weights_only=True)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raises `InvalidCheckpointError`, `OSError` or ValueError."""
    with open_trusted(path) as file:
        return json.loads(file.read())


def _torch_save(value: Any) -> Callable[[CheckedWriter], None]:
    return lambda writer: torch.save(value, writer)  # type: ignore[no-untyped-call, unused-ignore]


def _text(text: str) -> Callable[[CheckedWriter], None]:
    def fill(writer: CheckedWriter) -> None:
        writer.write(text.encode())

    return fill


def _wait_for(directory: Path) -> None:
    deadline = time.monotonic() + _APPEARS_WITHIN_S
    while not directory.is_dir() and time.monotonic() < deadline:
        time.sleep(_LOOK_AGAIN_S)
