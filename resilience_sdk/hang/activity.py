"""Activity of a rank, judged from outside: does it work, burn time, wait, or stand still? Pure.

A rank that is late is sampled about once a second (`monitor.activity` reads /proc). Movement is judged per thread and
child: the thread that beats, and those that it waits for. The sharpest sign is the beating thread's own count of
voluntary context switches: zero in every way to be stuck, whatever other threads of the process do. What each state
looks like was measured, see docs/hangs.md.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum

import attrs

_NANO = 1e9
_LONGEST_GAP_S = 3.0  # between two samples; of a longer one nobody knows what the machine was doing meanwhile
_RECENT_S = 6.0  # what a rank does "now" is what it did in these last seconds
_LEAST_SAMPLES = 3
_LEAST_WATCHED_S = 2.0  # before this a still rank may be between two wake-ups
_WORKS_SHARE = 0.10  # of a core, time in the run queue included: a rank that is starved works too
_STARVED = 9  # times its CPU time that a thread's wait for a processor counts as work; beside it, wake-ups wait too
_BURST_NS = 1_000_000  # CPU time per wake-up that polls do not reach (0.03 to 0.23 ms) and bursts of work do
_ANSWER_NS = 100_000_000  # CPU time in which a rank has written its stack, when a signal asks it to
_CHILD_WORKS_SHARE = 0.02
_ABOVE_BACKGROUND = 2.0  # times what a thread has used over its life before
_LEAST_WAKES = 2
_STARTED_BEFORE_NS = 50_000_000  # ages of threads are told in ticks
_POOL_WORKS_SHARE = 0.05
_CHILD_IO_PER_S = 4096  # of a child; less is talk
_SAME_STACKS = 4  # in a row, before a stack is said to stay


class Kind(str, Enum):
    """The states of an awaited rank."""

    STOPPED = "stopped"
    """By a signal (process state T), or a process that it waits for is."""
    STUCK = "stuck"
    """Nothing moved: no CPU time, no I/O, no wake-up."""
    BUSY = "busy"
    """It works, or waits for a thread or child that does."""
    SPINNING = "spinning"
    """It burns CPU time and its stack stays."""
    POLLING = "polling"
    """It wakes up and does nothing."""
    WAITING = "waiting"
    """Inside a collective, the store or a file lock: for somebody else."""
    UNKNOWN = "unknown"
    """The evidence cannot be read, or allows for several of these."""


class On(str, Enum):
    """Objects that a still thread waits on."""

    LOCK = "a lock"
    MUTEX = "a lock of native code"
    """One that is held; what waits for a device is woken in another way, see `monitor.activity`."""
    SLEEP = "sleep"
    SOCKET = "a socket"
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


_IDLE_ON = (On.SOCKET, On.PIPE, On.POLL, On.CHILD, On.WORKER, On.FILE)
_LOCKS = (On.LOCK, On.MUTEX)
_STOPPED_BY = {"T": On.STOPPED_CHILD, "t": On.TRACED_CHILD}
_FOR_CHILDREN = (On.CHILD, On.PIPE, On.POLL, On.SOCKET)


@attrs.frozen
class ThreadCounters:
    """Counters of the thread that beats; all only grow."""

    cpu_ns: int
    queued_ns: int
    """Time in which it could have run and no processor was free."""
    switches: int
    """Voluntary context switches: how often it began to wait."""
    io_bytes: int | None
    """Read and written through file descriptors of files and pipes; None where the kernel does not tell. Sockets and
    mapped files are not in it."""


@attrs.frozen
class OtherThread:
    """Another thread of the rank."""

    cpu_ns: int
    queued_ns: int
    age_s: float


@attrs.frozen
class ChildProcess:
    """A process that the rank has started, however deep (DataLoader workers, compilers, subprocesses)."""

    cpu_ns: int
    queued_ns: int
    io_bytes: int | None
    state: str
    name: str = ""


@attrs.frozen
class ActivitySample:
    """One look at a rank. Times are CLOCK_MONOTONIC of its host, in nanoseconds."""

    at_ns: int
    state: str
    """Of the process, as in /proc/<pid>/stat; empty where unknown."""
    beating: ThreadCounters | None
    """None where it cannot be read."""
    on: On = On.OTHER
    others: Mapping[int, OtherThread] = attrs.field(factory=dict)
    children: Mapping[int, ChildProcess] = attrs.field(factory=dict)
    uses_device: bool = False
    """Whether an accelerator's driver is open, in which a thread may wait unseen."""


