"""Samples of a rank, and what has moved between two of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from resilience_sdk.hang.waits import On, Wait

_NANO = 1e9
LONGEST_GAP_S = 3.0  # between two samples; of a longer one nobody knows what the machine was doing meanwhile
WORKS_SHARE = 0.10  # of a core, time in the run queue included: a rank that is starved works too
_STARVED = 9  # times its CPU time that a thread's wait for a processor counts as work; beside it, wake-ups wait too
_BURST_NS = 1_000_000  # CPU time per wake-up that polls do not reach (0.03 to 0.23 ms) and bursts of work do
_ABOVE_BACKGROUND = 2.0  # times what a thread has used over its life before
FOR_CHILDREN = (On.CHILD, On.PIPE, On.POLL, On.SOCKET)


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
    end_ns: int | None = None
    """When what it waits in ends by itself; None: never, or nobody knows."""
    polls_one: bool = False
    """Whether it polls for a single descriptor."""
    workers: Mapping[int, Wait] = attrs.field(factory=dict)
    """What the threads wait in that it may be waiting for."""

    @property
    def wait(self) -> Wait:
        """What it waits in."""
        return Wait(self.on, self.end_ns, polls_one=self.polls_one)


@attrs.frozen
class Movement:
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
    def between(cls, last: ActivitySample, now: ActivitySample, background: Mapping[int, float]) -> Movement:
        """Return what has moved; `background`: CPU time by its whole life that each other thread has used."""
        elapsed_s = (now.at_ns - last.at_ns) / _NANO
        watched_s = min(max(elapsed_s, 1e-6), LONGEST_GAP_S)
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
            works = bursts or io_bytes > 0 or own_ns >= WORKS_SHARE * elapsed_s * _NANO
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
    return sample.on in FOR_CHILDREN and any(child.state in ("T", "t") for child in sample.children.values())


def share(cpu_ns: float, over_s: float) -> float:
    """Return CPU time as a part of a core."""
    return cpu_ns / _NANO / over_s if over_s > 0 else 0.0
