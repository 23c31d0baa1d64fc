"""Samples of late ranks from /proc, and the activity of each that follows from them.

Nothing is read of a rank that is in time, and nothing here asks the rank itself. Every file may be missing or
unreadable (hardened kernels, processes that end): the activity is unknown then.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from resilience_sdk.hang.activity import Activity, ActivityTracker, Kind
from resilience_sdk.hang.notices import place_of
from resilience_sdk.hang.samples import ActivitySample, ChildProcess, OtherThread, ThreadCounters
from resilience_sdk.hang.timers import HangRules
from resilience_sdk.monitor.evidence import CloseLook, beating_thread, place
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.monitor.thread_waits import ThreadWaits
from resilience_sdk.system.hostinfo import stat_fields

_MAX_THREADS = 512
_MAX_CHILDREN = 256
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_NS_PER_TICK = 1_000_000_000 // _TICKS_PER_S
# Fields of /proc/<pid>/stat, counted from the state on.
_PARENT, _USER_TICKS, _SYSTEM_TICKS, _START_TICKS = 1, 11, 12, 19


class ActivityWatch:
    """Follows the ranks of one node that are late. The monitor's only thread."""

    def __init__(self, rules: HangRules) -> None:
        """Follow nobody yet."""
        self._horizon_s = rules.horizon_s
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
                    watched, now_place, now_ns if followed else came_ns, came_ns, self._horizon_s
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
                threads = look.threads.get(watched.rank, ()) if answered else ()
                followed.tracker.note_stack(time.monotonic_ns(), (frames or ()) if answered else None, threads)
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

    def __init__(self, watched: WatchedRank, at: object, since_ns: int, came_ns: int, horizon_s: float) -> None:
        self.at = at
        self.place = place_of(watched.snapshot.main_lane.stack, ())
        self.tracker = ActivityTracker(came_ns, horizon_s)
        self._waits = ThreadWaits(watched.snapshot.pid)
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
        last, workers = self.tracker.last, self.tracker.workers
        known = last.others if last else {}
        self._waits.keep((thread, *workers))
        self.tracker.add(
            take_sample(pid, thread, uses_device=self._uses_device, known=known, waits=self._waits, workers=workers)
        )


def _since(watched: WatchedRank) -> int:
    """Return when a rank has moved last, as its page shows."""
    lane = watched.snapshot.main_lane
    entered = [section.entered_ns for section in lane.stack]
    return max([watched.snapshot.created_ns, lane.last_ns, watched.snapshot.resumed_ns or 0, *entered])


def take_sample(
    pid: int,
    thread: int,
    *,
    uses_device: bool = False,
    known: Mapping[int, OtherThread],
    waits: ThreadWaits | None = None,
    workers: Iterable[int] = (),
) -> ActivitySample:
    """Return what /proc says of a process now.

    Args:
        pid: The process.
        thread: The one that beats.
        uses_device: Whether an accelerator's driver is open.
        known: Its other threads as last seen.
        waits: What follows the waits of its threads; None for a single look.
        workers: Threads of which it is to be known what they wait in.
    """
    at_ns = time.monotonic_ns()
    fields = stat_fields(pid)
    if not os.path.exists(f"/proc/{pid}/task/{thread}"):
        thread = pid
    waits = waits or ThreadWaits(pid)
    beating = _thread_counters(pid, thread)
    wait = waits.look(thread, beating.switches if beating is not None else None)
    return ActivitySample(
        at_ns=at_ns,
        state=fields[0] if fields else "",
        beating=beating,
        on=wait.on,
        end_ns=wait.end_ns,
        polls_one=wait.polls_one,
        workers={worker: waits.look(worker, _switches(pid, worker)) for worker in workers},
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
    switches = _switches(pid, thread)
    if times is None or switches is None:
        return None
    return ThreadCounters(times[0], times[1], switches, _io_bytes(f"/proc/{pid}/task/{thread}/io"))


def _switches(pid: int, thread: int) -> int | None:
    return _field(_read(f"/proc/{pid}/task/{thread}/status"), "voluntary_ctxt_switches")


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
        for child in child_pids(pending.pop()):
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


def child_pids(pid: int) -> list[int]:
    """Return the processes that a process has started and that are still there."""
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
