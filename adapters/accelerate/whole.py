"""How a directory comes to be there as a whole or not at all: files that are written beside it, then moved.

Into one that exists, the files are moved one by one; as long as that lasts a mark in it says so.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from resilience_sdk.checkpoint.commit import sync_directory

UNFINISHED = ".resilience-unfinished"
"""The name of the mark, and the end of the name of a directory that is being written."""


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


def begin(unfinished: Path) -> None:
    """Make the directory that is written; raises `OSError`."""
    shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was killed
    unfinished.mkdir(parents=True)


def commit(unfinished: Path, target: Path) -> None:
    """Make what was written the target, or the newest of what is in it; raises `OSError`."""
    _sync_all(unfinished)
    left = unfinished if target.exists() else _take_name(unfinished, target)
    if left is None:
        return
    mark = target / UNFINISHED
    mark.touch()
    _sync(target)
    _move_into(left, target)
    mark.unlink()


def add(unfinished: Path, target: Path) -> None:
    """Add what this rank alone has written. Before the main process has, that is not whole, and marked so."""
    (unfinished / UNFINISHED).touch()
    _sync_all(unfinished)
    left = _take_name(unfinished, target)
    if left is not None:
        (left / UNFINISHED).unlink()
        _move_into(left, target)


def _take_name(unfinished: Path, target: Path) -> Path | None:
    """Make a directory the target in one step; return where it is still, if that is there, or becomes so meanwhile."""
    if target in unfinished.parents:
        return unfinished  # written into a mount, whose place nothing can take
    target.parent.mkdir(parents=True, exist_ok=True)
    left = unfinished
    try:
        try:
            left.rename(target)
        except OSError as error:
            if error.errno != errno.EXDEV or left.parent == target.parent:  # it would be copied onto itself
                raise
            left = _copied_into(target.parent, left)
            left.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        return left
    _sync(target.parent)
    return None


def _copied_into(directory: Path, unfinished: Path) -> Path:
    """Move a directory over a border that looks like none, such as that of a part of the same disk mounted here."""
    place = directory / unfinished.name
    shutil.rmtree(place, ignore_errors=True)
    shutil.move(unfinished, place)
    _sync_all(place)
    return place


def _move_into(unfinished: Path, target: Path) -> None:
    for path in unfinished.iterdir():
        place = target / path.name
        if place.is_dir():
            shutil.rmtree(place)
        try:
            path.rename(place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            _copied_into(target, path)
    _sync(target)
    unfinished.rmdir()


def _sync_all(top: Path) -> None:
    for path in (top, *top.rglob("*")):
        _sync(path)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_directory(path)  # as far as the file system can
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
