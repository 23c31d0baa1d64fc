"""What /proc tells about a process; every reader is tolerant of one that is gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def status_fields(pid: int, thread: int | None = None) -> dict[str, str]:
    """Return the fields of /proc/<pid>/status, or of one thread's; empty when there is none."""
    path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def has_signal(mask: str | None, number: int) -> bool:
    """Tell whether a signal is in a mask of /proc/<pid>/status, such as `SigCgt`."""
    try:
        return bool(int(mask or "0", 16) >> (number - 1) & 1)
    except ValueError:
        return False


def is_traced(pid: int) -> bool:
    """Tell whether a debugger is attached."""
    return status_fields(pid).get("TracerPid", "0") != "0"


def reads_terminal(pid: int) -> bool:
    """Tell whether the main thread waits for a terminal: `input()`, or a debugger's prompt.

    `breakpoint()` does not read: GNU readline waits in select() on descriptor 0 alone.
    """
    with contextlib.suppress(OSError):
        if not os.readlink(f"/proc/{pid}/fd/0").startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
            return False
        call = _system_call(pid)
        if call is not None:
            name, first_argument = call
            return (name, first_argument) in (("read", 0), ("select", 1))
        # Not shown to us (ptrace restrictions): the wait channel knows of reads, and at_prompt() of prompts.
        wchan = Path(f"/proc/{pid}/wchan").read_text()
        return "tty" in wchan or "wait_woken" in wchan
    return False


# select(1, ...) can only wait for descriptor 0.
_CALLS = {
    "x86_64": {0: "read", 23: "select", 270: "select"},
    "aarch64": {63: "read", 72: "select"},
}.get(os.uname().machine if hasattr(os, "uname") else "", {})


def _system_call(pid: int) -> tuple[str, int] | None:
    """Return name and first argument of what the main thread is blocked in; None where it cannot be known."""
    if not _CALLS:
        return None
    try:
        fields = Path(f"/proc/{pid}/syscall").read_text().split()
        return _CALLS.get(int(fields[0]), "other"), int(fields[1], 16)
    except (OSError, ValueError, IndexError):
        return None  # running, gone, or not ours to see
