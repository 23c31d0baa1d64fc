"""The load of the machine as an explanation of all ranks being slower at once.

Counters are compared, not states: those of the time before somebody noticed with those of the seconds after it.
"""

from __future__ import annotations

import os
import re

import attrs

from resilience_sdk.straggler.verdicts import SlowVerdict
from resilience_sdk.system import procfs

LEAST_S = 5.0
"""So long the load is watched before anything is said of it."""
_AGAIN_S = 30.0  # how often it is looked at again as long as it lasts
_ON_DEVICE = ("gpu", "gpu_comm")
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

_LESS = 0.9  # of what others left of the processors before: they leave some more and some less all the time
_STEAL_SHARE = 0.03  # the same, taken by the hypervisor: nobody in the machine is idle then
_MOST_IDLE = 0.20  # of the processors: with more nobody had to wait for one
_LEAST_WAITING = 0.15  # of the time, where the kernel counts it
_MOST_TIMES = 3.0  # what is lost may cost a job whose ranks wait for one another, against one whose ranks do not
_LEAST_LEFT = 0.01


@attrs.frozen
class LoadReading:
    """The counters of one moment, over the processors that the job may use; None: the kernel does not tell."""

    at_s: float
    processors: int
    own_s: float  # processor time of the job's processes
    busy_s: float | None = None  # processor time of everybody
    stolen_s: float | None = None  # time that the hypervisor gave to others
    waiting_s: float | None = None  # time in which somebody waited for a processor (PSI, `some`)
    tasks: float | None = None  # load average of the last minute


@attrs.frozen
class Load:
    """What went on between two readings, as shares of the processors' time; None: not known."""

    processors: int
    own: float
    others: float | None = None
    stolen: float | None = None
    idle: float | None = None
    waiting: float | None = None  # share of the time
    tasks: float | None = None

    @classmethod
    def between(cls, first: LoadReading, last: LoadReading) -> Load | None:
        """Return the load between two readings; None where no time has passed."""
        elapsed_s = last.at_s - first.at_s
        whole_s = elapsed_s * last.processors
        if whole_s <= 0.0:
            return None
        own = _share(first.own_s, last.own_s, whole_s) or 0.0
        busy, stolen = _share(first.busy_s, last.busy_s, whole_s), _share(first.stolen_s, last.stolen_s, whole_s)
        return cls(
            processors=last.processors,
            own=own,
            others=None if busy is None else max(0.0, busy - own),
            stolen=stolen,
            idle=None if busy is None else max(0.0, 1.0 - busy - (stolen or 0.0)),
            waiting=_share(first.waiting_s, last.waiting_s, elapsed_s),
            tasks=last.tasks,
        )


def explains(before: Load, now: Load, ratio: float) -> bool:
    """Tell whether what others do now, and did not do before, makes the steps of a job so many times as long.

    Ranks that wait for one another lose more than their share: the one that is held up most holds up all.
    """
    is_waiting = now.waiting is None or now.waiting >= _LEAST_WAITING
    is_full = now.idle is not None and now.idle <= _MOST_IDLE and is_waiting
    by_others = is_full and _left(now) <= _LESS * _left(before)
    waits_more = _more(before.waiting, now.waiting) >= _LEAST_WAITING
    if by_others or _more(before.stolen, now.stolen) >= _STEAL_SHARE:
        less = _left(before) / _left(now)
    elif now.others is None and waits_more and now.own <= _LESS * before.own:
        less = before.own / max(_LEAST_LEFT, now.own)  # nobody tells who had the processors: the job had less of them
    else:
        return False
    return ratio - 1.0 <= _MOST_TIMES * (less - 1.0)


def _left(load: Load) -> float:
    """Return what others left of the processors."""
    return max(_LEAST_LEFT, 1.0 - (load.others or 0.0) - (load.stolen or 0.0))


def words(before: Load | None, now: Load) -> str:
    """Return what is known of the load, in words, each beside what it was before."""
    said = []
    before = before or Load(now.processors, 0.0)  # of which nothing is known
    if now.others is not None:
        share = _beside(now.others, before.others, f" of the {now.processors} processors")
        said.append(f"other programs use {share}")
    if now.stolen is not None and now.stolen >= 0.01:
        said.append(f"the hypervisor takes {_beside(now.stolen, before.stolen)}")
    if now.waiting is not None:
        share = _beside(now.waiting, before.waiting, " of the time")
        said.append(f"tasks wait for a processor during {share}")
    if now.tasks is not None:
        said.append(f"load average {now.tasks:.1f}")
    return ", ".join(said) or "the kernel does not tell the load of this machine"


def _beside(share: float, before: float | None, of: str = "") -> str:
    then = "" if before is None else f" ({100.0 * before:.0f} % before)"
    return f"{100.0 * share:.0f} %{of}{then}"


def _share(first: float | None, last: float | None, whole_s: float) -> float | None:
    return None if first is None or last is None else min(1.0, max(0.0, (last - first) / whole_s))


def _more(before: float | None, now: float | None) -> float:
    return max(0.0, now - (before or 0.0)) if now is not None else 0.0


# -- what the kernel tells


