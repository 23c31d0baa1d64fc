"""This host: its name, its boot, its processes and their starts, read without a dependency.

Everything here is tolerant: on a platform without /proc the answer is None or empty, which means "cannot
tell" and is never taken as proof of anything.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def host_name() -> str:
    """Return the name of this host, as `uname -n` prints it."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import platform

    return platform.node()


def boot_id() -> str:
    """Return the id of this boot of the kernel, or an empty text where there is none.

    Containers on one host share it; see `pid_namespace`.
    """
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the name of this process's PID namespace, or an empty text.

    Process ids of two containers are comparable only with the same boot id *and* namespace.
    """
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""


_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # a number that Linux gives it for good (PROC_PID_INIT_INO)


def kernel_counts_as_we_do() -> bool:
    """Tell whether the numbers of processes in the kernel's log are those that this process knows.

    In a container they are not: a number there may by chance be that of another process here.
    """
    return pid_namespace() == _INITIAL_PID_NAMESPACE


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on (field 3 of proc(5)), or an empty list."""
    try:
        text = (_PROC / str(int(pid)) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command, in parentheses, may itself hold blanks and parentheses: count from the last one.
    return text.rpartition(")")[2].split()


def process_start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot, or None: no such process, or no /proc.

    Together with the pid it names a process for good: pids are reused, (pid, start) pairs are not.
    """
    fields = stat_fields(pid)
    try:
        return int(fields[19])  # field 22 of proc(5); the list begins with field 3
    except (IndexError, ValueError):
        return None


def process_state(pid: int) -> str | None:
    """Return the state letter of process `pid` (R, S, D, T, t, Z, ...), or None like above."""
    fields = stat_fields(pid)
    return fields[0] if fields else None


def process_is_gone(pid: int, start_ticks: int | None) -> bool:
    """Tell whether the process of that pid and start is *provably* gone from this PID namespace.

    A zombie is gone: nothing runs in it any more. Without /proc a pid in use is no proof either way.
    """
    state = process_state(pid)
    if state is None:
        return not _pid_exists(pid)
    if state in ("Z", "X"):
        return True
    now = process_start_ticks(pid)
    return start_ticks is not None and now is not None and now != start_ticks


def _pid_exists(pid: int) -> bool:
    if pid <= 0 or os.name != "posix":  # on Windows `os.kill(pid, 0)` would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