@attrs.frozen
class Activity:
    """What an awaited rank does."""

    kind: Kind
    still_s: float = 0.0
    """Seconds that were watched without any movement, wake-ups without work being none; of a rank that spins, for how
    long its stack has been the same."""
    on: On = On.OTHER
    detail: str = ""
    """The evidence, for a sentence that begins with the rank."""

    @property
    def waits_idly(self) -> bool:
        """Whether it stands still for something outside that may rightly take long (a rollout, an upload)."""
        return self.kind is Kind.STUCK and self.on in _IDLE_ON


class ActivityTracker:
    """Follows one rank from sample to sample while it stays where it is in its program."""

    def __init__(self, since_ns: int | None = None) -> None:
        """Begin without any sample; `since_ns`: since when the rank has been where it is."""
        self._since_ns = since_ns
        self._recent: deque[_Movement] = deque()
        self._last: ActivitySample | None = None
        self._samples = 0
        self._still_s = 0.0  # without work
        self._quiet_s = 0.0  # without so much as a wake-up
        self._gap_s = 0.0  # the longest time between two wake-ups without work
        self._stopped_s = 0.0
        self._frames: tuple[str, ...] = ()
        self._same_stacks = 0
        self._same_since_ns = 0
        self._same_for_s = 0.0
        self._unanswered = False
        self._disturbed = False
        self._woke = False
        self._background: dict[int, float] = {}
        self._fresh: set[int] = set()  # threads that the rank has started where it is
        self._stuck_s = 0.0
        self._survived_s = 0.0

    @property
    def longest_s(self) -> float:
        """The longest time that the rank was stuck here, in seconds; the one that lasts included."""
        return max(self._survived_s, self._stuck_s)

    @property
    def is_known(self) -> bool:
        """Whether the rank was watched for long enough to tell what it does."""
        return self._samples >= _LEAST_SAMPLES

    @property
    def is_still(self) -> bool:
        """Whether nothing moved between the last two samples."""
        return self._still_s > 0 or self._stopped_s > 0

    @property
    def survived_s(self) -> float:
        """The longest time that the rank was stuck here and then was not, in seconds."""
        return self._survived_s

    @property
    def last(self) -> ActivitySample | None:
        """The newest sample."""
        return self._last

    def add(self, sample: ActivitySample) -> None:
        """Add a sample, which is newer than all before."""
        for tid, thread in sample.others.items():
            if tid not in self._background:
                self._note_thread(tid, thread, sample.at_ns)
        last, self._last = self._last, sample
        self._samples += 1
        disturbed, self._disturbed = self._disturbed and sample.state not in ("T", "t"), False
        if last is None:
            return
        movement = _Movement.between(last, sample, self._background)
        if disturbed:
            if self.is_still and movement.own_ns <= _ANSWER_NS:
                self._stand(movement.watched_s, 0)
            return
        self._recent.append(movement)
        while self._recent and sample.at_ns - self._recent[0].at_ns > _RECENT_S * _NANO:
            self._recent.popleft()
        if sample.state in ("T", "t"):
            self._stopped_s += movement.watched_s
            return
        self._stopped_s = 0.0
        helped = None if movement.works else self._helped(sample, self._watched_s(), None)
        if movement.works or last.state in ("T", "t") or (helped is not None and helped.kind is Kind.BUSY):
            self._still_s = self._quiet_s = self._gap_s = 0.0
            self._woke = False
        elif helped is None and sample.state != "D":  # else nobody knows whether this is stillness: it does not count
            self._stand(movement.watched_s, movement.wakes)

    def _note_thread(self, tid: int, thread: OtherThread, at_ns: int) -> None:
        """Note what a thread uses by itself: that of one which was started here is the work that is waited for."""
        is_fresh = self._since_ns is not None and at_ns - thread.age_s * _NANO >= self._since_ns - _STARTED_BEFORE_NS
        if is_fresh:
            self._fresh.add(tid)
        self._background[tid] = 0.0 if is_fresh else thread.cpu_ns / _NANO / max(thread.age_s, 1.0)

    def _stand(self, watched_s: float, wakes: int) -> None:
        self._still_s += watched_s
        if wakes:
            # The time before the first wake-up is no period: a signal may have come, or somebody looked at it.
            self._gap_s = max(self._gap_s, self._quiet_s) if self._woke else self._gap_s
            self._woke, self._quiet_s = True, 0.0
        else:
            self._quiet_s += watched_s

    def _watched_s(self) -> float:
        return sum(movement.watched_s for movement in self._recent)

    def note_disturbance(self) -> None:
        """Do not count what moves until the next sample: the rank itself had to answer a signal of ours."""
        self._disturbed = True

    def note_stack(self, at_ns: int, frames: Sequence[str] | None) -> None:
        """Note the stack of the beating thread, innermost first; None when the rank was asked and did not answer.

        Empty: it has answered, but the beating thread's is not among the stacks that can be told apart.
        """
        self._unanswered = frames is None
        if frames is not None and not frames:
            return  # it has answered, and of the thread that beats there is no stack
        if frames is None or tuple(frames) != self._frames:
            self._frames, self._same_stacks, self._same_since_ns = tuple(frames or ()), 0, at_ns
        self._same_stacks += frames is not None
        self._same_for_s = (at_ns - self._same_since_ns) / _NANO

    def activity(self, *, in_collective: bool | None = None, is_named: bool = False) -> Activity:
        """Return what the rank does now.

        Args:
            in_collective: Whether its stack or the flight recorder shows it inside a collective; None: not known.
            is_named: Whether the flight recorder proves that it has not come to a collective, so that it cannot be
                inside the device's call that belongs to it.
        """
        found = self._activity(in_collective, is_named)
        stuck_s = found.still_s if found.kind is Kind.STUCK else 0.0
        if stuck_s < self._stuck_s:
            self._survived_s = max(self._survived_s, self._stuck_s)
        self._stuck_s = stuck_s
        return found

    def _activity(self, in_collective: bool | None, is_named: bool) -> Activity:
        last = self._last
        if last is None or last.state in ("Z", "X", "") or (last.beating is None and last.state not in ("T", "t")):
            return Activity(Kind.UNKNOWN, detail="its threads cannot be read")
        if last.state in ("T", "t"):
            return Activity(Kind.STOPPED, self._stopped_s, detail=f"it is stopped (process state {last.state})")
        watched_s = self._watched_s()
        if self._samples < _LEAST_SAMPLES:
            return Activity(Kind.UNKNOWN, self._still_s, last.on, "it was not watched for long enough yet")
        own_share = _share(sum(m.own_ns for m in self._recent), watched_s)
        if any(movement.works for movement in self._recent):
            return self._moving(last, own_share, watched_s)
        return self._still(last, watched_s, in_collective, is_named)

    def _moving(self, last: ActivitySample, own_share: float, watched_s: float) -> Activity:
        burns = own_share >= _WORKS_SHARE
        read = sum(movement.io_bytes for movement in self._recent)
        if burns and not read and self._unanswered:
            text = f"it uses {own_share:.0%} of a core and answers no question: something holds its GIL"
            return Activity(Kind.UNKNOWN, 0.0, last.on, text)
        if burns and not read and self._same_stacks >= _SAME_STACKS:
            text = f"it uses {own_share:.0%} of a core, and its stack has been the same for {self._same_for_s:.0f} s"
            return Activity(Kind.SPINNING, self._same_for_s, last.on, text)
        does = []
        if own_share >= 0.005:
            does.append(f"uses {own_share:.0%} of a core")
        if read:
            does.append(f"reads and writes {_bytes(read / max(watched_s, 1e-3))}/s")
        return Activity(Kind.BUSY, 0.0, last.on, "it " + (" and ".join(does) or "works in short bursts"))

    def _still(self, last: ActivitySample, watched_s: float, in_collective: bool | None, is_named: bool) -> Activity:
        still = f"its thread used no CPU time and did no I/O for {self._still_s:.0f} s"
        on = On.COLLECTIVE if in_collective else last.on
        stopped = [child for child in last.children.values() if child.state in ("T", "t")]
        helped = self._helped(last, watched_s, in_collective)
        if helped is not None:
            return attrs.evolve(helped, still_s=self._still_s, on=on)
        if last.state == "D":
            return Activity(Kind.UNKNOWN, self._still_s, on, f"{still}, inside the kernel (process state D)")
        if in_collective or last.on is On.FILE_LOCK:
            return Activity(Kind.WAITING, self._still_s, on, f"{still}, in {on.value}")
        polls = self._quiet_s < self._still_s and self._quiet_s <= max(_LONGEST_GAP_S, 2 * self._gap_s)
        if polls and last.on is On.SOCKET:
            return Activity(Kind.BUSY, 0.0, on, "it receives from a socket")
        if stopped and last.on in _FOR_CHILDREN:
            child = next((child for child in stopped if child.state == "t"), stopped[0])
            text = f"{still}, and waits while its child '{child.name}' is stopped (process state {child.state})"
            return Activity(Kind.STUCK, self._still_s, _STOPPED_BY[child.state], text)
        if polls:
            return Activity(Kind.POLLING, self._still_s, on, "it wakes up again and again and does nothing")
        still = f"its thread used no CPU time, did no I/O and did not wake up for {self._quiet_s:.0f} s"
        if self._quiet_s < min(_LEAST_WATCHED_S, 2 * watched_s / 3):
            return Activity(Kind.UNKNOWN, self._quiet_s, on, "it was not watched for long enough yet")
        if last.uses_device and not is_named and on in (On.LOCK, On.POLL, On.OTHER) and not self._in_python_lock():
            return Activity(Kind.UNKNOWN, self._quiet_s, on, f"{still}; it may be inside a call of the device")
        if on is On.OTHER:
            return Activity(Kind.UNKNOWN, self._quiet_s, on, f"{still}; what it waits in is not known")
        if on in _LOCKS and (self._waits_for_worker() or self._fresh_move()):
            on = On.WORKER  # which may be uploading, and sockets are not seen
        return Activity(Kind.STUCK, self._quiet_s, on, f"{still}, waiting on {on.value}")

    def _helped(self, last: ActivitySample, watched_s: float, in_collective: bool | None) -> Activity | None:
        """Return what the rank does where a child or another thread works, for which it may be waiting."""
        children_s = sum(movement.children_ns for movement in self._recent)
        child_share = _share(children_s, watched_s)
        lasting = _share(sum(movement.lasting_ns for movement in self._recent), watched_s)
        io_per_s = sum(movement.children_io for movement in self._recent) / max(watched_s, 1e-3)
        child_moves = lasting >= _CHILD_WORKS_SHARE or io_per_s >= _CHILD_IO_PER_S
        waits_for_it = self._waits_for_worker()
        if child_share >= _WORKS_SHARE or (child_moves and (last.on in (On.CHILD, On.PIPE) or waits_for_it)):
            polls = sum(movement.wakes for movement in self._recent) >= _LEAST_WAKES
            if last.on in _FOR_CHILDREN or waits_for_it or polls:
                text = f"it waits while its child processes use {child_share:.0%} of a core"
                return Activity(Kind.BUSY, detail=text)
            text = f"it stands still while its child processes use {child_share:.0%} of a core"
            return Activity(Kind.UNKNOWN, detail=text)
        above = _share(sum(movement.above_ns for movement in self._recent), watched_s)
        others = _share(sum(movement.others_ns for movement in self._recent), watched_s)
        if above >= _WORKS_SHARE and (waits_for_it or in_collective):
            return Activity(Kind.BUSY, detail=f"it waits while its other threads use {others:.0%} of a core")
        # A pool of native threads may upload under a lock; without the time in the queue, which housekeeping has too.
        cpu = _share(sum(movement.others_cpu_ns for movement in self._recent), watched_s)
        may_wait = cpu >= _CHILD_WORKS_SHARE if waits_for_it else cpu >= _POOL_WORKS_SHARE and last.on in _LOCKS
        raw = _share(sum(movement.raw_ns for movement in self._recent), watched_s)
        if raw >= _WORKS_SHARE or above >= _WORKS_SHARE or may_wait:
            text = f"it stands still while its other threads use {others:.0%} of a core"
            return Activity(Kind.UNKNOWN, detail=text)
        return None

    def _waits_for_worker(self) -> bool:
        return any(_WORKER_WAIT.search(frame) for frame in self._frames[:4])

    def _fresh_move(self) -> bool:
        """Tell whether a thread that was started here has used the processor at all in the last seconds."""
        return any(movement.moved & self._fresh for movement in self._recent)

    def _in_python_lock(self) -> bool:
        return bool(self._frames) and bool(_PYTHON_LOCK.search(self._frames[0]))


