"""Questions to one rank: "write your stacks and flight record" and "dump your stack". Each is sent, then polled.

Neither needs the rank's training thread. The first is answered by the rank's helper thread, which needs the
GIL. The second by a signal handler in C, even while an extension holds the GIL; it reads frames that a running
thread may change under it, so it is for ranks whose helper is silent: there nothing runs.
Nothing here waits: `evidence` asks all ranks first and then collects.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from resilience_sdk.monitor.procfs import has_signal, status_fields
from resilience_sdk.monitor.targets import Target, is_ours

_ASK_FLIGHT = b"f"
_MOST_STACK_BYTES = 1 << 20
_MOST_FLIGHT_BYTES = 32 << 20
# The first words of a dump with all threads, of one thread, and of CPython 3.14's.
_HEADERS = (b"Thread 0x", b"Stack (most recent")
_STOPPED = {"T": "it is stopped", "t": "it is stopped by a debugger", "Z": "it is dead", "X": "it is dead"}


class StackRequest:
    """Asks one rank for the stack of its main thread."""

    def __init__(self, target: Target, dump_signal: int) -> None:
        """Prepare; nothing is sent yet. `dump_signal` 0 means that dumps are switched off."""
        self.target = target
        self._signal = dump_signal
        self._path = target.file(".stack")
        self._start = 0
        self._last_size = 0
        self._open_threads: tuple[int, ...] = ()

    def send(self) -> str | None:
        """Send the dump signal; return why not, in words, when the rank cannot answer.

        The default action of the signal is death: it goes only to a process that is ours and whose handler
        is there.
        """
        if not self._signal:
            return "stack dumps are switched off"
        status = status_fields(self.target.pid)
        if not status or not is_ours(self.target):
            return "the process is gone"
        if (state := status.get("State", "")[:1]) in _STOPPED:
            return f"{_STOPPED[state]} (state {state}) and cannot answer"
        if status.get("TracerPid", "0") != "0":
            return "a debugger is attached, and would stop it at the dump signal"
        if not has_signal(status.get("SigCgt"), self._signal):
            return "it has no handler for the dump signal"
        size = _size(self._path)
        if size is None:
            return "its stack file is missing"
        self._start = self._last_size = size
        self._open_threads = self._threads_that_let_it_through()
        try:
            return None if self.target.send(self._signal) else "the process is gone"
        except OSError as error:
            return f"the dump signal cannot be sent: {error.strerror}"

    def poll(self) -> str | None:
        """Return the dump once it is complete, else None. Call it every few milliseconds.

        A dump is written in many small pieces, so growth alone does not end it. The kernel knows: while the
        handler runs, the signal is blocked in the thread that runs it.
        """
        size = _size(self._path)
        if size is None or size == self._start or size != self._last_size:
            self._last_size = size or self._last_size
            return None
        return None if self._handler_runs() else self.partial()

    def partial(self) -> str | None:
        """Return what is there of a dump; None when nothing is, or nothing that looks like one."""
        data = _read(self._path, self._start, _MOST_STACK_BYTES)
        if data is None or not any(header in data for header in _HEADERS):
            return None
        return data.decode("utf-8", "replace")

    def _threads_that_let_it_through(self) -> tuple[int, ...]:
        pid = self.target.pid
        return tuple(tid for tid in _thread_ids(pid) if not self._blocked_in(tid))

    def _handler_runs(self) -> bool:
        return any(self._blocked_in(tid) for tid in self._open_threads)

    def _blocked_in(self, tid: int) -> bool:
        return has_signal(status_fields(self.target.pid, tid).get("SigBlk"), self._signal)


class FlightRequest:
    """Asks one rank's helper thread for torch's flight record and the stacks of all threads."""

    def __init__(self, target: Target) -> None:
        """Prepare; nothing is sent yet."""
        self.target = target
        self._answer = target.file(".fr.json")
        self._stacks = target.file(".threads")
        self._before: tuple[int, int, int] | None = None
        self._stacks_before: tuple[int, int, int] | None = None

    def send(self) -> str | None:
        """Write the request into the rank's FIFO; return why not, in words, when nobody can answer."""
        state = status_fields(self.target.pid).get("State", "Z")[:1]
        if state in _STOPPED:
            return f"{_STOPPED[state]} (state {state}) and cannot answer"
        self._before = _identity(self._answer)
        self._stacks_before = _identity(self._stacks)
        try:
            fd = os.open(self.target.file(".fifo"), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:  # ENXIO: nobody reads it
            return f"its helper thread is not there ({error.strerror})"
        try:
            if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                return "its request pipe is no pipe"
            os.write(fd, _ASK_FLIGHT)
        except OSError as error:  # a full pipe: it has not read for a long time
            return f"its helper thread does not read requests ({error.strerror})"
        finally:
            os.close(fd)
        return None

    def poll(self) -> str | None:
        """Return the record's JSON text once a newer one than before is there, else None.

        The rank renames it into place, so a file that is there is complete.
        """
        if _identity(self._answer) in (None, self._before):
            return None
        data = _read(self._answer, 0, _MOST_FLIGHT_BYTES)
        return None if data is None else data.decode("utf-8", "replace")

    def stacks(self) -> str | None:
        """Return the stacks that came with the record, the main thread last; None when there are none."""
        if _identity(self._stacks) in (None, self._stacks_before):
            return None
        data = _read(self._stacks, 0, _MOST_STACK_BYTES)
        return data.decode("utf-8", "replace") if data else None


def _thread_ids(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _size(path: Path) -> int | None:
    identity = _identity(path)
    return None if identity is None else identity[2]


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        info = path.lstat()
    except OSError:
        return None
    return (info.st_ino, info.st_mtime_ns, info.st_size) if stat.S_ISREG(info.st_mode) else None


def _read(path: Path, start: int, most: int) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(fd, "rb") as file:
        file.seek(start)
        return file.read(most)
