"""What earlier jobs left behind: ranks without a launcher, zombies, and processes stuck in the kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from resilience_sdk import kernel_files
from resilience_sdk.environ import INTERNAL_JOB
from resilience_sdk.health import grading
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import judged

PROBE = "processes"
MOST_ZOMBIES = 100
_PAUSE_S = 0.3  # a process that only waits for a disk is out of D state by then
_LONGEST_NAME = 40
_MOST_NAMED = 5
# What tells a rank from other programs: the variables of our launcher, and of torchrun.
_RANK_MARKS = (INTERNAL_JOB, "TORCHELASTIC_RUN_ID")


@attrs.frozen
class Process:
    """One line of the process table. `start` is in clock ticks since boot."""

    pid: int
    name: str
    state: str
    parent: int
    start: int
    uid: int


def processes(root: str) -> list[Process]:
    """Return the process table, without kernel threads."""
    found = []
    for entry in kernel_files.entries(kernel_files.below(root, "/proc")):
        if not entry.name.isdecimal():
            continue
        head, _, rest = (kernel_files.text(entry / "stat") or "").rpartition(")")
        words = rest.split()
        try:
            process = Process(
                pid=int(entry.name),
                name=head.partition("(")[2][:_LONGEST_NAME],
                state=words[0],
                parent=int(words[1]),
                start=int(words[19]),
                uid=entry.stat().st_uid,
            )
        except (IndexError, ValueError, OSError):
            continue  # it has just ended
        if process.parent != 2 and process.pid != 2:
            found.append(process)
    return found


def stuck(first: Sequence[Process], second: Sequence[Process]) -> list[Process]:
    """Return the processes that are in D state in both looks at the process table. Pure."""
    before = {(process.pid, process.start) for process in first if process.state == "D"}
    return [process for process in second if process.state == "D" and (process.pid, process.start) in before]


def stuck_finding(found: Sequence[Process], where: Mapping[int, str]) -> Finding:
    """Return what is said of processes in D state; `where` names the place in the kernel by pid. Pure."""
    names = [f"{p.pid} ({p.name}{' in ' + where[p.pid] if where.get(p.pid) else ''})" for p in found]
    return judged(
        probe=PROBE,
        check="stuck_processes",
        status=Status.DEGRADED if found else Status.OK,
        value=len(found),
        unit="processes",
        threshold=0,
        evidence=f"cannot be stopped or killed, they wait in the kernel: {_listed(names)}" if found else "none",
        cure="see what they wait for (`cat /proc/PID/stack`, `dmesg -T`): a dead mount or driver; remount it, or drain "
        "and reboot the node",
        data={"pids": [process.pid for process in found]},
    )


def zombies(table: Sequence[Process]) -> Finding:
    """Return how many processes have ended and were not collected. Pure."""
    parents: dict[int, int] = {}
    for process in table:
        if process.state == "Z":
            parents[process.parent] = parents.get(process.parent, 0) + 1
    count = sum(parents.values())
    status = grading.high(count, degraded=MOST_ZOMBIES)
    most = max(parents, key=parents.__getitem__, default=0)
    return judged(
        probe=PROBE,
        check="zombies",
        status=status,
        value=count,
        unit="processes",
        threshold=MOST_ZOMBIES,
        evidence=f"{count} ended and were not collected" + (f", {parents[most]} of them by {most}" if count else ""),
        cure=f"end process {most}, which does not collect its children; start containers with `docker run --init`",
    )


def orphans(table: Sequence[Process], uid: int, environment: Mapping[int, Mapping[str, str]]) -> Finding:
    """Return which of this user's ranks have outlived their launcher. Pure.

    `environment` holds, by pid, the start environment of processes whose parent is init.
    """
    jobs: dict[int, str] = {}
    for process in table:
        variables = environment.get(process.pid, {})
        mark = next((variables[name] for name in _RANK_MARKS if name in variables), None)
        if process.uid == uid and process.state != "Z" and mark is not None and "RANK" in variables:
            jobs[process.pid] = f"{process.pid} ({process.name}, rank {variables['RANK']} of job {mark})"
    pids = " ".join(map(str, jobs))
    return judged(
        probe=PROBE,
        check="leftover_ranks",
        status=Status.DEGRADED if jobs else Status.OK,
        value=len(jobs),
        unit="processes",
        threshold=0,
        evidence=f"ranks of an earlier job whose launcher is gone: {_listed(list(jobs.values()))}" if jobs else "none",
        cure=f"`kill {pids}`, then `kill -9 {pids}`: they hold memory, GPUs and ports",
        data={"pids": list(jobs)},
    )


def probe(root: str, uid: int) -> Iterator[Finding]:
    """Yield what the process table tells. Looks at the environment of orphans last: that can block."""
    first = processes(root)
    yield zombies(first)
    time.sleep(_PAUSE_S)
    second = processes(root)
    found = stuck(first, second)
    proc = kernel_files.below(root, "/proc")
    yield stuck_finding(found, {p.pid: kernel_files.text(proc / str(p.pid) / "wchan") or "" for p in found})
    skipped = {process.pid for process in found}
    children_of_init = [p for p in second if p.parent == 1 and p.uid == uid and p.pid not in skipped]
    if _is_launcher(kernel_files.text(proc / "1" / "cmdline") or ""):
        children_of_init = []  # in a container: those are its ranks, and they run
    yield orphans(second, uid, {p.pid: start_environment(proc / str(p.pid)) for p in children_of_init})


def _is_launcher(command_line: str) -> bool:
    """Tell whether process 1 is no init but a program in Python, as torchrun is."""
    return "python" in command_line.partition("\0")[0].rpartition("/")[2]


def start_environment(process: Path) -> dict[str, str]:
    """Return the variables that a process was started with, by its directory in /proc; what it changed is not seen."""
    pairs = (item.partition("=") for item in (kernel_files.text(process / "environ") or "").split("\0"))
    return {name: value for name, _, value in pairs}


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
