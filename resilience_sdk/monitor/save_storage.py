"""The place into which a save that stalls writes, and whether it answers.

The path is what the blocked call of the rank names. A process of its own tries the place, since whoever touches a dead
mount may be stuck in the kernel: nobody waits for it, and there is one for each rank at most.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.core import console
from resilience_sdk.monitor.thread_waits import call_name, read_call, read_memory
from resilience_sdk.system import programs
from resilience_sdk.system.mounts import mount_of

if TYPE_CHECKING:
    import subprocess

_MAX_PATH = 4096
_MAX_ANSWER = 4096
_AGAIN_S = 20.0  # between two tries of one place
_PAGE = 4096
_COLLECT_S = 0.05
_SILENT_S = 1.0  # before it the program may not have begun
_HERE = -100  # AT_FDCWD
# Calls by the number of the argument that is the path; beside it that of the directory which it is relative to.
_PATHS = {
    **dict.fromkeys(("open", "rename", "unlink", "mkdir", "stat", "lstat"), (0, None)),
    **dict.fromkeys(("openat", "renameat", "renameat2", "unlinkat", "mkdirat", "newfstatat", "statx"), (1, 0)),
}
_DESCRIPTORS = {
    **dict.fromkeys(
        (
            *("read", "write", "pread64", "pwrite64", "readv", "writev", "close", "fsync", "fdatasync", "syncfs"),
            *("ftruncate", "fallocate", "sendfile", "fstat", "getdents64", "flock", "fcntl"),
        ),
        0,
    ),
    "copy_file_range": 2,
}


def path_of(pid: int, threads: Iterable[int]) -> str | None:
    """Return the file that the first of these threads which is in a call on one is blocked on; None where none is."""
    for thread in threads:
        call = read_call(pid, thread)
        name = call_name(call) if call is not None else ""
        found = None
        if call is not None and name in _PATHS:
            at, relative_to = _PATHS[name]
            found = _named(pid, call.arguments[at], None if relative_to is None else call.arguments[relative_to])
        elif call is not None and name in _DESCRIPTORS:
            found = _link(f"/proc/{pid}/fd/{call.arguments[_DESCRIPTORS[name]]}")
        if found is not None and read_call(pid, thread) == call and found.startswith("/"):
            return found
    return None


def _named(pid: int, pointer: int, directory: int | None) -> str | None:
    """Return the absolute path in a text of another process's memory, which may hold anything."""
    data = b""
    while pointer and b"\0" not in data and len(data) < _MAX_PATH:
        # Up to the end of a page at a time: the next one may not be there.
        more = read_memory(pid, pointer + len(data), _PAGE - (pointer + len(data)) % _PAGE)
        if not more:
            return None
        data += more
    text, end, _ = data.partition(b"\0")
    if not text or not end or len(text) >= _MAX_PATH:
        return None
    name = os.fsdecode(text)
    if name.startswith("/"):
        return os.path.normpath(name)
    number = None if directory is None else directory & 0xFFFFFFFF
    is_here = number is None or number == _HERE & 0xFFFFFFFF
    base = _link(f"/proc/{pid}/cwd" if is_here else f"/proc/{pid}/fd/{number}")
    return None if base is None else os.path.normpath(os.path.join(base, name))


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


@attrs.define
class _Try:
    """One try of one place."""

    path: str
    process: subprocess.Popen[bytes]
    began: float
    text: bytes = b""
    is_over: bool = False

    def look(self) -> None:
        """Take what it has said; never waits."""
        if self.is_over or self.process.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            while len(self.text) < _MAX_ANSWER and (more := os.read(self.process.stdout.fileno(), _MAX_ANSWER)):
                self.text += more
        self.is_over = self.process.poll() is not None

    def end(self) -> bool:
        """Kill it, and tell whether it is gone: what is stuck in the kernel stays until that lets it go."""
        if self.process.stdout is not None:
            self.process.stdout.close()
        return programs.kill(self.process, _COLLECT_S)


class SaveStorage:
    """Tries the places of saves that stall. The monitor's only thread."""

    def __init__(self) -> None:
        """Try nothing yet."""
        self._tries: dict[int, _Try] = {}
        self._left: list[_Try] = []  # killed, and not gone yet

    def ask(self, rank: int, pid: int, threads: Iterable[int]) -> None:
        """Begin to try the place into which a rank saves, unless that was done a moment ago. Waits for nothing."""
        now = time.monotonic()
        last = self._tries.get(rank)
        if last is not None:
            last.look()
            if not last.is_over or now - last.began < _AGAIN_S:
                return
            last.end()
        path = path_of(pid, threads)
        if path is None or any(tried.path == path for tried in self._left):
            return
        try:
            process = programs.start(programs.PLACE_PROBE, path, stdin=_nowhere(), stdout=_pipe(), stderr=_nowhere())
        except (OSError, ValueError):
            return
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
        self._tries[rank] = _Try(path, process, now)

    def words(self, rank: int) -> str | None:
        """Say into what a rank saves and whether that place answers; None where its path is not known."""
        tried = self._tries.get(rank)
        if tried is None:
            return None
        tried.look()
        return storage_words(tried.path, tried.text.decode(errors="replace"), time.monotonic() - tried.began)

    def path(self, rank: int) -> str | None:
        """Return the file that a rank saves into, as far as it is known."""
        tried = self._tries.get(rank)
        return _shown(tried.path) if tried is not None else None

    def forget(self) -> None:
        """Forget all places; what is stuck in the kernel is left alone."""
        self._left = [tried for tried in (*self._left, *self._tries.values()) if not tried.end()]
        self._tries = {}


_NO_FILES = {
    "fifo": "a FIFO, which nobody reads or feeds",
    "socket": "a socket",
    "device": "a device",
    "directory": "a directory",
}


def storage_words(path: str, answers: str, asked_s: float) -> str:
    """Say what a place is and what of it has answered, by the lines of `system.place_probe`. Pure but for mounts."""
    said = dict(line.partition(" ")[::2] for line in answers.splitlines())
    mount = mount_of(path, "/")
    facts = [words for words in (_NO_FILES.get(said.get("file", "")), mount and _shown(str(mount))) if words]
    text = _shown(path) + (f" ({', '.join(facts)})" if facts else "")
    if "error" in said:
        return f"{text}, beside which a small write fails: {_shown(said['error'])}"
    if "write" in said:
        return f"{text}, beside which a small write takes {_seconds(said['write'])}"
    if "stat" in said:
        missing = f", and has taken no small write for {asked_s:.0f} s" if asked_s >= _SILENT_S else ""
        return f"{text}, whose directory answers{missing}"
    return f"{text}, whose directory has not answered for {asked_s:.0f} s" if asked_s >= _SILENT_S else text


def _shown(text: str) -> str:
    return console.printable(text.replace("\n", "\\n"))


def _seconds(text: str) -> str:
    try:
        return f"{float(text):.2f} s"
    except ValueError:
        return "an unknown time"


def _nowhere() -> int:
    import subprocess  # the monitor, which starts nothing as a rule, does without it

    return subprocess.DEVNULL


def _pipe() -> int:
    import subprocess

    return subprocess.PIPE
