"""Samples of late ranks from /proc, and the activity of each that follows from them.

Nothing is read of a rank that is in time, and nothing here asks the rank itself. Every file may be missing or
unreadable (hardened kernels, processes that end): the activity is unknown then.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from resilience_sdk.hang.activity import (
    Activity,
    ActivitySample,
    ActivityTracker,
    ChildProcess,
    Kind,
    On,
    OtherThread,
    ThreadCounters,
)
from resilience_sdk.hang.notices import place_of
from resilience_sdk.monitor.evidence import CloseLook, beating_thread, place
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.recorder.page_reader import OpenSection
from resilience_sdk.system.hostinfo import stat_fields

_MAX_THREADS = 512
_MAX_CHILDREN = 256
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NS_PER_TICK = 1_000_000_000 // _TICKS_PER_S
# Fields of /proc/<pid>/stat, counted from the state on.
_PARENT, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS = 1, 11, 12, 19


class ActivityWatch:
    """Follows the ranks of one node that are late. The monitor's only thread."""

    def __init__(self) -> None:
        """Follow nobody yet."""
        self._ranks: dict[Path, _Followed] = {}
        self._survived: list[tuple[str, float]] = []

    def update(self, ranks: Sequence[WatchedRank], now_ns: int, *, start_s: float, period_s: float) -> float | None:
        """Sample who has not moved for `start_s` seconds, every `period_s`; return the seconds until the next sample.

        A rank's clock begins anew with everything that its page shows: a beat, a section that opens or closes.
        """
        next_s: float | None = None
        living = {watched.stem for watched in ranks if watched.alive}
        for stem in [stem for stem in self._ranks if stem not in living]:
            del self._ranks[stem]
        for watched in ranks:
            if not watched.alive:
                continue
            followed = self._ranks.get(watched.stem)
            now_place = place(watched)
            if followed is None or followed.at != now_place:
                if followed is not None and followed.tracker.longest_s:
                    self._survived.append((followed.place, followed.tracker.longest_s))
                came_ns = _since(watched)
                self._ranks[watched.stem] = followed = _Followed(
                    now_place, watched.snapshot.main_lane.stack, now_ns if followed else came_ns, came_ns
                )
            due_s = followed.due_s(now_ns, start_s, period_s)
            if due_s <= 0:
                followed.sample(watched, now_ns)
                due_s = period_s
            next_s = due_s if next_s is None else min(next_s, due_s)
        return next_s

    def sample_now(self, ranks: Sequence[WatchedRank]) -> None:
        """Take one more sample of everybody who is followed: what is decided next is about this moment."""
        for watched in ranks:
            followed = self._ranks.get(watched.stem)
            if watched.alive and followed is not None and followed.tracker.last is not None:
                followed.sample(watched, time.monotonic_ns())

    def take_survived(self) -> list[tuple[str, float]]:
        """Return, once, the places at which ranks stood still and went on, and for how many seconds they had."""
        survived, self._survived = self._survived, []
        return survived

    def note_stacks(self, ranks: Sequence[WatchedRank], look: CloseLook) -> None:
        """Note what a close look has brought: the stacks, and who did not answer."""
        for watched in ranks:
            followed = self._ranks.get(watched.stem)
            if followed is not None and look.places.get(watched.rank) == followed.at:
                frames = look.frames.get(watched.rank)
                answered = watched.rank in look.answered
                followed.tracker.note_stack(time.monotonic_ns(), (frames or ()) if answered else None)
                if watched.rank in look.signalled:  # whether it has answered or not
                    followed.tracker.note_disturbance()
                if frames:
                    followed.place = place_of(watched.snapshot.main_lane.stack, frames)

    def is_still(self, watched: WatchedRank) -> bool:
        """Tell whether nothing moves in a rank, as far as it was looked at; one that is in time moves."""
        tracker = self.tracker(watched)
        return tracker is not None and tracker.is_still

    def place_of(self, watched: WatchedRank) -> str:
        """Return the name of the place where a rank is, as far as its stack is known."""
        followed = self._ranks.get(watched.stem)
        return followed.place if followed is not None else place_of(watched.snapshot.main_lane.stack, ())

    def tracker(self, watched: WatchedRank) -> ActivityTracker | None:
        """Return what is known of a rank's movements since it came to where it is; None while it is in time."""
        followed = self._ranks.get(watched.stem)
        return followed.tracker if followed is not None and followed.tracker.last is not None else None

    def activity(
        self, watched: WatchedRank, *, in_collective: bool | None = None, is_named: bool = False
    ) -> Activity | None:
        """Return what a rank does; None for one that is gone.

        One that is in time moves, as its page shows.
        """
        if not watched.alive:
            return None
        tracker = self.tracker(watched)
        if tracker is None:
            return Activity(Kind.BUSY, detail="it comes on from section to section")
        return tracker.activity(in_collective=in_collective, is_named=is_named)


