"""An advisory lock between processes that is never waited for long."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PAUSE_S = 0.005


@contextlib.contextmanager
def file_lock(path: Path, *, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold the lock on the file or directory `path`; yields whether it was to be had within `patience_s` seconds.

    A file is made where there is none. Waiting is bounded because a process that was stopped while it held the
    lock must not stop the others.

    Raises OSError when `path` cannot be opened or its file system has no locks, ImportError where there is no
    `flock`.
    """
    import fcntl  # late: this module can be imported where POSIX is not

    kind = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    fd = os.open(path, kind | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        mine = _take(fd, time.monotonic() + patience_s)
        try:
            yield mine
        finally:
            # Not left to the close: a process that another thread forks meanwhile keeps the file open.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _take(fd: int, until: float) -> bool:
    import fcntl

    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True
