"""The health of a node while a job runs there: `python -m resilience_sdk.health.watch`, one process per node and job.

Whoever runs the job starts it by name and writes its task to its standard input, a line of JSON: the fields of
`WatchTask`. It ends when that pipe is closed. What it finds it journals as `health` events and says once; it touches no
rank. What is looked at, how often, and which change is told are rules over values.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event, Journal, file_prefix, parse_lines
from resilience_sdk.core.plain_file import read_bytes
from resilience_sdk.health.findings import EVENTS, Finding, Status, severity, to_event, told_faults
from resilience_sdk.health.host import Process, process_table
from resilience_sdk.health.memory_kills import OF_OTHERS, for_job
from resilience_sdk.health.probes import GPU, GPU_EVENTS, HOST, KERNEL, KERNEL_LOG, NETWORK, Context, Probe
from resilience_sdk.health.runner import collect_left, kill_running, run_probes
from resilience_sdk.system import hostinfo, procfs

BUDGET = 0.01  # of one core, for all probes and what schedules them
WATCHED: tuple[Probe, ...] = (GPU, HOST, KERNEL, NETWORK)
_WRITER = "health"
_MAX_LINES = 5  # said of one look; the journal has all
_MIN_LISTENING_S = 1.0  # starting the process takes a part of it
_LOOK_FOR_PARENT_S = 1.0
_NICENESS = 10  # of the watch and of its probes: the training comes first
_MIN_DEADLINE_S = 15.0  # of a probe that runs behind ranks which take every processor
_COLLECT_S = 1.0
_GONE_WITHIN_S = 0.5
_over = threading.Event()
"""Set once the job is over: what is killed then has not failed."""
_FIRST_NAMESPACE = "pid:[4026531836]"  # a constant of Linux: only there are our process ids those of the kernel's log
_OVERLAP_S = 2.0  # read twice of the kernel's log: its clock is not ours


@attrs.frozen(kw_only=True)
class WatchTask:
    """What the watch is told by whoever starts it."""

    run_dir: Path = attrs.field(converter=Path)
    job: str
    interval_s: float
    pages: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    parent_pid: int
    parent_ticks: int | None = None
    since: float = attrs.field(factory=time.time)
    """When the job began, in Unix seconds: what a watch has told since then, the next one knows; nothing that happened
    before is told as of the job."""
    kills_before: int | None = None
    """How often the job's control group had been killed in for memory when the job began; None where nobody counts."""
    kernel_log: str = KERNEL_LOG
    """Another file of its form has process ids as the watch sees them."""
    budget: float = BUDGET  # of one core


_OF_THE_LAUNCHER = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # whoever signals a whole job


