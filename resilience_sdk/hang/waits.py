"""Waits of a thread, as the kernel shows them: for what, and when they end by themselves. Pure.

/proc/<pid>/task/<tid>/syscall has the call that a thread is blocked in, with its arguments. The time that an argument
points to lies in the memory of that process, which may change at any moment and holds whatever it holds: `time_of`
takes nothing that is no time. A wait that is told by a relative time ends that long after it was first seen, at most.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import attrs


class On(str, Enum):
    """Objects that a still thread waits on."""

    LOCK = "a lock"
    MUTEX = "a lock of native code"
    """One that is held; what waits for a device is woken in another way, see `of_call`."""
    SLEEP = "sleep"
    SOCKET = "a socket"
    ACCEPT = "a socket that accepts connections"
    PIPE = "a pipe"
    POLL = "poll"
    CHILD = "a child process"
    STOPPED_CHILD = "a child process that is stopped"
    TRACED_CHILD = "a child process that is stopped by a debugger"
    WORKER = "a worker thread"
    FILE = "a file"
    FILE_LOCK = "a file lock"
    COLLECTIVE = "a collective"
    OTHER = ""


LOCKS = (On.LOCK, On.MUTEX)

# System calls, each with its numbers on x86_64 and aarch64. One that is not here is something else, and never taken as
# proof. Calls on a descriptor are sorted by what that is; those on a path concern a file.
ON_DESCRIPTOR = On.PIPE
_CALLS_BY_OBJECT: Mapping[On, str] = {
    ON_DESCRIPTOR: "read 0 63, write 1 64, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66",
    On.FILE: (
        "open 2 -, openat 257 56, close 3 57, fsync 74 82, fdatasync 75 83, sync 162 81, "
        "syncfs 306 267, msync 26 227, ftruncate 77 46, fallocate 285 47, sendfile 40 71, "
        "copy_file_range 326 285, rename 82 -, renameat 264 38, renameat2 316 276, unlink 87 -, "
        "unlinkat 263 35, mkdir 83 -, mkdirat 258 34, stat 4 -, fstat 5 80, lstat 6 -, "
        "newfstatat 262 79, statx 332 291, getdents64 217 61, io_uring_enter 426 426, "
        "io_getevents 208 4"
    ),
    On.POLL: (
        "poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_wait 232 -, "
        "epoll_pwait 281 22, epoll_pwait2 441 441"
    ),
    On.SOCKET: ("recvfrom 45 207, recvmsg 47 212, sendto 44 206, sendmsg 46 211, connect 42 203, recvmmsg 299 243"),
    On.ACCEPT: "accept 43 202, accept4 288 242",
    On.CHILD: "wait4 61 260, waitid 247 95",
    On.LOCK: "futex 202 98, futex_waitv 449 449",
    On.SLEEP: "nanosleep 35 101, clock_nanosleep 230 115",
    On.FILE_LOCK: "flock 73 32, fcntl 72 25",
    On.OTHER: "restart_syscall 219 128",
}
_MACHINES = ("x86_64", "aarch64")


def calls_on(machine: str) -> Mapping[int, tuple[str, On]]:
    """Return by its number the name of a call, and what a thread that is blocked in it waits for; {} elsewhere."""
    if machine not in _MACHINES:
        return {}
    column = 1 + _MACHINES.index(machine)
    rows = [(on, call.split()) for on, calls in _CALLS_BY_OBJECT.items() for call in calls.split(", ")]
    return {int(row[column]): (row[0], on) for on, row in rows if row[column] != "-"}


@attrs.frozen
class SystemCall:
    """A call that a thread is blocked in. The pointers are those of its process."""

    number: int
    arguments: tuple[int, ...]
    stack_pointer: int


def parse_call(text: str) -> SystemCall | None:
    """Return the call in the text of /proc/<pid>/task/<tid>/syscall; None for one that runs or cannot be read."""
    words = text.split()
    if len(words) < 8 or not words[0].isdigit():
        return None
    try:
        numbers = [int(word, 16) for word in words[1:8]]
    except ValueError:
        return None
    return SystemCall(int(words[0]), tuple(numbers[:6]), numbers[6])


class EndForm(Enum):
    """How the end of a wait is told."""

    AT = "at"  # a reading of a clock
    AFTER = "after"  # seconds from when it began
    NEVER = "never"
    UNKNOWN = "unknown"


@attrs.frozen
class WaitTime:
    """When a wait ends, as its call tells it. `seconds` is a duration, or a reading of clock number `clock`."""

    told: EndForm
    seconds: float = 0.0
    clock: int = 1


_UNKNOWN, _NEVER = WaitTime(EndForm.UNKNOWN), WaitTime(EndForm.NEVER)
MONOTONIC, _REALTIME, _BOOTTIME = 1, 0, 7  # numbers of the kernel's clocks
CLOCKS = (MONOTONIC, _REALTIME, _BOOTTIME)
_TIME_BYTES = 16  # two numbers of 64 bits, on both machines
_MAX_S = 20 * 365 * 86400.0  # of a wait, and of what a clock shows beyond its start: more is no time
_MAX_CLOCK_S = 2.0**33
_FUTEX_COMMANDS, _FUTEX_REALTIME = 0x7F, 0x100
_FUTEX_WAIT, _FUTEX_LOCK_PI, _FUTEX_WAIT_BITSET, _FUTEX_WAIT_REQUEUE_PI, _FUTEX_LOCK_PI2 = 0, 6, 9, 11, 13
_LATE_NS = 2_000_000_000  # after its end no wait goes on for so long
_FUTEX_FLAGS = 0x180  # private to the process, and which clock an end is told by

Memory = Callable[[int, int], "bytes | None"]
"""Reads so many bytes at an address of the process; None where it cannot."""


def of_call(name: str, on: On, arguments: Sequence[int]) -> On:
    """Return what a call waits for, by its arguments.

    A wait for descriptors without any is a sleep. A mutex of the C library that others wait for too is the plain futex,
    for the value 2 and without an end. Conditions and semaphores wait for a bit set: of these Python's locks are made,
    and with them CUDA waits under `cudaDeviceScheduleBlockingSync`.
    """
    if name in ("select", "pselect6") and _int32(arguments[0]) == 0:
        return On.SLEEP
    if name in ("poll", "ppoll") and arguments[1] == 0:
        return On.SLEEP
    if name == "futex" and arguments[1] & ~_FUTEX_FLAGS == 0 and arguments[2] == 2 and arguments[3] == 0:
        return On.MUTEX
    return on


def time_of(name: str, arguments: Sequence[int], memory: Memory) -> WaitTime:
    """Return when a call ends by itself, as its arguments tell; unknown where they tell nothing that can be a time."""
    if name == "nanosleep":
        return _after(arguments[0], memory)
    if name == "clock_nanosleep":
        is_absolute = bool(arguments[1] & 1)
        return _at(arguments[2], _int32(arguments[0]), memory) if is_absolute else _after(arguments[2], memory)
    if name == "futex":
        return _time_of_futex(arguments, memory)
    if name == "futex_waitv":
        return _at(arguments[3], _int32(arguments[4]), memory) if arguments[3] else _NEVER
    if name in ("select", "pselect6"):
        return _after(arguments[4], memory, in_microseconds=name == "select") if arguments[4] else _NEVER
    if name in ("poll", "epoll_wait", "epoll_pwait"):
        left_ms = _int32(arguments[2 if name == "poll" else 3])
        return _NEVER if left_ms < 0 else WaitTime(EndForm.AFTER, left_ms / 1e3)
    if name in ("ppoll", "epoll_pwait2"):
        pointer = arguments[2 if name == "ppoll" else 3]
        return _after(pointer, memory) if pointer else _NEVER
    return _UNKNOWN


def _time_of_futex(arguments: Sequence[int], memory: Memory) -> WaitTime:
    operation, pointer = arguments[1], arguments[3]
    command = operation & _FUTEX_COMMANDS
    if command not in (_FUTEX_WAIT, _FUTEX_LOCK_PI, _FUTEX_WAIT_BITSET, _FUTEX_WAIT_REQUEUE_PI, _FUTEX_LOCK_PI2):
        return _UNKNOWN
    if not pointer:
        return _NEVER
    if command == _FUTEX_WAIT:
        return _after(pointer, memory)
    is_real = command == _FUTEX_LOCK_PI or bool(operation & _FUTEX_REALTIME)
    return _at(pointer, _REALTIME if is_real else MONOTONIC, memory)


def _after(pointer: int, memory: Memory, *, in_microseconds: bool = False) -> WaitTime:
    seconds = _seconds_at(pointer, memory, 1e6 if in_microseconds else 1e9)
    return _UNKNOWN if seconds is None or seconds > _MAX_S else WaitTime(EndForm.AFTER, seconds)


def _at(pointer: int, clock: int, memory: Memory) -> WaitTime:
    seconds = _seconds_at(pointer, memory, 1e9)
    is_time = seconds is not None and seconds <= _MAX_CLOCK_S and clock in CLOCKS
    return WaitTime(EndForm.AT, seconds, clock) if is_time and seconds is not None else _UNKNOWN


def _seconds_at(pointer: int, memory: Memory, per_second: float) -> float | None:
    data = memory(pointer, _TIME_BYTES) if pointer else None
    if data is None or len(data) != _TIME_BYTES:
        return None
    whole, part = struct.unpack("=qq", data)
    return whole + part / per_second if whole >= 0 and 0 <= part < per_second else None


def _int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


@attrs.frozen
class Wait:
    """What a thread is blocked in. Times are CLOCK_MONOTONIC of its host, in nanoseconds."""

    on: On = On.OTHER
    end_ns: int | None = None
    """When it ends by itself; None: never, or nobody knows."""
    since_ns: int = 0
    """When this very wait was first seen."""
    polls_one: bool = False
    """Whether it polls for a single descriptor: under a loop of asyncio that is the one its own process wakes it by."""


@attrs.define
class WaitFollower:
    """Follows the waits of one thread from look to look, so that one with a relative end keeps that."""

    _key: object = None
    _stack_pointer: int = 0
    _wait: Wait = attrs.field(factory=Wait)

    def note(
        self,
        call: SystemCall,
        name: str,
        on: On,
        time: WaitTime,
        now_ns: int,
        *,
        switches: int | None = None,
        now_s: Callable[[int], float | None],
        polls_one: bool = False,
    ) -> Wait:
        """Note the wait that is seen now, and return it with its end.

        Args:
            call: The call as the kernel shows it.
            name: Its name.
            on: What it waits for.
            time: What it tells of its end.
            now_ns: When it was seen, on CLOCK_MONOTONIC.
            switches: How often the thread had begun to wait, where that is known: another wait may look the same.
            now_s: What another clock shows now, in seconds.
            polls_one: See `Wait`.
        """
        key = (call, switches)
        if name == "restart_syscall":
            # What a signal has interrupted goes on: a stop and SIGCONT, say. The kernel remembers the end, we do, too.
            end_ns = self._wait.end_ns
            is_over = key != self._key and end_ns is not None and end_ns < now_ns - _LATE_NS
            if self._key is None or call.stack_pointer != self._stack_pointer or is_over:
                self._wait = Wait(since_ns=now_ns)
            self._key, self._stack_pointer = key, call.stack_pointer
            return self._wait
        is_new = key != self._key
        since_ns = now_ns if is_new else self._wait.since_ns
        if time.told is EndForm.AFTER and (is_new or self._wait.end_ns is None):
            end_ns = now_ns + int(time.seconds * 1e9)
        elif time.told is EndForm.AFTER:
            end_ns = self._wait.end_ns
        else:
            end_ns = _end_ns(time, now_ns, now_s)
        self._key, self._stack_pointer = key, call.stack_pointer
        self._wait = Wait(on, end_ns, since_ns, polls_one)
        return self._wait

    def forget(self) -> Wait:
        """Note that the thread runs, or is stopped: what was seen last may yet go on."""
        self._key = () if self._key is not None else None
        return Wait()


def _end_ns(time: WaitTime, now_ns: int, now_s: Callable[[int], float | None]) -> int | None:
    """Return the end that is a reading of a clock, on CLOCK_MONOTONIC; None where it lies out of all bounds."""
    if time.told is not EndForm.AT:
        return None
    clock_s = now_ns / 1e9 if time.clock == MONOTONIC else now_s(time.clock)
    if clock_s is None or abs(time.seconds - clock_s) > _MAX_S:
        return None
    return now_ns + int((time.seconds - clock_s) * 1e9)
