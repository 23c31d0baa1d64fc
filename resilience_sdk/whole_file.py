"""Files that are there as a whole or not at all: written beside their place and renamed into it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, as private as the directory is; readers see the old content or the new, never a part.

    One thread of a process writes a path at a time. The file survives the end of the process, not that of the
    machine: nothing is synced. Raises OSError, and leaves nothing behind then: a full disk lets files be made, not
    filled.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=_private) as file:
            share_like_directory(file.fileno(), path.parent)
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def share_like_directory(fd: int, directory: Path) -> None:
    """Let those read an open file who may read its directory, whatever the umask; never raises."""
    with contextlib.suppress(OSError):  # not every file system knows modes
        os.fchmod(fd, os.stat(directory).st_mode & 0o044 | 0o600)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
