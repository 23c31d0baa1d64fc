"""Saves of a framework that writes files by itself, staged in memory: what it writes there is moved in the background.

A framework that has no seam between copying its state and writing it writes into a file system in memory, while the
training waits. That takes no disk, no network and no sync. Each rank has a directory of its own, so that nobody waits
for another rank's files; where there is no room it writes to the disk, and only what comes behind is left for later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from resilience_sdk.core.console import say_once
from resilience_sdk.system import hostinfo

Stager = Callable[[Path], Callable[[], object]]
"""Takes the state on all ranks at once, in the thread that trains; what it returns writes it into the directory.

That runs in another thread, on each rank for itself.
"""

_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it, that nobody else can read
_PREFIX = "resilience-save-"
_ROOM = 2.0  # times the last save: the state may grow, and other programs need room too


class MemoryStaging:
    """Lets `writer(directory)` write into memory, and moves what it wrote. A `Stager`, of the thread that trains."""

    def __init__(self, writer: Callable[[Path], object], memory: Path = _MEMORY) -> None:
        """Stage below `memory`, from the second save on: the first one tells how much room is needed."""
        self._writer = writer
        self._memory = memory
        self._size = 0
        self._has_swept = False

    def __call__(self, directory: Path) -> Callable[[], object]:
        """Take the state; raises what the writer raises."""
        place = self._make_place()
        if place is None:
            self._writer(directory)
            return lambda: self._note_size(directory)
        try:
            self._writer(place)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return lambda: self._move(place, directory)

    def _make_place(self) -> Path | None:
        if not self._size:
            return None
        try:
            status = os.statvfs(self._memory)
            if status.f_bavail * status.f_frsize < _ROOM * self._size:
                say_once(
                    "save in memory",
                    f"saves in the background are written to the disk while the training waits: {self._memory} has no "
                    f"room for {_ROOM:g} x {self._size / 1e6:.0f} MB (docker run --shm-size, a memory volume)",
                )
                return None
            if not self._has_swept:
                self._has_swept = True
                sweep(self._memory)
            return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_own_name()}-", dir=self._memory))
        except OSError:
            return None

    def _note_size(self, directory: Path) -> None:
        self._size = size_of(directory)

    def _move(self, place: Path, directory: Path) -> None:
        """Copy what is there, and remove it in any case; raises `OSError`."""
        try:
            self._size = max(1, size_of(place))
            for path in place.rglob("*"):  # folders come before what is in them
                target = directory / path.relative_to(place)
                if path.is_dir():
                    target.mkdir(exist_ok=True)
                else:
                    shutil.copyfile(path, target)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def size_of(directory: Path) -> int:
    """Return how many bytes the files below a directory have; raises `OSError`."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _own_name() -> str:
    pid = os.getpid()
    return f"{_namespace()}-{pid}-{hostinfo.process_start_ticks(pid)}"


def _namespace() -> str:
    return "".join(filter(str.isdigit, hostinfo.pid_namespace()))


def sweep(memory: Path) -> None:
    """Remove what processes of this user have left there that are provably gone; never raises."""
    with contextlib.suppress(OSError, ValueError):
        for path in memory.glob(f"{_PREFIX}*"):
            namespace, pid, ticks, _ = path.name.removeprefix(_PREFIX).rsplit("-", 3)
            is_ours = path.stat().st_uid == os.geteuid() and namespace == _namespace()
            if is_ours and hostinfo.process_is_gone(int(pid), int(ticks)):
                shutil.rmtree(path, ignore_errors=True)
