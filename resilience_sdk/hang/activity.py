"""Activity of a rank, judged from outside: does it work, burn time, wait, or stand still? Pure.

A rank that is late is sampled about once a second (`monitor.activity` reads /proc). Movement is judged per thread and
child: the thread that beats, and those that it waits for. The sharpest sign is the beating thread's own count of
voluntary context switches: zero in every way to be stuck, whatever other threads of the process do. What each state
looks like was measured, see docs/hangs.md.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.hang.samples import (
    FOR_CHILDREN,
    LONGEST_GAP_S,
    WORKS_SHARE,
    ActivitySample,
    Movement,
    OtherThread,
    share,
)
from resilience_sdk.hang.waits import LOCKS, On, Wait
from resilience_sdk.hang.workers import (
    counts,
    innermost,
    is_idle_loop,
    may_be_waited_for,
    waits_for_thread,
    waits_for_worker,
)

if TYPE_CHECKING:
    from resilience_sdk.hang.evidence import ThreadStack

_NANO = 1e9
_RECENT_S = 6.0  # what a rank does "now" is what it did in these last seconds
_LEAST_SAMPLES = 3
_LEAST_WATCHED_S = 2.0  # before this a still rank may be between two wake-ups
_ANSWER_NS = 100_000_000  # CPU time in which a rank has written its stack, when a signal asks it to
_CHILD_WORKS_SHARE = 0.02
_LEAST_WAKES = 2
_STARTED_BEFORE_NS = 50_000_000  # ages of threads are told in ticks
_POOL_WORKS_SHARE = 0.05
_CHILD_IO_PER_S = 4096  # of a child; less is talk
_MISSES = 2  # questions in a row without an answer, before what holds the GIL is believed
_SAME_STACKS = 4  # in a row, before a stack is said to stay
_LASTING_PART = 0.25  # of the time that a rank is still: a shorter wait of another thread is one of many
_NEVER_S = 1e9
_MAX_WORKERS = 64  # threads that are looked at, each of which costs two small files


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


_IDLE_ON = (On.SOCKET, On.ACCEPT, On.PIPE, On.POLL, On.CHILD, On.WORKER, On.FILE)
_STOPPED_BY = {"T": On.STOPPED_CHILD, "t": On.TRACED_CHILD}


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
    ends_in_s: float | None = None
    """When the wait that it is in, or that of a thread that it may be waiting for, ends by itself, in seconds; None:
    never, or nobody knows."""
    worked_s: float = 0.0
    """Seconds since it worked last: a wake-up is no work."""
    woke_s: float | None = None
    """Seconds since a wait of its ended by itself, where it has not worked since; None where none has."""

    @property
    def waits_idly(self) -> bool:
        """Whether it stands still for something outside that may rightly take long (a rollout, an upload)."""
        return self.kind is Kind.STUCK and self.on in _IDLE_ON


class ActivityTracker:
    """Follows one rank from sample to sample while it stays where it is in its program."""

    def __init__(self, since_ns: int | None = None, horizon_s: float = math.inf) -> None:
        """Begin without any sample.

        Args:
            since_ns: Since when the rank has been where it is.
            horizon_s: Ends of waits that lie further than that after its last work are too far to be waited for.
        """
        self._since_ns = since_ns
        self._horizon_s = horizon_s
        self._worked_ns = since_ns or 0
        self._ahead_ns: int | None = None  # the end of the wait that it is in, which is not short
        self._woke_ns: int | None = None
        self._workers: dict[int, ThreadStack] = {}
        self._is_alone = False  # there is no thread that it may be waiting for, whatever that would do
        self._keep_house: frozenset[int] = frozenset()
        self._worker_looks: deque[tuple[int, Mapping[int, Wait]]] = deque()
        self._recent: deque[Movement] = deque()
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
        self._misses = 0
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
    def workers(self) -> tuple[int, ...]:
        """The threads that it may be waiting for, as far as stacks are known."""
        return tuple(self._workers)[:_MAX_WORKERS]

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
        self._note_waits(sample)
        if last is None:
            self._worked_ns = self._worked_ns or sample.at_ns
            return
        movement = Movement.between(last, sample, self._background)
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
            if last.state not in ("T", "t"):
                self._worked_ns, self._woke_ns = sample.at_ns, None
        elif helped is None and sample.state != "D":  # else nobody knows whether this is stillness: it does not count
            self._stand(movement.watched_s, movement.wakes)

    def _note_waits(self, sample: ActivitySample) -> None:
        """Note what the rank and the threads beside it wait in, and whether a wait of its has come to its end."""
        self._worker_looks.append((sample.at_ns, sample.workers))
        while sample.at_ns - self._worker_looks[0][0] > _RECENT_S * _NANO:
            self._worker_looks.popleft()
        end_ns = sample.end_ns if sample.on in (On.SLEEP, *LOCKS) else None
        if self._ahead_ns is not None and sample.at_ns >= self._ahead_ns:
            self._woke_ns = self._ahead_ns
        if self._ahead_ns is not None and (sample.at_ns >= self._ahead_ns or end_ns is None):
            self._ahead_ns = None
        if end_ns is not None and end_ns - sample.at_ns >= _LEAST_WATCHED_S * _NANO:
            self._ahead_ns = end_ns

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

    def note_stack(self, at_ns: int, frames: Sequence[str] | None, threads: Sequence[ThreadStack] = ()) -> None:
        """Note the stack of the beating thread, innermost first; None when the rank was asked and did not answer.

        Empty: it has answered, but the beating thread's is not among the stacks that can be told apart. `threads` are
        those of the others.
        """
        self._unanswered = frames is None
        self._misses = 0 if frames is not None else self._misses + 1
        if frames is None and self._misses < _MISSES and self._frames:
            self._same_stacks, self._same_since_ns = 0, at_ns
            return  # a machine that is busy answers late: what was seen before holds until it is asked again
        numbered = {thread.native_id: thread for thread in threads if thread.native_id is not None}
        self._workers = {
            tid: thread for tid, thread in numbered.items() if may_be_waited_for(thread.frames, frames or ())
        }
        self._keep_house = frozenset(tid for tid in numbered if tid not in self._workers)
        self._is_alone = bool(frames) and not any(may_be_waited_for(one.frames, frames or ()) for one in threads)
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
        if self._last is not None:
            at_ns, end_ns = self._last.at_ns, self._end_ns(found.on)
            found = attrs.evolve(
                found,
                ends_in_s=None if end_ns is None else (end_ns - at_ns) / _NANO,
                worked_s=max(0.0, (at_ns - self._worked_ns) / _NANO),
                woke_s=None if self._woke_ns is None else (at_ns - self._woke_ns) / _NANO,
            )
        # That a wait ends which has an end says nothing of how long other things may last at this place.
        stuck_s = found.still_s if found.kind is Kind.STUCK and found.ends_in_s is None else 0.0
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
        own_share = share(sum(m.own_ns for m in self._recent), watched_s)
        if any(movement.works for movement in self._recent):
            return self._moving(last, own_share, watched_s)
        return self._still(last, watched_s, in_collective, is_named)

    def _moving(self, last: ActivitySample, own_share: float, watched_s: float) -> Activity:
        burns = own_share >= WORKS_SHARE
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
        polls = self._quiet_s < self._still_s and self._quiet_s <= max(LONGEST_GAP_S, 2 * self._gap_s)
        if polls and last.on is On.SOCKET:
            return Activity(Kind.BUSY, 0.0, on, "it receives from a socket")
        if stopped and last.on in FOR_CHILDREN:
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
        if on in LOCKS:
            seen = self._seen_workers()
            is_for_worker = self._waits_for_worker() and not (self._is_alone and waits_for_thread(self._frames))
            if seen or is_for_worker or self._fresh_move():
                on = On.WORKER  # which may be uploading, and sockets are not seen
            for tid, wait in list(seen.items())[:1]:
                name, frame = self._workers[tid].name, innermost(self._workers[tid].frames)
                still = f"{still}, beside thread '{name}', which waits on {wait.on.value} at {frame}"
        return Activity(Kind.STUCK, self._quiet_s, on, f"{still}, waiting on {on.value}")

    def _helped(self, last: ActivitySample, watched_s: float, in_collective: bool | None) -> Activity | None:
        """Return what the rank does where a child or another thread works, for which it may be waiting."""
        children_s = sum(movement.children_ns for movement in self._recent)
        child_share = share(children_s, watched_s)
        lasting = share(sum(movement.lasting_ns for movement in self._recent), watched_s)
        io_per_s = sum(movement.children_io for movement in self._recent) / max(watched_s, 1e-3)
        child_moves = lasting >= _CHILD_WORKS_SHARE or io_per_s >= _CHILD_IO_PER_S
        waits_for_it = self._waits_for_worker()
        if child_share >= WORKS_SHARE or (child_moves and (last.on in (On.CHILD, On.PIPE) or waits_for_it)):
            polls = sum(movement.wakes for movement in self._recent) >= _LEAST_WAKES
            if last.on in FOR_CHILDREN or waits_for_it or polls:
                text = f"it waits while its child processes use {child_share:.0%} of a core"
                return Activity(Kind.BUSY, detail=text)
            text = f"it stands still while its child processes use {child_share:.0%} of a core"
            return Activity(Kind.UNKNOWN, detail=text)
        above = share(sum(movement.above_ns for movement in self._recent), watched_s)
        others = share(sum(movement.others_ns for movement in self._recent), watched_s)
        if above >= WORKS_SHARE and (waits_for_it or in_collective):
            return Activity(Kind.BUSY, detail=f"it waits while its other threads use {others:.0%} of a core")
        # A pool of native threads may upload under a lock; without the time in the queue, which housekeeping has too.
        cpu = share(sum(movement.others_cpu_ns for movement in self._recent), watched_s)
        may_wait = cpu >= _CHILD_WORKS_SHARE if waits_for_it else cpu >= _POOL_WORKS_SHARE and last.on in LOCKS
        raw = share(sum(movement.raw_ns for movement in self._recent), watched_s)
        if raw >= WORKS_SHARE or above >= WORKS_SHARE or may_wait:
            text = f"it stands still while its other threads use {others:.0%} of a core"
            return Activity(Kind.UNKNOWN, detail=text)
        return None

    def _seen_workers(self) -> dict[int, Wait]:
        """Return the threads that it may be waiting for, with what they were last seen to wait in."""
        horizon_ns = self._worked_ns + min(self._horizon_s, _NEVER_S) * _NANO
        found: dict[int, Wait] = {}
        for _, waits in self._worker_looks:
            for tid, wait in waits.items():
                if tid in self._workers and counts(wait, self._workers[tid].frames, int(horizon_ns)):
                    found[tid] = wait
        return found

    def _end_ns(self, on: On) -> int | None:
        """Return when what a rank waits in ends by itself, `on` being what that is taken for; None: nobody knows.

        That somebody looks after a thread now and then promises nothing, and what the thread does may. A thread's wait
        counts where it is one and lasts: not one of many, by which it polls.
        """
        last = self._last
        assert last is not None
        is_loop = is_idle_loop(last.wait, self._frames)
        ends = []
        if on in (On.SLEEP, *LOCKS) or is_loop or (on is On.WORKER and not self._waits_for_worker()):
            ends.append(last.end_ns)
        if on is On.WORKER or is_loop:
            lasting_ns = last.at_ns - int(_LASTING_PART * self._quiet_s * _NANO)
            ends += [wait.end_ns for wait in self._seen_workers().values() if wait.since_ns <= lasting_ns]
        return max((end_ns for end_ns in ends if end_ns is not None), default=None)

    def _waits_for_worker(self) -> bool:
        return waits_for_worker(self._frames)

    def _fresh_move(self) -> bool:
        """Tell whether a thread that was started here has used the processor at all in the last seconds."""
        fresh = self._fresh - self._keep_house
        return any(movement.moved & fresh for movement in self._recent)

    def _in_python_lock(self) -> bool:
        return bool(self._frames) and bool(_PYTHON_LOCK.search(self._frames[0]))


_PYTHON_LOCK = re.compile(r"/(threading|queue|selectors|subprocess|socket|ssl)\.py:\S+ \w+$")


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
