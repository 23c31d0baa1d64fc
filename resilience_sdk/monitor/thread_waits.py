"""Waits of the threads of other processes, and when they end, from /proc.

Every file may be missing or unreadable (hardened kernels, threads that end): nothing is known then. The memory of
another process is read only where a call points to a time or a name, and nothing there is trusted.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence

from resilience_sdk.hang.waits import (
    ON_DESCRIPTOR,
    EndForm,
    On,
    SystemCall,
    Wait,
    WaitFollower,
    WaitTime,
    calls_on,
    of_call,
    parse_call,
    time_of,
)

_CALLS = calls_on(os.uname().machine if hasattr(os, "uname") else "")
_UNKNOWN = WaitTime(EndForm.UNKNOWN)
_TIMED = (On.LOCK, On.SLEEP, On.POLL)
# Functions of the kernel, for processes whose calls are not shown to us; the first that matches.
_CHANNELS: Sequence[tuple[re.Pattern[str], On]] = tuple(
    (re.compile(pattern), on)
    for pattern, on in (
        (r"futex", On.LOCK),
        (r"nanosleep", On.SLEEP),
        (r"pipe_(read|wait|write)", On.PIPE),
        (r"poll|ep_|select", On.POLL),
        (r"^(do_wait|wait4|kernel_wait)", On.CHILD),
        (r"locks_lock|flock|posix_lock", On.FILE_LOCK),
        (r"fuse|request_wait|nfs|rpc_wait|io_schedule|folio_wait|wb_wait|io_cqring|ceph|lustre|osc_", On.FILE),
        (r"accept", On.ACCEPT),
        (r"sk_wait|skb_wait|unix_stream|inet_|tcp_", On.SOCKET),
    )
)


class ThreadWaits:
    """Follows what the threads of one process wait in. The monitor's only thread."""

    def __init__(self, pid: int) -> None:
        """Follow threads of this process, none yet."""
        self._pid = pid
        self._followers: dict[int, WaitFollower] = {}

    def look(self, thread: int, switches: int | None = None) -> Wait:
        """Return what a thread is blocked in now; `switches`: how often it had begun to wait, where that is known."""
        follower = self._followers.setdefault(thread, WaitFollower())
        shown = _text(self._pid, thread, "syscall")
        call = parse_call(shown)
        if call is None:
            wait = follower.forget()
            if shown.startswith("running"):  # and its channel may be that of a wait that has begun since
                return wait
            channel = _text(self._pid, thread, "wchan").strip("\0\n ")
            on = next((on for pattern, on in _CHANNELS if pattern.search(channel)), On.OTHER)
            return Wait(on) if on is not On.OTHER else wait
        name, on = _CALLS.get(call.number, ("", On.OTHER))
        on = _of_descriptor(self._pid, call.arguments[0]) if on is ON_DESCRIPTOR else of_call(name, on, call.arguments)
        told, polls_one = _UNKNOWN, False
        if on in _TIMED:
            told = time_of(name, call.arguments, lambda at, size: read_memory(self._pid, at, size))
            polls_one = name.startswith("epoll") and _polls_one(self._pid, call.arguments[0])
            if read_call(self._pid, thread) != call:  # it went on meanwhile, and what was read may be anything
                return follower.forget()
        return follower.note(
            call, name, on, told, time.monotonic_ns(), switches=switches, now_s=_clock_s, polls_one=polls_one
        )

    def keep(self, threads: Iterable[int]) -> None:
        """Forget all threads but these."""
        kept = set(threads)
        for thread in [thread for thread in self._followers if thread not in kept]:
            del self._followers[thread]


def blocked_on(pid: int, thread: int) -> On:
    """Return what a thread is blocked on; OTHER where it runs, or where that cannot be known."""
    return ThreadWaits(pid).look(thread).on


def read_call(pid: int, thread: int) -> SystemCall | None:
    """Return the system call that a thread is blocked in; None where it runs, or where that is not shown to us."""
    return parse_call(_text(pid, thread, "syscall"))


def read_memory(pid: int, address: int, size: int) -> bytes | None:
    """Return bytes of the memory of a process, fewer where it ends; None where they cannot be read."""
    try:
        fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.pread(fd, size, address)
    except (OSError, OverflowError, ValueError):
        return None
    finally:
        os.close(fd)


def call_name(call: SystemCall) -> str:
    """Return the name of a call; empty for one that is not in our table."""
    return _CALLS.get(call.number, ("", On.OTHER))[0]


def _clock_s(clock: int) -> float | None:
    with contextlib.suppress(OSError):
        return time.clock_gettime(clock)
    return None


def _polls_one(pid: int, descriptor: int) -> bool:
    """Tell whether an epoll waits for one descriptor only: a loop of asyncio registers that of its own first."""
    try:
        with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="utf-8", errors="replace") as file:
            found = re.findall(r"^tfd:\s*(\d+)", file.read(1 << 16), re.MULTILINE)
    except OSError:
        return False
    return len(found) == 1


def _of_descriptor(pid: int, number: int) -> On:
    """Return what a blocked read() reads: a pipe, a socket, or a file on a file system that takes its time."""
    try:
        link = os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return On.PIPE
    return On.SOCKET if link.startswith("socket:") else On.PIPE if link.startswith("pipe:") else On.FILE


def _text(pid: int, thread: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{thread}/{name}", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
