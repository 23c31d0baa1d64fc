"""The kernel's files.

/proc, /sys and control groups. What is absent, or not ours to see, is None or empty, never an exception.

`root` stands before every path, so that a test can show a machine that is not its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from resilience_sdk.system import hostinfo


def below(root: str, path: str) -> Path:
    """Return the absolute `path` as it lies under `root`."""
    return Path(root) / path.lstrip("/")


def text(path: Path) -> str | None:
    """Return the contents without surrounding blanks, None where they cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """Return the whole number in a file, None where there is none (`max`, a negative one for "not known" stays)."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """Return the lines `name value` of a file by name; `separator` as in `str.split`, blanks by default."""
    found = {}
    for line in (text(path) or "").splitlines():
        name, *rest = line.split(separator, 1)
        found[name.strip()] = rest[0].strip() if rest else ""
    return found


def count(path: Path, name: str) -> int | None:
    """Return the whole number in the line `name number` of a file, None where there is none."""
    found = fields(path).get(name, "")
    return int(found) if found.isdecimal() else None


def entries(path: Path) -> list[Path]:
    """Return what a directory holds, by name; nothing where it cannot be listed."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


_NO_LIMIT = 1 << 60  # version 1 writes a huge number where there is no limit


def groups(root: str, controller: str) -> Iterator[Path]:
    """Yield the directories of the groups that limit this process, innermost first.

    In a container the path that the kernel names may not be there: then the visible root is its group.
    """
    base = below(root, "/sys/fs/cgroup")
    places: list[Path] = []
    for line in (text(below(root, "/proc/self/cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            places += [place / path.lstrip("/") for place in (base, base / "unified")]
        elif controller in controllers.split(","):
            places += [base / name / path.lstrip("/") for name in dict.fromkeys((controller, controllers))]
    seen: set[Path] = set()
    for place in [*places, base / controller, base]:
        while place.is_relative_to(base):
            if place not in seen and place.is_dir():
                seen.add(place)
                yield place
            place = place.parent


def limits(root: str, controller: str, *names: str) -> list[tuple[int, Path]]:
    """Return each limit that stands in a file of one of these names, and the group that has it, innermost first."""
    return [
        (limit, group)
        for group in groups(root, controller)
        for name in names
        if (limit := number(group / name)) is not None and limit < _NO_LIMIT
    ]


class MemoryLeft(NamedTuple):
    """How much memory this process and its children may still take, of how much; bytes."""

    free: int
    total: int
    group: Path | None
    """The control group whose limit is nearest; None: it is the machine's memory."""


def memory_left(root: str = "/") -> MemoryLeft | None:
    """Return what the nearest limit leaves: the machine's memory, or that of a control group. None: not to be read."""
    info = fields(below(root, "/proc/meminfo"), ":")
    if not {"MemTotal", "MemAvailable"} <= info.keys():
        return None
    total, free = (1024 * int(info[name].partition(" ")[0]) for name in ("MemTotal", "MemAvailable"))
    found = MemoryLeft(free, total, None)
    for most, group in limits(root, "memory", "memory.max", "memory.limit_in_bytes"):
        left = max(0, most - _used(group))
        if left < found.free:  # it may be a parent's: what other groups below it use counts too
            found = MemoryLeft(left, most, group)
    return found


def _used(group: Path) -> int:
    """Return what counts against a group's limit and cannot be taken back at once.

    Its page cache can, that of files that were read more than once (`active`) too, which a training's data are.
    """
    used = number(group / "memory.current")
    if used is None:
        used = number(group / "memory.usage_in_bytes")
    statistics = fields(group / "memory.stat")
    prefix = "total_" if "total_inactive_file" in statistics else ""  # of the first version: with the groups below
    cache = sum(int(statistics.get(f"{prefix}{name}", "0")) for name in ("inactive_file", "active_file"))
    return max(0, (used or 0) - cache)


def oom_kills(root: str = "/") -> int | None:
    """Return how many processes of this process's group were killed for memory; None where nobody counts."""
    for group in groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (kills := count(group / name, "oom_kill")) is not None:
                return kills
    return None


def status_fields(pid: int, thread: int | None = None) -> dict[str, str]:
    """Return the fields of /proc/<pid>/status, or of one thread's; empty when there is none."""
    path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
    return fields(Path(path), ":")


def has_signal(mask: str | None, number: int) -> bool:
    """Tell whether a signal is in a mask of /proc/<pid>/status, such as `SigCgt`."""
    try:
        return bool(int(mask or "0", 16) >> (number - 1) & 1)
    except ValueError:
        return False


def is_traced(pid: int) -> bool:
    """Tell whether a debugger is attached."""
    return status_fields(pid).get("TracerPid", "0") != "0"


def is_suspended(pid: int) -> bool:
    """Tell whether a process was stopped from its terminal (Ctrl-Z): a shell has taken the foreground back."""
    fields = hostinfo.stat_fields(pid)[:6]
    if len(fields) < 6 or fields[0] != "T":
        return False
    _, _, group, _, terminal, foreground = fields
    return terminal != "0" and foreground != group


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


_READ_FOR_S = 0.05  # of a process with very many descriptors the rest is not seen
_STANDARD = range(3)
_NO_STORAGE = ("/dev/", "/proc/", "/sys/")
_DELETED = " (deleted)"


def written_files(pid: int) -> dict[str, int]:
    """Return the files that a process has open for writing, and how far each has been written (bytes).

    Logs are none of them: what is open for appending, and what the standard output goes into. Nor is a file that has
    no name any more, or that nothing was written into. Empty where nobody can tell. The files themselves are not
    touched: their storage may not answer.
    """
    found: dict[str, int] = {}
    logs: set[str] = set()
    until = time.monotonic() + _READ_FOR_S
    try:
        numbers = sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd") if name.isdigit())
    except OSError:
        return {}
    for number in numbers:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            if number in _STANDARD:
                logs.add(path)
            elif path.startswith("/") and not path.startswith(_NO_STORAGE) and not path.endswith(_DELETED):
                position = _position(fields(Path(f"/proc/{pid}/fdinfo/{number}"), ":"))
                if position:
                    found[path] = max(position, found.get(path, 0))
        except (OSError, ValueError):  # it was closed meanwhile
            continue
        if time.monotonic() > until:
            break
    return {path: position for path, position in found.items() if path not in logs}


def _position(info: Mapping[str, str]) -> int:
    """Return how far a file was written, by its `fdinfo`; 0 where it is not open for that."""
    flags = int(info.get("flags", "0"), 8)
    is_written = flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND
    return int(info.get("pos", "0")) if is_written else 0
