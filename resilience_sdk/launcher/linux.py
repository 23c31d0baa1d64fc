"""The few Linux calls that Python has no name for; elsewhere each does nothing, and its result says so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Sequence

from resilience_sdk.hostinfo import stat_fields

_PR_SET_PDEATHSIG = 1


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


def thread_count() -> int | None:
    """Return how many threads this process has, those of C libraries included; None if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def opened_devices(prefix: str) -> list[str]:
    """Return the paths beginning with `prefix` that this process has open (for instance `/dev/nvidia`)."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (path := os.readlink(f"/proc/self/fd/{fd}")).startswith(prefix):
                    found.append(path)
    return found


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