class _Followed:
    """One rank at one place of its program."""

    def __init__(self, at: object, stack: Sequence[OpenSection], since_ns: int, came_ns: int) -> None:
        self.at = at
        self.place = place_of(stack, ())
        self.tracker = ActivityTracker(came_ns)
        self._since_ns = since_ns
        self._sampled_ns = 0
        self._uses_device: bool | None = None

    def due_s(self, now_ns: int, start_s: float, period_s: float) -> float:
        first_s = start_s - (now_ns - self._since_ns) / 1e9
        return max(first_s, period_s - (now_ns - self._sampled_ns) / 1e9 if self._sampled_ns else first_s)

    def sample(self, watched: WatchedRank, now_ns: int) -> None:
        pid = watched.snapshot.pid
        if self._uses_device is None:
            self._uses_device = uses_device(pid)
        self._sampled_ns = now_ns
        thread = beating_thread(watched)
        last = self.tracker.last
        self.tracker.add(take_sample(pid, thread, uses_device=self._uses_device, known=last.others if last else {}))


def _since(watched: WatchedRank) -> int:
    """Return when a rank has moved last, as its page shows."""
    lane = watched.snapshot.main_lane
    entered = [section.entered_ns for section in lane.stack]
    return max([watched.snapshot.created_ns, lane.last_ns, watched.snapshot.resumed_ns or 0, *entered])


def take_sample(
    pid: int, thread: int, *, uses_device: bool = False, known: Mapping[int, OtherThread]
) -> ActivitySample:
    """Return what /proc says of a process now; `thread` is the one that beats, `known` its others as last seen."""
    at_ns = time.monotonic_ns()
    fields = stat_fields(pid)
    if not os.path.exists(f"/proc/{pid}/task/{thread}"):
        thread = pid
    return ActivitySample(
        at_ns=at_ns,
        state=fields[0] if fields else "",
        beating=_thread_counters(pid, thread),
        on=blocked_on(pid, thread),
        others=dict(_other_threads(pid, thread, known)),
        children=dict(_children(pid)),
        uses_device=uses_device,
    )


