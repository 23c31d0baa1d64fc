"""The health of a node while a job runs there: `python -m resilience_sdk.health.watch`, one process per node and job.

Whoever runs the job starts it by name and writes its task to its standard input, a line of JSON: `run_dir`, `job`,
`interval_s`, `pages` (directory or null), `parent_pid`, `parent_ticks`, and `budget` (of one core). It ends when that
pipe is closed. What it finds it journals as `health` events and says once; it touches no rank.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk import environ, hostinfo
from resilience_sdk.console import say
from resilience_sdk.events import Event
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import GPU, GPU_EVENTS, Context, Probe
from resilience_sdk.health.runner import collect_left, kill_running, run_probes
from resilience_sdk.health.watching import (
    BUDGET,
    WATCHED,
    Watch,
    log_was_read,
    pause_until_next,
    to_event,
    worth_another_look,
)
from resilience_sdk.journal import Journal, file_prefix, parse_lines

_WRITER = "health"
_MOST_LINES = 5  # said of one look; the journal has all
_LEAST_LISTENING_S = 1.0  # starting the process takes a part of it
_LOOK_FOR_PARENT_S = 1.0
_NICENESS = 10  # of the watch and of its probes: the training comes first
_LEAST_DEADLINE_S = 15.0  # of a probe that runs behind ranks which take every processor
_COLLECT_S = 1.0
_GONE_WITHIN_S = 0.5
# Which GPUs are the job's; those of others on a shared node are none of its business.
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_over = threading.Event()
"""Set once the job is over: what is killed then has not failed."""
_OVERLAP_S = 2.0  # read twice of the kernel's log: its clock is not ours


@attrs.frozen(kw_only=True)
class Task:
    """What the watch is told by whoever starts it."""

    run_dir: Path = attrs.field(converter=Path)
    job: str
    interval_s: float
    pages: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))
    parent_pid: int
    parent_ticks: int | None = None
    since: float = attrs.field(factory=time.time)
    """When the job began, in Unix seconds: what a watch has told since then, the next one knows."""
    budget: float = BUDGET


def main() -> None:
    """Watch until the process that asked for it is gone; never returns."""
    with open(0, "rb", buffering=0, closefd=False) as told:  # it takes nothing but the line: the next one ends us
        task = Task(**json.loads(told.readline()))
    signal.signal(signal.SIGTERM, lambda *_: _end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the launcher's
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    threading.Thread(target=_end_with_job, args=(task,), daemon=True).start()
    journal = Journal(
        task.run_dir / "journal",
        writer=_WRITER,
        host=hostinfo.host_name(),
        boot_id=hostinfo.boot_id(),
        job=task.job,
    )
    _Rounds(task, journal, watch=Watch.resumed(_told_before(task))).run()


def _told_before(task: Task) -> list[dict[str, Any]]:
    """Return what earlier watches over this node have told in this job, by time."""
    host = hostinfo.host_name()
    events: list[dict[str, Any]] = []
    for path in (task.run_dir / "journal").glob(f"{file_prefix(host)}{_WRITER}-*.jsonl"):
        with contextlib.suppress(OSError):
            events += [event for event in parse_lines(path.read_bytes()) if event is not None]
    events = [event for event in events if (event.get("host"), event.get("job")) == (host, task.job)]
    return sorted((event for event in events if event["t"] >= task.since), key=lambda event: float(event["t"]))


@attrs.define
class _Rounds:
    """Looking and listening, one after the other, for ever."""

    _task: Task
    _journal: Journal
    _watch: Watch = attrs.field(factory=Watch)
    _probes: list[Probe] = attrs.field(factory=lambda: [_patient(probe) for probe in WATCHED])
    _environment: dict[str, str] = attrs.field(factory=lambda: _of_the_job(environ.environment()))
    _began: float = attrs.field(factory=time.monotonic)

    def run(self) -> None:
        looked: float | None = None
        log_read: float | None = None
        while True:
            began, cost = time.monotonic(), _cost()
            log_newer_s = None if log_read is None else began - log_read + _OVERLAP_S
            findings = run_probes(self._probes, Context(log_newer_s=log_newer_s, environment=self._environment))
            self._take(findings, 0.0 if looked is None else began - looked)
            looked = began
            log_read = began if log_was_read(findings) else log_read
            self._probes = worth_another_look(self._probes, findings)
            look_cost = _cost() - cost
            if any(finding.probe == GPU.name and finding.subject for finding in findings):
                self._listen(time.monotonic() + self._pause(began, look_cost))
            _rest(self._pause(began, look_cost))  # for what listening has cost

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
        while (left := until - time.monotonic()) > _LEAST_LISTENING_S:
            cost = _cost()
            events = attrs.evolve(GPU_EVENTS, deadline_s=GPU_EVENTS.deadline_s + left)
            heard = self._take(run_probes([events], Context(listen_s=left, environment=self._environment)), 0.0)
            left = max(0.0, until - time.monotonic())
            time.sleep(min(left, (_cost() - cost) / self._task.budget) if heard else left)

    def _take(self, findings: list[Finding], seconds: float) -> bool:
        """Tell what of it is news, `seconds` after the look before; return whether there was any."""
        if _over.is_set():
            return False
        news = self._watch.take(findings, seconds)
        _tell(news, self._journal, _attempt(self._task.pages))
        return bool(news)


def _patient(probe: Probe) -> Probe:
    return attrs.evolve(probe, deadline_s=max(probe.deadline_s, _LEAST_DEADLINE_S))


def _of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in _OF_THE_JOB if name in env}


def _rest(seconds: float) -> None:
    """Sleep; what was killed and is slow to go is collected meanwhile, so that it does not stay as a zombie."""
    until = time.monotonic() + seconds
    while collect_left() and (left := until - time.monotonic()) > 0:
        time.sleep(min(_COLLECT_S, left))
    time.sleep(max(0.0, until - time.monotonic()))


def _tell(news: list[Finding], journal: Journal, attempt: int) -> None:
    for finding in news:
        journal.emit(Event.HEALTH, attempt=attempt, **to_event(finding, lasts=True))
    bad = [finding for finding in news if finding.status is not Status.OK]
    for finding in bad[:_MOST_LINES]:
        what = " ".join(part for part in (finding.subject, finding.check.replace("_", " ")) if part)
        cure = f"; {finding.cure}" if finding.cure else ""
        say(f"health of {hostinfo.host_name()}: {what}: {finding.evidence or finding.value}{cure}")
    if (rest := len(bad) - _MOST_LINES) > 0:
        say(f"health of {hostinfo.host_name()}: {rest} more findings are in the journal")


def _cost() -> float:
    """Return the processor time in seconds that this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _attempt(pages: Path | None) -> int:
    """Return the number of the newest attempt, as the launcher's files have it."""
    numbers: list[Any] = [] if pages is None else [path.stem.partition("-")[2] for path in pages.glob("attempt-*.json")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def _end_with_job(task: Task) -> None:
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


if __name__ == "__main__":
    main()