def main() -> None:
    """Watch until the process that asked for it is gone; never returns."""
    with open(0, "rb", buffering=0, closefd=False) as told:  # it takes nothing but the line: the next one ends us
        task = WatchTask(**json.loads(told.readline()))
    signal.signal(signal.SIGTERM, lambda *_: _end())
    for name in _OF_THE_LAUNCHER:
        signal.signal(name, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    threading.Thread(target=_end_with_job, args=(task,), daemon=True).start()
    host, boot_id = hostinfo.host_name(), hostinfo.boot_id()
    journal = Journal(task.run_dir / "journal", writer=_WRITER, host=host, boot_id=boot_id, job=task.job)
    watch = HealthWatch.resumed(_told_before(task), kills_before=task.kills_before)
    _Rounds(task, journal, watch, choice_of_gpus(environ.environment())).run()


def choice_of_gpus(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say which GPUs are the job's; the others of a shared node are none of its business."""
    return {name: env[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in env}


def _told_before(task: WatchTask) -> list[dict[str, Any]]:
    """Return what earlier watches over this node have told in this job, by time."""
    return _journalled(task, f"{_WRITER}-*.jsonl")


def _journalled(task: WatchTask, files: str) -> list[dict[str, Any]]:
    """Return what was journalled on this node in this job by the writers of these files, by time."""
    host = hostinfo.host_name()
    events: list[dict[str, Any]] = []
    for path in (task.run_dir / "journal").glob(f"{file_prefix(host)}{files}"):
        with contextlib.suppress(OSError):
            events += [event for event in parse_lines(read_bytes(path)) if event is not None]
    events = [event for event in events if (event.get("host"), event.get("job")) == (host, task.job)]
    return sorted((event for event in events if event["t"] >= task.since), key=lambda event: float(event["t"]))


@attrs.define
class JobProcesses:
    """The processes of a node of which one look after the other tells whether they are the job's.

    One that is gone is known until the next look, which is when the kernel's log tells how it went. One whose parent is
    gone stays the job's. `launcher` is the process id of the job's launcher.
    """

    _launcher: int
    _ours: frozenset[tuple[int, int]] = frozenset()  # pid and start
    _before: Mapping[int, bool] = attrs.field(factory=dict)
    _now: Mapping[int, bool] = attrs.field(factory=dict)

    def update(self, table: Sequence[Process]) -> None:
        """Take the process table of this moment."""
        children: dict[int, list[Process]] = {}
        for process in table:
            children.setdefault(process.parent, []).append(process)
        open_ = [p for p in table if p.pid == self._launcher or (p.pid, p.start) in self._ours]
        ours: set[tuple[int, int]] = set()
        while open_:
            process = open_.pop()
            if (process.pid, process.start) not in ours:
                ours.add((process.pid, process.start))
                open_ += children.get(process.pid, [])
        self._ours = frozenset(ours)
        self._before = self._now
        self._now = {process.pid: (process.pid, process.start) in ours for process in table}

    def known(self) -> dict[int, bool]:
        """Return for each process id whether it was the job's at the last two looks; the earlier one counts."""
        return {**self._now, **self._before}


@attrs.define
class _Rounds:
    """Looking and listening, one after the other, for ever."""

    _task: WatchTask
    _journal: Journal
    _watch: HealthWatch
    _environment: Mapping[str, str]
    _began: float = attrs.field(factory=time.monotonic)
    _processes: JobProcesses = attrs.field(
        default=attrs.Factory(lambda self: JobProcesses(self._task.parent_pid), takes_self=True)
    )

    def run(self) -> None:
        probes = [attrs.evolve(probe, deadline_s=max(probe.deadline_s, _MIN_DEADLINE_S)) for probe in WATCHED]
        looked: float | None = None
        log_read: float | None = None
        while True:
            began, cost = time.monotonic(), _cost()
            of_job_s = max(0.0, time.time() - self._task.since)
            log_newer_s = of_job_s if log_read is None else min(of_job_s, began - log_read + _OVERLAP_S)
            self._processes.update(process_table("/"))
            findings = run_probes(probes, attrs.evolve(self._context, log_newer_s=log_newer_s))
            self._take(self._of_job(findings), 0.0 if looked is None else began - looked)
            looked = began
            log_read = began if log_was_read(findings) else log_read
            probes = worth_another_look(probes, findings)
            look_cost = _cost() - cost
            if any(finding.probe == GPU.name and finding.subject for finding in findings):
                self._listen(time.monotonic() + self._pause(began, look_cost))
            _rest(self._pause(began, look_cost))  # for what listening has cost

    @property
    def _context(self) -> Context:
        return Context(environment=self._environment, kernel_log=self._task.kernel_log)

    def _of_job(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings of a look, with kills for memory as what they are to the job."""
        judged: list[Finding] = []
        for finding in findings:
            is_of_kills = finding.key[1:] == ("kernel_log", OF_OTHERS)
            judged += for_job(finding, self._known_processes(), _own_groups()) if is_of_kills else [finding]
        return judged

    def _known_processes(self) -> dict[int, bool]:
        """Return of which processes it is known whether they are the job's, by the numbers of the kernel's log.

        A rank that came and went between two looks has told of itself in the journal.
        """
        if self._task.kernel_log == KERNEL_LOG and hostinfo.pid_namespace() != _FIRST_NAMESPACE:
            return {}
        starts = [one for one in _journalled(self._task, "rank*.jsonl") if one["event"] == Event.RANK_START.value]
        ranks = {start["pid"]: True for start in starts if isinstance(start.get("pid"), int)}
        return {**ranks, **self._processes.known()}

    def _pause(self, looked: float, look_cost: float) -> float:
        """Return the seconds until the next look, of which the last was at `looked` and cost so much."""
        now = time.monotonic()
        return pause_until_next(
            lived_s=now - self._began,
            since_look_s=now - looked,
            cost_s=_cost(),
            look_cost_s=look_cost,
            interval_s=self._task.interval_s,
            budget=self._task.budget,
        )

    def _listen(self, until: float) -> None:
        """Hear Xid events until the next look is due, at no more cost than looking may have."""
        while (left := until - time.monotonic()) > _MIN_LISTENING_S:
            cost = _cost()
            events = attrs.evolve(GPU_EVENTS, deadline_s=GPU_EVENTS.deadline_s + left)
            heard = self._take(run_probes([events], attrs.evolve(self._context, listen_s=left)), 0.0)
            left = max(0.0, until - time.monotonic())
            time.sleep(min(left, (_cost() - cost) / self._task.budget) if heard else left)

    def _take(self, findings: Sequence[Finding], seconds: float) -> bool:
        """Tell what of it is news, `seconds` after the look before; return whether there was any."""
        if _over.is_set():
            return False
        attempt, host = _attempt(self._task.pages), hostinfo.host_name()
        for fault in told_faults(findings):
            if say_once(f"health {fault}", f"health of {host}: {fault}"):
                self._journal.emit(Event.DEGRADED, attempt=attempt, what="health", why=fault)
        news = self._watch.take(findings, seconds)
        for finding in news:
            self._journal.emit(Event.HEALTH, attempt=attempt, **to_event(finding, lasts=True))
        bad = [finding for finding in news if finding.status is not Status.OK]
        for finding in bad[:_MAX_LINES]:
            what = " ".join(filter(None, (finding.subject, finding.check.replace("_", " "))))
            cure = f"; {finding.cure}" if finding.cure else ""
            say(f"health of {host}: {what}: {finding.evidence or finding.value}{cure}")
        if (rest := len(bad) - _MAX_LINES) > 0:
            say(f"health of {host}: {rest} more findings are in the journal")
        return bool(news)


def _own_groups() -> list[str]:
    """Return the paths of this process's memory groups as the kernel's log has them: they are the job's too."""
    lines = (procfs.text(Path("/proc/self/cgroup")) or "").splitlines()
    told = [line.partition(":")[2].partition(":") for line in lines]
    return [path for controllers, _, path in told if not controllers or "memory" in controllers.split(",")]


def _rest(seconds: float) -> None:
    """Sleep; what was killed and is slow to go is collected meanwhile, so that it does not stay as a zombie."""
    until = time.monotonic() + seconds
    while collect_left() and (left := until - time.monotonic()) > 0:
        time.sleep(min(_COLLECT_S, left))
    time.sleep(max(0.0, until - time.monotonic()))


def _cost() -> float:
    """Return the processor time in seconds that this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _attempt(pages: Path | None) -> int:
    """Return the number of the newest attempt, as the launcher's files have it."""
    numbers: list[Any] = [] if pages is None else [path.stem.partition("-")[2] for path in pages.glob("attempt-*.json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _end_with_job(task: WatchTask) -> None:
    """End this process with the job, whatever the main thread does.

    The job is over when the pipe of standard input is closed, or the process that holds its other end is gone: a
    child of that one may have inherited the pipe.
    """
    while not select.select([0], [], [], _LOOK_FOR_PARENT_S)[0]:
        if hostinfo.process_is_gone(task.parent_pid, task.parent_ticks):
            break
    _end()


def _end() -> None:
    _over.set()
    kill_running(_GONE_WITHIN_S)  # they have a session of their own, and may listen to the driver for a minute
    os._exit(0)


def pause_until_next(
    *, lived_s: float, since_look_s: float, cost_s: float, look_cost_s: float, interval_s: float, budget: float = BUDGET
) -> float:
    """Return the seconds until the next look of a watch that has lived `lived_s`, and last looked `since_look_s` ago.

    It has cost `cost_s` of processor time in all, its start included, and `look_cost_s` at that look: as much as the
    next one will, which must be within the `budget` (part of one core) too. Pure.
    """
    return max(0.0, interval_s - since_look_s, (cost_s + look_cost_s) / budget - lived_s)


def worth_another_look(probes: Sequence[Probe], findings: Iterable[Finding]) -> list[Probe]:
    """Return the probes without those for what this node does not have: no driver comes while a job runs. Pure."""
    absent = any(finding.key[:2] == (GPU.name, "driver") and _is_missing(finding) for finding in findings)
    return [probe for probe in probes if not (absent and probe.name == GPU.name)]


def log_was_read(findings: Iterable[Finding]) -> bool:
    """Tell whether a look has read the kernel's log, so that the next one needs only what is newer. Pure."""
    return any(finding.key[:2] == (KERNEL.name, "kernel_log") and not _is_missing(finding) for finding in findings)


def _is_missing(finding: Finding) -> bool:
    return finding.status is Status.UNAVAILABLE


_MINUTE_S = 60.0
_GREW = "grew"  # in `Finding.data`


def judge_growth(before: Iterable[Finding], after: Sequence[Finding], seconds: float) -> list[Finding]:
    """Return `after`, with each counter that grew faster than it may since `before` degraded. Pure.

    `seconds` lie between the two looks; less than a minute counts as one, so that a single event is no high rate.
    A counter that became smaller was reset, and counts from zero.
    """
    earlier = {finding.key: finding.value for finding in before}
    return [_grown(finding, earlier.get(finding.key), max(seconds, _MINUTE_S)) for finding in after]


def _grown(finding: Finding, earlier: object, seconds: float) -> Finding:
    growth = finding.data.get("growth")
    if growth is None or not isinstance(finding.value, int) or not isinstance(earlier, int):
        return finding
    grown = finding.value - earlier if finding.value >= earlier else finding.value
    allowed = float(growth["per_minute"])
    if not grown or grown * _MINUTE_S / seconds <= allowed:
        return finding
    limit = f", at most {allowed:g} a minute is good" if allowed else ""
    rate = f"grew by {grown} to {finding.value} within {seconds:.0f} s{limit}"
    return attrs.evolve(
        finding,
        status=max(finding.status, Status.DEGRADED, key=severity),
        evidence="; ".join(filter(None, (finding.evidence, rate))),
        cure=finding.cure or growth["cure"],
        data={**finding.data, _GREW: True},
    )


# Of the host only what a training does not cause by itself; of a GPU not who holds it, for that is the job.
_OF_THE_HOST = frozenset({"memory_available", "oom_kills", "shared_memory", "file_table", "answers"})
_NOT_WATCHED = frozenset({"probe", "memory_held"})  # our own mistake is for the preflight to tell
_ANSWERS = "answers"
_SAME_S = 2.0  # of one cause; the kernel's clock is not ours
_LISTENING = "Xid events"

_Key = tuple[str, str, str]


@attrs.define
class HealthWatch:
    """What is known of this node, look by look."""

    _known: dict[_Key, Finding] = attrs.field(factory=dict)
    _open: set[_Key] = attrs.field(factory=set)
    """What was told to be bad, and not yet to be in order again."""

    @classmethod
    def resumed(cls, events: Iterable[Mapping[str, Any]], *, kills_before: int | None = None) -> HealthWatch:
        """Return a watch that knows what an earlier one of the same job has told, from its `health` events.

        What is bad still is no news then, and what is in order again is. `kills_before`: how many kills for memory were
        counted before the job began, which are none of it.
        """
        watch = cls()
        if kills_before is not None:
            before = HOST.found("oom_kills", Status.OK, value=kills_before)
            watch._known[before.key] = before
        for event in events:
            try:
                told = {name: event[name] for name in ("probe", "check", "subject", "status", "value")}
                at = event.get("at")
                finding = Finding(**told, data={"at": at} if isinstance(at, (int, float)) else {})
            except (KeyError, TypeError, ValueError):
                continue  # of another version
            if finding.check not in EVENTS:
                (watch._open.add if finding.is_bad else watch._open.discard)(finding.key)
                finding = attrs.evolve(finding, value=None)  # when between the two watches a counter grew nobody knows
            watch._known[finding.key] = finding
        return watch

    def take(self, findings: Sequence[Finding], seconds: float) -> list[Finding]:
        """Return what of a look is news: what became worse, grew too fast, happened, or is in order again.

        `seconds` have passed since the look before. What was bad at the first look is news too.
        """
        seen = [finding for finding in findings if _is_watched(finding)]
        judged = [self._or_lost(finding) for finding in judge_growth(self._known.values(), seen, seconds)]
        news = [finding for finding in judged if finding.is_bad and self._is_news(finding)]
        lasting = [finding for finding in judged if finding.check not in EVENTS]
        over = [finding for finding in lasting if finding.status is Status.OK and finding.key in self._open]
        over += self._hangs_that_are_over(judged)
        self._known.update((finding.key, finding) for finding in [*judged, *over])
        self._open.update(finding.key for finding in news if finding.check not in EVENTS)
        self._open.difference_update(finding.key for finding in over)
        return news + over

    def _or_lost(self, finding: Finding) -> Finding:
        """Return a finding, degraded where it is of a link that worked before: at a first look it is one of no use."""
        known = self._known.get(finding.key)
        if finding.data.get("works") is not False or finding.is_bad or known is None:
            return finding
        if not known.data.get("works") and finding.key not in self._open:
            return finding
        evidence = f"its link was lost while the job ran; {finding.evidence}"
        return attrs.evolve(finding, status=Status.DEGRADED, evidence=evidence, cure=finding.data["lost"])

    def _is_news(self, finding: Finding) -> bool:
        """Tell whether something bad is not what was told before, and only seen again."""
        known = self._known.get(finding.key)
        if known is None:
            return True
        if finding.check not in EVENTS:  # a counter that grows again is no worse than before, and news
            grows_again = _GREW in finding.data and _GREW not in known.data
            return severity(finding.status) > severity(known.status) or (known.is_bad and grows_again)
        if (at := finding.data.get("at")) is not None:
            before = known.data.get("at")
            return before is None or at > before + _SAME_S
        return "growth" not in finding.data or finding.value != known.value  # a counter that was reset has grown too

    def _hangs_that_are_over(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return, as in order, the hangs of probes that answer again: themselves they say nothing of having hung.

        A GPU that is not even named any more is not back.
        """
        told = {finding.key for finding in findings}
        # Of a GPU's events another process tells, which listens; of the kernel's the probe itself, and of nothing else.
        answered = {
            probe for probe, check, _ in told if check != _ANSWERS and (check not in EVENTS or probe == KERNEL.name)
        }
        heard = {probe for probe, check, _ in told if check in EVENTS}
        return [
            attrs.evolve(self._known[key], status=Status.OK, value=None, evidence="answers again", cure="")
            for key in sorted(self._open - told)
            if key[1] == _ANSWERS
            and ((key[2] == "" and key[0] in answered) or (key[2] == _LISTENING and key[0] in heard))
        ]


def _is_watched(finding: Finding) -> bool:
    if finding.check in _NOT_WATCHED:
        return False
    return finding.probe != HOST.name or finding.check in _OF_THE_HOST


if __name__ == "__main__":
    main()
