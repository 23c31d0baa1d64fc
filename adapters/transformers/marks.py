"""The mark in a checkpoint of a `Trainer` that says whether all of it is there.

A trainer writes straight into `checkpoint-<step>`, each rank its own files, and nothing in there tells one whose
writer was killed. So a file beside them says first "this is being written", and in the end, after all ranks' files,
what has to be there. Sizes, no checksums: the files are the trainer's own, and to read all back would double a save.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.checkpoint.commit import sync_directory

NAME = "resilience.json"
FORMAT = 1
NOT_ENDED = "its save did not end"
NO_MARK = "nothing says that it is complete, since the SDK did not save it; to resume it all the same, name its path"

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# What Transformers' own just-in-time checkpoint puts there for as long as it writes.
_SENTINEL = "checkpoint-is-incomplete.txt"


@attrs.frozen
class Seen:
    """What is known of one checkpoint."""

    fault: str | None
    """Why it must not be resumed, in words for a person; None where it is complete."""
    is_marked: bool
    """Whether the SDK, or Transformers, has left a word about it."""


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's directory by its name, None where it is something else."""
    match = _CHECKPOINT.fullmatch(path.name)
    return None if match is None else int(match[1])


def checkpoints_in(output_dir: Path) -> dict[int, Path]:
    """Return the checkpoints of a trainer, complete or not, newest first; raises `OSError`."""
    try:
        found = {step: path for path in output_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items(), reverse=True))


def begin(directory: Path) -> None:
    """Say that it is being written, before anything else is there. On every rank; raises `OSError`."""
    directory.mkdir(parents=True, exist_ok=True)
    _put(directory, {"format": FORMAT, "complete": False})


def seal(directory: Path, step: int, world_size: int) -> int:
    """Say what is there, now that all ranks have written; return the bytes. Raises `OSError`.

    All of it is brought to stable storage first: the mark must not outlive what it speaks of.
    """
    sizes = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if path.parent != directory or not name.startswith(NAME):
                sizes[str(path.relative_to(directory))] = _synced_size(path)
        sync_directory(Path(folder))
    _put(directory, {"format": FORMAT, "complete": True, "step": step, "world_size": world_size, "files": sizes})
    sync_directory(directory.parent)
    return sum(sizes.values())


def examine(directory: Path) -> Seen:
    """Return what is known of a checkpoint. Never raises."""
    if (directory / _SENTINEL).exists():
        return Seen(NOT_ENDED, is_marked=True)
    try:
        mark = json.loads((directory / NAME).read_bytes())
    except FileNotFoundError:
        return Seen(NO_MARK if directory.is_dir() else "it is not there", is_marked=False)
    except (OSError, ValueError) as error:
        return Seen(f"{NAME} cannot be read: {error}", is_marked=True)
    if not isinstance(mark, dict) or mark.get("complete") is not True or not isinstance(mark.get("files"), dict):
        return Seen(NOT_ENDED, is_marked=True)
    return Seen(_find_fault(directory, mark["files"]), is_marked=True)


def _find_fault(directory: Path, files: Mapping[str, Any]) -> str | None:
    for name, size in files.items():
        try:
            now = (directory / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if now != size:
            return f"{name} has {now} bytes instead of {size}"
    return None


def _synced_size(path: Path) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _put(directory: Path, mark: Mapping[str, Any]) -> None:
    """Write the mark as a whole or not at all; several ranks may do so at once."""
    # Not by the number of the process: containers on several nodes give out the same ones.
    part = directory / f"{NAME}.{secrets.token_hex(8)}"
    try:
        part.write_text(json.dumps(mark, indent=1))
        _synced_size(part)
        part.replace(directory / NAME)
    finally:
        part.unlink(missing_ok=True)
    sync_directory(directory)
