"""What a run does, as `strace -ff` saw it: which process started, opened, bound, signalled what. No opinion here.

`strace -ff -y` writes a file per thread, so that no call is torn in two, and the paths of descriptors.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

CALLS = (
    "execve", "execveat", "clone", "clone3", "fork", "vfork",
    "bind", "listen", "connect", "socketpair",
    "open", "openat", "creat", "mkdir", "mkdirat", "mknod", "mknodat", "memfd_create",
    "symlink", "symlinkat", "link", "linkat", "rename", "renameat", "renameat2",
    "rt_sigaction", "kill", "tkill", "tgkill", "rt_sigqueueinfo", "pidfd_send_signal",
)  # fmt: skip
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\w+|\?)(.*)")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DIRECTORY = re.compile(r"\w+<([^>]*)>, ")
_WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT")
_NAMES = {"symlink": -1, "symlinkat": -1, "link": -1, "linkat": -1, "rename": -1, "renameat": -1, "renameat2": -1}


def why_not() -> str | None:
    """Return why nothing can be traced here; None where it can."""
    if shutil.which("strace") is None:
        return "strace is missing: apt-get install strace"
    tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.strip()[-200:]}"


def command(prefix: Path) -> tuple[str, ...]:
    """Return what stands before a command that is to be traced into files `PREFIX.TID`."""
    return ("strace", "-ff", "-y", "-s", "400", "--seccomp-bpf", "-e", f"trace={','.join(CALLS)}", "-o", str(prefix))


@attrs.frozen
class Call:
    """One system call that did not fail."""

    pid: int
    """Of the process, whichever thread made it."""
    role: str
    name: str
    arguments: str
    result: str

    @property
    def texts(self) -> list[str]:
        """The strings among the arguments."""
        return _TEXT.findall(self.arguments)

    @property
    def writes(self) -> str | None:
        """The path of what it makes or opens for writing; None where it does neither."""
        if self.name in ("open", "openat", "creat"):
            if self.name != "creat" and not _WRITES.search(self.arguments):
                return None
            resolved = self.result.partition("<")[2].rstrip(">")  # as the kernel resolved it
            return resolved or self._asked_for()  # another thread may close it before strace asks
        if self.name in ("mkdir", "mkdirat", "mknod", "mknodat") or self.name in _NAMES:
            return self.texts[_NAMES.get(self.name, 0)]
        return None

    def _asked_for(self) -> str:
        """Return the path as the caller has written it, below the directory that it is relative to."""
        asked = self.texts[0] if self.texts else "unavailable"
        below = _DIRECTORY.match(self.arguments)
        return asked if below is None or asked == "unavailable" else str(Path(below[1]) / asked)


@attrs.frozen
class Traced:
    """All calls, and the processes by pid."""

    calls: tuple[Call, ...]
    roles: Mapping[int, str]
    commands: Mapping[int, str]
    """Of each process that was started by execve: its command line, as strace prints it."""


def read(prefix: Path, roles: Mapping[str, str]) -> Traced:
    """Read the files of a trace; `roles` are names by a part of a command line.

    A process that was only forked is called `child of NAME`; a thread is its process.
    """
    raw = {int(path.suffix[1:]): list(_lines(path)) for path in prefix.parent.glob(f"{prefix.name}.*")}
    parents, processes = _ancestry(raw)
    commands = {
        processes.get(tid, tid): arguments
        for tid, lines in raw.items()
        for name, arguments, result in lines
        if name.startswith("execve") and result.startswith("0")
    }
    names: dict[int, str] = {}

    def name_of(pid: int) -> str:
        if pid not in names:
            command_line = commands.get(pid, "")
            found = [role for part, role in roles.items() if part in command_line]
            if pid not in commands:
                found = [f"child of {name_of(parents[pid])}" if pid in parents else "nobody"]
            names[pid] = found[0] if found else f"unknown: {command_line[:300]}"
        return names[pid]

    calls = tuple(
        Call(process, name_of(process), name, arguments, result)
        for tid, lines in sorted(raw.items())
        for process in [processes.get(tid, tid)]
        for name, arguments, result in lines
    )
    return Traced(calls, {pid: name_of(pid) for pid in {processes.get(tid, tid) for tid in raw}}, commands)


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    for line in path.read_text(errors="replace").splitlines():
        found = _CALL.match(line)
        if found is not None and (not found[3].startswith("-") or "EINPROGRESS" in found[4]):
            yield found[1], found[2], found[3] + found[4]


def _ancestry(raw: Mapping[int, list[tuple[str, str, str]]]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the parent of each process, and the process of each thread."""
    started = {
        int(result.split()[0]): (tid, "CLONE_THREAD" in arguments)
        for tid, lines in raw.items()
        for name, arguments, result in lines
        if name in ("clone", "clone3", "fork", "vfork") and result.split()[0].isdigit()
    }

    def process_of(tid: int) -> int:
        while tid in started and started[tid][1]:
            tid = started[tid][0]
        return tid

    processes = {tid: process_of(tid) for tid in raw}
    return {pid: process_of(by) for pid, (by, is_thread) in started.items() if not is_thread}, processes
