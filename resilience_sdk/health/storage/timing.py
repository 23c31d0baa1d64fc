"""Small bounded tries of a directory: metadata operations, a synced write, a read that does not come from memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

_PREFIX = ".resilience-probe-"
_LEFT_AFTER_S = 600.0  # a try ends, or is killed, within a minute
_MOST_ENTRIES = 10_000
BYTES = 4 << 20  # enough to see a rate, little enough for a slow disk
_CHUNK = 1 << 20
_FILES = 8
BUDGET_S = 0.6  # a try that has taken so long has seen enough; four of them end before the deadline of the probe


@attrs.frozen
class Rate:
    """How much went through in how long."""

    count: int
    took_s: float

    @property
    def per_s(self) -> float:
        """Return bytes (or operations) a second."""
        return self.count / max(self.took_s, 1e-9)


def metadata(directory: Path) -> Rate:
    """Create, write, rename, look up, list and remove small files in a directory of its own; count the operations.

    Raises:
        OSError: One of them failed.
    """
    began = time.monotonic()
    count = 2
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    try:
        for number in range(_FILES):
            first, second = (place / name for name in _names(number))
            first.touch()
            first.rename(second)
            second.stat()
            second.unlink()
            count += 4
            if time.monotonic() - began > BUDGET_S:
                break
        os.listdir(place)
        count += 1
    finally:
        with contextlib.suppress(OSError):
            for left in place.iterdir():
                left.unlink()
        place.rmdir()
    return Rate(count, time.monotonic() - began)


def write_and_read(directory: Path) -> tuple[Rate, Rate | None]:
    """Write a file to the disk itself, then read it from there; the read is None where memory would answer.

    Raises:
        OSError: There is no room, or no right, or the disk failed.
    """
    with _scratch_file(directory) as fd:
        block = os.urandom(_CHUNK)  # not zeros: file systems compress
        began, written = time.monotonic(), 0
        while written < BYTES and time.monotonic() - began <= BUDGET_S:
            written += os.write(fd, block)
        os.fsync(fd)
        wrote = Rate(written, time.monotonic() - began)
        if not _forget(fd):
            return wrote, None
        return wrote, _read(fd)


def read(path: Path) -> Rate:
    """Read the beginning of a file as the job would: opening a pipe waits for its writer.

    Raises:
        OSError: It cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _forget(fd)
        return _read(fd)
    finally:
        os.close(fd)


def remove_left(directory: Path) -> int:
    """Remove what earlier tries left in a directory because they were killed; return how many things went.

    Only this user's, only what is named as ours, and only what is older by the clock of the file system than any try
    lives. Looks at a bounded number of entries for a bounded time; what cannot be removed stays.
    """
    gone, until = 0, time.monotonic() + BUDGET_S
    with contextlib.suppress(OSError), _scratch_file(directory) as fd:
        now = os.fstat(fd).st_mtime  # of the server, where there is one
        with os.scandir(directory) as entries:
            for entry in itertools.islice(entries, _MOST_ENTRIES):
                if entry.name.startswith(_PREFIX):
                    with contextlib.suppress(OSError):
                        gone += _remove_if_left(entry, now)
                if time.monotonic() > until:
                    break
    return gone


def _remove_if_left(entry: os.DirEntry[str], now: float) -> bool:
    about = entry.stat(follow_symlinks=False)
    if about.st_uid != os.getuid() or now - about.st_mtime < _LEFT_AFTER_S:
        return False
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.path)
        return True
    for name in (name for number in range(_FILES) for name in _names(number)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(entry.path, name))
    os.rmdir(entry.path)
    return True


def _names(number: int) -> tuple[str, str]:
    """Return how a small file is named at first, and then."""
    return f"{number}.new", str(number)


def _read(fd: int) -> Rate:
    with contextlib.suppress(OSError):  # a pipe has no place to go back to
        os.lseek(fd, 0, os.SEEK_SET)
    began, count = time.monotonic(), 0
    while count < BYTES and time.monotonic() - began <= BUDGET_S:
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            break
        count += len(chunk)
    return Rate(count, time.monotonic() - began)


def _forget(fd: int) -> bool:
    """Ask the kernel to forget its copy in memory; tell whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    return False


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    """Open a file that nobody sees; where there is no such thing, one that is removed in any case."""
    try:
        fd, name = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except (OSError, AttributeError):  # NFS and others have none, and an error that counts comes again
        fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
    try:
        yield fd
    finally:
        os.close(fd)
        if name is not None:
            os.unlink(name)
