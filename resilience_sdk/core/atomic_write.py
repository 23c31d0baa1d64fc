"""Atomic writes: a file is there as a whole or not at all, written beside its place and renamed into it.

Whoever waits for one reads it when its version has changed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from resilience_sdk.core.plain_file import private, read_bytes
from resilience_sdk.system import same_device

Version = tuple[int, int, int]


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, as private as the directory is; readers see the old content or the new, never a part.

    One thread of a process writes a path at a time. The file survives the end of the process, not that of the
    machine: nothing is synced. Raises OSError, and leaves nothing behind then: a full disk lets files be made, not
    filled.
    """
    same_device.check(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", opener=private) as file:
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


def version_of(path: str | Path) -> Version | None:
    """Return what changes whenever a file is written; None where there is none. One system call."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_size


class ReplacedFile:
    """A file that somebody else replaces now and then. One thread."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Read from `path`, where there may be no such file yet, if it has no more than so many bytes."""
        self._path = path
        self._most_bytes = most_bytes
        self._seen: Version | None = None

    def news(self) -> bytes | None:
        """Return the content, None where it is that of the last call. Costs one system call then."""
        version = version_of(self._path)
        if version is None or version == self._seen or version[-1] > self._most_bytes:
            return None
        try:
            content = read_bytes(self._path)
        except OSError:
            return None
        self._seen = version
        return content
