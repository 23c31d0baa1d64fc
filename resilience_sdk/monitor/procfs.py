"""What /proc tells about a process; every reader is tolerant of one that is gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def is_traced(pid: int) -> bool:
    """Tell whether a debugger is attached."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("TracerPid:"):
                return int(line.partition(":")[2]) != 0
    return False


def reads_terminal(pid: int) -> bool:
    """Tell whether the main thread is blocked reading from a terminal, as at a `breakpoint()`."""
    with contextlib.suppress(OSError):
        wchan = Path(f"/proc/{pid}/wchan").read_text()
        stdin = os.readlink(f"/proc/{pid}/fd/0")
        return stdin.startswith(("/dev/pts/", "/dev/tty")) and ("tty" in wchan or "wait_woken" in wchan)
    return False