@attrs.define
class LoadReader:
    """Reads the counters of the machine, and of the processes `pids` and all that they have started."""

    pids: set[int] = attrs.field(factory=set)
    root: str = "/"

    def read(self, now_s: float) -> LoadReading | None:
        """Return the counters of this moment; None where the kernel has none.

        Costs a read of `stat` for each process of the machine.
        """
        allowed = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set()
        times = _times(self.root, allowed)
        waiting_s = _waiting_s(self.root)
        if times is None and waiting_s is None:
            return None
        busy_s, stolen_s, counted = times or (None, None, len(allowed) or 1)
        return LoadReading(
            at_s=now_s,
            processors=counted,
            own_s=_own_s(self.root, self.pids | {os.getpid()}),
            busy_s=busy_s,
            stolen_s=stolen_s,
            waiting_s=waiting_s,
            tasks=_tasks(self.root),
        )


def _times(root: str, allowed: set[int]) -> tuple[float, float, int] | None:
    """Return the busy and the stolen seconds of the processors that we may use, and how many these are."""
    busy = stolen = counted = 0
    for line in (procfs.text(procfs.below(root, "/proc/stat")) or "").splitlines():
        match = re.match(r"cpu(\d+) ([\d ]+)", line)
        if match is None or (allowed and int(match[1]) not in allowed):
            continue
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = [*map(int, match[2].split()), *[0] * 8]
        busy += user + nice + system + irq + softirq
        stolen += steal
        counted += 1
    return (busy / _TICKS, stolen / _TICKS, counted) if busy else None


def _waiting_s(root: str) -> float | None:
    """Return how long somebody has waited for a processor: of our control group, else of the machine."""
    files = [group / "cpu.pressure" for group in procfs.groups(root, "")][:1]
    for path in (*files, procfs.below(root, "/proc/pressure/cpu")):
        if match := re.search(r"^some .*total=(\d+)", procfs.text(path) or "", re.MULTILINE):
            return int(match[1]) * 1e-6
    return None


def _tasks(root: str) -> float | None:
    match = re.match(r"\d+(\.\d+)?", procfs.text(procfs.below(root, "/proc/loadavg")) or "")
    return float(match[0]) if match else None


def _own_s(root: str, tops: set[int]) -> float:
    """Return the processor time of some processes and of all that they have started."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for path in procfs.entries(procfs.below(root, "/proc")):
        fields = (procfs.text(path / "stat") or "").rpartition(")")[2].split() if path.name.isdecimal() else []
        if len(fields) >= 15:  # the parent, and the ticks with those of the children that were waited for
            parents[int(path.name)], ticks[int(path.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    below = set(tops)
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return sum(spent for pid, spent in ticks.items() if pid in below) / _TICKS


# -- what it says about verdicts


@attrs.frozen
class LoadTold:
    """What the load says about a slow-down of all ranks."""

    explains: bool
    text: str


_UNKNOWN = LoadTold(explains=False, text="")


class LoadWatch:
    """Compares the load of the time in which nothing was slow with that since. The monitor's only thread."""

    def __init__(self, reader: LoadReader, now_s: float, *, alone: bool) -> None:
        """Begin to compare; `alone`: this node has all ranks, so its load can explain."""
        self._reader = reader
        self._alone = alone
        self._began = reader.read(now_s)
        self._since: LoadReading | None = None
        self._last: LoadReading | None = None
        self._now: Load | None = None
        self._told: dict[tuple[str, str, str], LoadTold] = {}

    def notice(self, now_s: float) -> None:
        """Begin to watch, where that is not done yet: all ranks are slower."""
        if self._since is None:
            self._since = self._last = self._reader.read(now_s)

    def end(self, now_s: float) -> None:
        """End it: they are no longer; what comes is compared with the time from now on."""
        if self._since is not None:
            self._since = self._last = None
            self._told.clear()
            self._began = self._reader.read(now_s)

    def look(self, verdict: SlowVerdict, now_s: float) -> LoadTold | None:
        """Return what the load says about a verdict on all ranks; None while that is not known yet.

        Looks again now and then: a load that has gone explains nothing.
        """
        if verdict.section_kind in _ON_DEVICE or self._last is None:
            return _UNKNOWN
        if now_s - self._last.at_s >= (LEAST_S if not self._told else _AGAIN_S):
            first, self._last = self._last, self._reader.read(now_s)
            self._now = Load.between(first, self._last) if self._last is not None else None
            self._told.clear()
        elif not self._told:
            return None
        key = verdict.section, verdict.section_kind, verdict.role
        if key not in self._told:
            self._told[key] = self._judge(verdict)
        return self._told[key]

    def _judge(self, verdict: SlowVerdict) -> LoadTold:
        now = self._now
        if now is None:
            return _UNKNOWN
        before = Load.between(self._began, self._since) if self._began is not None and self._since is not None else None
        # A short section may vary by far more than the steps.
        of_step = min(verdict.ratio, 1.0 / (1.0 - verdict.share)) if 0.0 < verdict.share < 1.0 else verdict.ratio
        is_cause = self._alone and before is not None and explains(before, now, of_step)
        return LoadTold(explains=is_cause, text=words(before, now))