# A pool's future, a thread's join, a queue that somebody fills.
_WORKER_WAIT = re.compile(
    r"(/concurrent/futures/_base\.py:\S+ (result|exception|wait|as_completed)"
    r"|/multiprocessing/(pool|process|queues|connection|popen_\w+)\.py:\S+ \w+"
    r"|/s3transfer/futures\.py:\S+ \w+"
    r"|/threading\.py:\S+ (join|_wait_for_tstate_lock)|/queue\.py:\S+ (get|put|join)|/subprocess\.py:\S+ \w+"
    r"|/torch/utils/data/dataloader\.py:\S+ \w+)$"
)
_PYTHON_LOCK = re.compile(r"/(threading|queue|selectors|subprocess|socket|ssl)\.py:\S+ \w+$")


@attrs.frozen
class _Movement:
    """The difference of two samples that follow one another."""

    at_ns: int
    watched_s: float
    works: bool
    wakes: int
    own_ns: int
    io_bytes: int
    others_ns: int
    raw_ns: int
    """CPU time of all other threads, without that in which they waited for a processor."""
    above_ns: int
    """Of threads that use more than they always have."""
    others_cpu_ns: int
    """The latter without the time in which they waited for a processor."""
    moved: frozenset[int]
    """Other threads that have used the processor."""
    children_ns: int
    lasting_ns: int
    """CPU time of children that were there before."""
    children_io: int

    @classmethod
    def between(cls, last: ActivitySample, now: ActivitySample, background: Mapping[int, float]) -> _Movement:
        elapsed_s = (now.at_ns - last.at_ns) / _NANO
        watched_s = min(max(elapsed_s, 1e-6), _LONGEST_GAP_S)
        own_ns = wakes = io_bytes = 0
        works = False
        if last.beating is not None and now.beating is not None:
            own_ns = max(0, now.beating.cpu_ns - last.beating.cpu_ns)
            queued_ns = max(0, now.beating.queued_ns - last.beating.queued_ns)
            wakes = max(0, now.beating.switches - last.beating.switches)
            io_bytes = max(0, (now.beating.io_bytes or 0) - (last.beating.io_bytes or 0))
            # Who waits for a stopped child may poll for it, however much one look at it costs.
            bursts = own_ns >= _BURST_NS * max(1, wakes) and not (_for_stopped(last) and _for_stopped(now))
            own_ns += min(queued_ns, _STARVED * own_ns)
            works = bursts or io_bytes > 0 or own_ns >= _WORKS_SHARE * elapsed_s * _NANO
        others_ns = raw_ns = others_cpu_ns = above_ns = 0
        moved = set()
        for tid, thread in now.others.items():
            before = last.others.get(tid)
            used_ns = max(0, thread.cpu_ns - (before.cpu_ns if before is not None else 0))
            queued_ns = max(0, thread.queued_ns - (before.queued_ns if before is not None else 0))
            is_above = used_ns > _ABOVE_BACKGROUND * background.get(tid, 0.0) * elapsed_s * _NANO
            others_cpu_ns += used_ns if is_above else 0
            raw_ns += used_ns
            if used_ns:
                moved.add(tid)
            used_ns += min(queued_ns, _STARVED * used_ns)
            others_ns += used_ns
            above_ns += used_ns if is_above else 0
        children_ns = lasting_ns = children_io = 0
        for pid, child in now.children.items():
            known = last.children.get(pid)
            used_ns = max(0, child.cpu_ns - (known.cpu_ns if known is not None else 0))
            queued_ns = max(0, child.queued_ns - (known.queued_ns if known is not None else 0))
            used_ns += min(queued_ns, _STARVED * used_ns)
            children_ns += used_ns
            if known is not None:  # what comes and goes (a shell's `sleep`) is talk
                lasting_ns += used_ns
                children_io += max(0, (child.io_bytes or 0) - (known.io_bytes or 0))
        scale = watched_s / elapsed_s if elapsed_s > 0 else 1.0
        return cls(
            at_ns=now.at_ns,
            watched_s=watched_s,
            works=works,
            wakes=wakes,
            own_ns=int(own_ns * scale),
            io_bytes=io_bytes,
            others_ns=int(others_ns * scale),
            raw_ns=int(raw_ns * scale),
            others_cpu_ns=int(others_cpu_ns * scale),
            above_ns=int(above_ns * scale),
            moved=frozenset(moved),
            children_ns=int(children_ns * scale),
            lasting_ns=int(lasting_ns * scale),
            children_io=children_io,
        )


def _for_stopped(sample: ActivitySample) -> bool:
    """Tell whether a rank waits while a child of its is stopped."""
    return sample.on in _FOR_CHILDREN and any(child.state in ("T", "t") for child in sample.children.values())


def _share(cpu_ns: float, over_s: float) -> float:
    return cpu_ns / _NANO / over_s if over_s > 0 else 0.0


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
