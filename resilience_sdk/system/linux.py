"""Linux calls that Python has no name for.

Each without effect elsewhere, and descriptors that a stranger's code cannot close.

`os.closerange(3, 1000)` takes them away, and what the program opens next may get their numbers: to write to such a
number then would write into the user's file. So ours stand where a program's own files never come, and whoever uses
one asks first whether it is still the same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from resilience_sdk.system.hostinfo import stat_fields

_PR_SET_PDEATHSIG = 1
_LISTEN = "0A"  # a state of TCP sockets


def die_with_parent(signum: int) -> bool:
    """Have the kernel send `signum` to this process when its parent *thread* ends; tell whether it will.

    The request is lost in children made by fork, and kept over exec. The parent may have died before the
    call: the caller compares `os.getppid()` afterwards.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def resume(after_s: float, pid: int) -> None:
    """Let a process that is stopped go on after so many seconds. Raises OSError where it is gone."""
    time.sleep(after_s)
    os.kill(pid, signal.SIGCONT)


def thread_count() -> int | None:
    """Return how many threads this process has, those of C libraries included; None if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def opened(prefix: str) -> list[str]:
    """Return what this process has open whose name begins with `prefix`, for instance `/dev/nvidia`."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (path := os.readlink(f"/proc/self/fd/{fd}")).startswith(prefix):
                    found.append(path)
    return found


def listens_on(port: int) -> bool:
    """Tell whether this process has a TCP socket that listens on `port`; True where that cannot be known."""
    tables = [path for path in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")) if path.exists()]
    if not tables:
        return True
    listening = {inode for table in tables for inode in _listening(table.read_text().splitlines(), port)}
    return not listening.isdisjoint(name[len("socket:[") : -1] for name in opened("socket:["))


def _listening(table: Iterable[str], port: int) -> set[str]:
    """Return the inodes of a table of sockets as proc(5) has it that listen on `port`."""
    rows = (line.split() for line in table)
    ends_with = f":{port:04X}"
    return {row[9] for row in rows if len(row) > 9 and row[3] == _LISTEN and row[1].endswith(ends_with)}


def show_command_line(command: Sequence[str]) -> bool:
    """Make `ps` and /proc show `command` for this process; tell whether it fitted and was done.

    The kernel shows the memory where exec laid the arguments, so a shorter line can be written over them.
    Only our own stack is touched, and only between the bounds that the kernel names. A last byte that is
    not zero tells the kernel that a process has named itself: it then shows the text up to the first zero.
    """
    if not sys.platform.startswith("linux"):
        return False
    line = b" ".join(os.fsencode(word) for word in command)
    fields = stat_fields(os.getpid())
    try:
        start, end = int(fields[48 - 3]), int(fields[49 - 3])  # fields 48 and 49 of proc(5); the list begins with 3
    except (ValueError, IndexError):
        return False
    room = end - start - 1
    if not start or len(line) >= room:
        return False
    ctypes.memmove(start, line + bytes(room - len(line)) + b" ", room + 1)
    return True


_HIGHEST = 4000  # the kernel's table of a process grows with the number: by 32 KiB
_Identity = tuple[int, int]


def aside(fd: int, number: int | None = None) -> int:
    """Move an open descriptor out of the way, to `number` or the next free one, and return where it is now.

    Where it cannot be moved it stays. It is not inherited by what the process executes.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):  # no fcntl, or no number left
        import fcntl

        # The lowest free number from there on.
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _high() if number is None else number)
        os.close(fd)
        return moved
    return fd


def identity(fd: int) -> _Identity:
    """Return what tells an open file from any other on this machine. Raises OSError where nothing is open."""
    known = os.fstat(fd)
    return known.st_dev, known.st_ino


def is_still(fd: int, known: _Identity) -> bool:
    """Tell whether a descriptor is the open file that it was."""
    try:
        return identity(fd) == known
    except OSError:
        return False


def _high() -> int:
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _HIGHEST if soft == resource.RLIM_INFINITY else min(soft * 3 // 4, _HIGHEST)