def uses_device(pid: int) -> bool:
    """Tell whether a process has the driver of an accelerator open."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{number}").startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/")):
                    return True
    return False


def _thread_counters(pid: int, thread: int) -> ThreadCounters | None:
    times = _schedstat(f"/proc/{pid}/task/{thread}/schedstat")
    switches = _field(_read(f"/proc/{pid}/task/{thread}/status"), "voluntary_ctxt_switches")
    if times is None or switches is None:
        return None
    return ThreadCounters(times[0], times[1], switches, _io_bytes(f"/proc/{pid}/task/{thread}/io"))


def _other_threads(pid: int, thread: int, known: Mapping[int, OtherThread]) -> Iterator[tuple[int, OtherThread]]:
    for tid in _numbers(f"/proc/{pid}/task")[:_MAX_THREADS]:
        times = None if tid == thread else _schedstat(f"/proc/{pid}/task/{tid}/schedstat")
        if times is not None:
            before = known.get(tid)
            age_s = before.age_s if before is not None else _age_s(_read(f"/proc/{pid}/task/{tid}/stat"))
            yield tid, OtherThread(*times, age_s)


def _age_s(stat: str) -> float:
    """Return for how long a thread has been there, in seconds."""
    with contextlib.suppress(ValueError, IndexError):
        started_s = int(stat.rpartition(")")[2].split()[_START_TICKS]) / _TICKS_PER_S
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    return 0.0


def _children(pid: int) -> Iterator[tuple[int, ChildProcess]]:
    """Yield all descendants of a process but zombies."""
    pending, seen = [pid], 0
    while pending and seen < _MAX_CHILDREN:
        for child in _child_pids(pending.pop()):
            seen += 1
            text = _read(f"/proc/{child}/stat")
            fields = text.rpartition(")")[2].split()
            if len(fields) <= _START_TICKS or fields[0] in ("Z", "X"):
                continue
            pending.append(child)
            # The sum over all threads; schedstat of a process is that of its main thread.
            cpu_ns = (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) * _NS_PER_TICK
            name = text.partition("(")[2].rpartition(")")[0]
            queued_ns = (_schedstat(f"/proc/{child}/schedstat") or (0, 0))[1]
            yield child, ChildProcess(cpu_ns, queued_ns, _io_bytes(f"/proc/{child}/io"), fields[0], name)


def _child_pids(pid: int) -> list[int]:
    found: list[int] = []
    listed = False
    for tid in _numbers(f"/proc/{pid}/task")[:_MAX_THREADS]:
        with contextlib.suppress(OSError, ValueError):
            found += [int(word) for word in Path(f"/proc/{pid}/task/{tid}/children").read_text().split()]
            listed = True
    if listed or not os.path.exists(f"/proc/{pid}"):
        return found
    # A kernel without lists of children: look who names it as parent.
    return [other for other in _numbers("/proc") if stat_fields(other)[_PARENT : _PARENT + 1] == [str(pid)]]


# System calls, each with its numbers on x86_64 and aarch64. One that is not here is something else, and never taken as
# proof. Calls on a descriptor are sorted by what that is; those on a path concern a file.
_ON_DESCRIPTOR = On.PIPE
_CALLS_BY_OBJECT: Mapping[On, str] = {
    _ON_DESCRIPTOR: "read 0 63, write 1 64, pread64 17 67, pwrite64 18 68, readv 19 65",
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
    On.SOCKET: (
        "recvfrom 45 207, recvmsg 47 212, sendto 44 206, sendmsg 46 211, connect 42 203, "
        "accept 43 202, accept4 288 242, recvmmsg 299 243"
    ),
    On.CHILD: "wait4 61 260, waitid 247 95",
    On.LOCK: "futex 202 98, futex_waitv 449 449",
    On.SLEEP: "nanosleep 35 101, clock_nanosleep 230 115",
    On.FILE_LOCK: "flock 73 32, fcntl 72 25",
}
_MACHINES = ("x86_64", "aarch64")


def _numbers_on(machine: str) -> Mapping[int, On]:
    """Return by its number what a thread that is blocked in a system call waits for; empty for other machines."""
    if machine not in _MACHINES:
        return {}
    column = 1 + _MACHINES.index(machine)
    rows = [(on, call.split()) for on, calls in _CALLS_BY_OBJECT.items() for call in calls.split(", ")]
    return {int(row[column]): on for on, row in rows if row[column] != "-"}


_FUTEX_FLAGS = 0x180  # private to the process, and which clock an end is told by
_CALLS = _numbers_on(os.uname().machine if hasattr(os, "uname") else "")
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
        (r"sk_wait|skb_wait|accept|unix_stream|inet_|tcp_", On.SOCKET),
    )
)


def blocked_on(pid: int, thread: int) -> On:
    """Return what a thread is blocked on; OTHER where it runs, or where that cannot be known."""
    call = _read(f"/proc/{pid}/task/{thread}/syscall").split()
    if len(call) > 1 and call[0].isdigit():
        on = _CALLS.get(int(call[0]), On.OTHER)
        if on is _ON_DESCRIPTOR:
            return _of_descriptor(pid, int(call[1], 16))
        return On.MUTEX if on is On.LOCK and _is_mutex(call) else on
    channel = _read(f"/proc/{pid}/task/{thread}/wchan").strip("\0\n ")
    return next((on for pattern, on in _CHANNELS if pattern.search(channel)), On.OTHER)


def _is_mutex(call: Sequence[str]) -> bool:
    """Tell whether a futex call waits for a mutex of the C library that others wait for too.

    Such a wait is the plain one, for the value 2 and without an end. Conditions and semaphores wait for a bit set: of
    these Python's locks are made, and with them CUDA waits under `cudaDeviceScheduleBlockingSync`.
    """
    return len(call) > 4 and int(call[2], 16) & ~_FUTEX_FLAGS == 0 and call[3] == "0x2" and call[4] == "0x0"


def _of_descriptor(pid: int, number: int) -> On:
    """Return what a blocked read() reads: a pipe, a socket, or a file on a file system that takes its time."""
    try:
        link = os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return On.PIPE
    return On.SOCKET if link.startswith("socket:") else On.PIPE if link.startswith("pipe:") else On.FILE


def _schedstat(path: str) -> tuple[int, int] | None:
    with contextlib.suppress(ValueError):
        cpu_ns, queued_ns, _ = _read(path).split()
        return int(cpu_ns), int(queued_ns)
    return None


def _io_bytes(path: str) -> int | None:
    text = _read(path)
    read, written = _field(text, "rchar"), _field(text, "wchar")
    return None if read is None or written is None else read + written


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s*(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _numbers(path: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(path) if name.isdigit()]
    return []


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
