"""A directory that is there as a whole or not at all, whoever writes it: own checkpoints, Accelerate's, the Trainer's.

There is one protocol, of three moves, and each writer uses those that its framework leaves to it:

* Beside: all is written and synced under another name; one rename gives it the name that is read (`replace`, `merge`).
* Aside: what has that name already and is whole steps aside before, and is deleted behind it (`replace`; the Trainer,
  which writes in place). A writer that is killed in between leaves it there: `put_back`.
* Marked: where files of others stay in the directory, ours are moved in one by one, and for that time a mark in it says
  that it is not whole (`merge`).

What is whole is only ever renamed, and a tree is deleted only under a name that no reader looks at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from resilience_sdk.core.plain_file import open_plain

UNFINISHED = ".resilience-unfinished"
"""The name of the mark, and the end of the name of a directory that is written beside its place."""

# Some file systems do not sync directories, and say so with one of these: there is nothing more to do then.
_NO_DIRECTORY_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES})


def sync_file(path: Path) -> int:
    """Bring a file to stable storage, and return its size in bytes; raises `OSError`."""
    descriptor = open_plain(path)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Bring the entries of a directory to stable storage where the file system can; raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_tree(top: Path, *, mark: str | None = None) -> dict[str, int]:
    """Sync all that is in a directory; return the size of each file by its path in there. Raises `OSError`.

    Files at the top whose names begin with `mark` are left out: they are written behind all others.
    """
    sizes = {}
    for folder, _, names in os.walk(top):
        for path in (Path(folder, name) for name in names):
            inside = str(path.relative_to(top))
            if mark is None or not inside.startswith(mark):
                sizes[inside] = sync_file(path)
        sync_directory(Path(folder))
    return sizes


def remove_tree(path: Path) -> None:
    """Remove a file or directory as far as that is possible; never raises."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.stat(follow_symlinks=False).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def replace(unfinished: Path, target: Path, aside: Path) -> None:
    """Give what was written and synced its name; an earlier one steps `aside` before, and is deleted afterwards.

    Both names are in one directory. Raises `OSError`, and leaves the earlier one in its place then.
    """
    has_earlier = os.path.lexists(target)
    if has_earlier:
        target.rename(aside)
    try:
        unfinished.rename(target)
    except OSError:
        if has_earlier:
            aside.rename(target)
        raise
    sync_directory(target.parent)
    if has_earlier:
        remove_tree(aside)


def put_back(target: Path, aside: Path, is_whole: Callable[[Path], bool]) -> None:
    """Give what a failed or killed writer has left aside its name again, unless that is whole; raises `OSError`.

    Several processes may do so at once, on several nodes too.
    """
    if is_whole(target):
        remove_tree(aside)
    elif is_whole(aside):
        own = aside.with_name(f"{aside.name}-{secrets.token_hex(8)}")
        with contextlib.suppress(FileNotFoundError):
            target.rename(own)
        _rename_unless_taken(aside, target)
        # What was taken away may be what another one had put there since it was looked at. Killed here, it is aside.
        if is_whole(own):
            _rename_unless_taken(own, target)
        else:
            remove_tree(own)


def _rename_unless_taken(path: Path, name: Path) -> None:
    try:
        path.rename(name)
    except FileNotFoundError:  # another process has renamed it
        pass
    except OSError as error:  # a directory never takes the place of one with files in it
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


# -- into a directory that is not ours alone


def merge(unfinished: Path, target: Path, *, is_last: bool) -> None:
    """Make what was written the target, or the newest of what is in it; raises `OSError`.

    `is_last`: with it the target is whole. Else it is a part that comes beside another one, and where that is not
    there yet, the target stays marked.
    """
    if not is_last:
        (unfinished / UNFINISHED).touch()
    sync_tree(unfinished)
    left = unfinished if is_last and target.exists() else _take_name(unfinished, target)
    if left is None:
        return
    if is_last:
        (target / UNFINISHED).touch()
        sync_directory(target)
    else:
        (left / UNFINISHED).unlink()
    for path in left.iterdir():
        _move(path, target / path.name)
    sync_directory(target)
    left.rmdir()
    if is_last:
        (target / UNFINISHED).unlink()


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
    sync_directory(target.parent)
    return None


def _copied_into(directory: Path, path: Path) -> Path:
    """Move something over a border that looks like none, such as that of a part of the same disk mounted here."""
    place = directory / path.name
    shutil.rmtree(place, ignore_errors=True)
    shutil.move(path, place)
    if place.is_dir():
        sync_tree(place)
    else:
        sync_file(place)
    return place


def _move(path: Path, place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    try:
        path.rename(place)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copied_into(place.parent, path)
