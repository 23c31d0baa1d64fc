"""The kills of the kernel's memory killer: read from its log, and told apart by whose processes they have hit. Pure.

A kill is a job's where the killed process was the job's. One of a process of somebody else concerns the node at most,
and that only where it is the node that was short of memory: a control group that has come to its own limit takes
nothing from the job beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import attrs

from resilience_sdk.core.json_records import from_values, to_values
from resilience_sdk.core.words import when
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.probes import HOST, KERNEL

CAUSE = "host_oom_kill"
OF_OTHERS = "memory kill"
"""The subject of what is said of kills that are not known to be the job's: no name of a cause, for it is none."""
_ONE_KILL_S = 60.0  # a process id comes back later than that; all lines of one kill come within it
_MOST_KILLS = 200
_KEPT = "kills"  # in `Finding.data`
_VICTIMS = (
    re.compile(r"oom-kill:.*?,task_memcg=(?P<group>[^,]*),task=(?P<name>.*),pid=(?P<pid>\d+),uid="),
    re.compile(r"[Kk]illed process (?P<pid>\d+),? (?:UID \d+, )?\((?P<name>.*?)\)"),
    re.compile(r"oom_reaper: reaped process (?P<pid>\d+) \((?P<name>.*?)\)"),
)
_AT_LIMIT_OF_GROUP = re.compile(r"CONSTRAINT_MEMCG|Memory cgroup out of memory")


@attrs.frozen(kw_only=True)
class MemoryKill:
    """One process that the kernel killed for memory.

    `at` is Unix time. `control_group` is the path of its memory group as the kernel has it, from the root of all; empty
    where the log does not tell. `at_limit`: its group had come to its own limit, so that the node was not short.
    """

    pid: int
    at: float
    name: str = ""
    control_group: str = ""
    at_limit: bool = False

    def __str__(self) -> str:
        """Return who it was, as a person writes it."""
        return f"{self.name or 'a process'} (pid {self.pid})"


def read_kills(lines: Iterable[tuple[float, str]]) -> list[MemoryKill]:
    """Return each kill once from `(Unix time, message)` in the order of the log, the newest last.

    A kill has up to four lines. Who has asked for the memory (`invoked oom-killer`) is not who was killed.
    """
    kills: list[MemoryKill] = []
    newest: dict[int, int] = {}
    for at, text in lines:
        victim = next(filter(None, (pattern.search(text) for pattern in _VICTIMS)), None)
        if victim is None:
            continue
        told = victim.groupdict()
        kill = MemoryKill(
            pid=int(told["pid"]),
            at=round(at, 3),
            name=told["name"],
            control_group=told.get("group", ""),
            at_limit=_AT_LIMIT_OF_GROUP.search(text) is not None,
        )
        place = newest.get(kill.pid)
        if place is None or kill.at - kills[place].at > _ONE_KILL_S:
            newest[kill.pid] = len(kills)
            kills.append(kill)
            continue
        known = kills[place]
        kills[place] = attrs.evolve(
            known,
            control_group=known.control_group or kill.control_group,
            at_limit=known.at_limit or kill.at_limit,
        )
    return kills


def of_node(kills: Sequence[MemoryKill], status: Status) -> Finding:
    """Return what is said of kills where no job is known; `for_job` tells from it which ones are a job's."""
    newest = kills[-1]
    why = "its control group was at its limit" if newest.at_limit else "the node was short of memory"
    kept = [to_values(kill) for kill in kills[-_MOST_KILLS:]]
    return KERNEL.found(
        "kernel_log",
        status,
        f"the kernel killed {_listed(kills)}; {why}",
        len(kills),
        subject=OF_OTHERS,
        limit=0,
        cure="see who takes the memory (`ps aux --sort=-rss | head`) and what limits the job (`--mem`)",
        data={"at": newest.at, _KEPT: kept},
    )


def for_job(finding: Finding, processes: Mapping[int, bool], groups: Iterable[str]) -> list[Finding]:
    """Return what a finding of `of_node` is to the job; any other finding as it is.

    `processes` tells of each process id that is known whether it is the job's; empty where the kernel's numbers are not
    ours, as in a container. Of a process that nobody has seen the control group tells: `groups` are the job's.
    """
    if _KEPT not in finding.data:
        return [finding]
    kills = [from_values(MemoryKill, kill) for kill in finding.data[_KEPT]]
    own_groups = tuple(group for group in groups if group.strip("/"))  # the root has everybody's processes
    ours = [kill for kill in kills if processes.get(kill.pid, _is_below(kill.control_group, own_groups))]
    others = [kill for kill in kills if kill not in ours and not kill.at_limit]
    told = []
    if ours:
        told.append(
            KERNEL.found(
                "kernel_log",
                Status.DEGRADED,
                f"the kernel killed {_listed(ours, 'of this job ')}",
                len(ours),
                subject=CAUSE,
                limit=0,
                cure=HOST.checks["oom_kills"].cure,
                data={"at": ours[-1].at, "cause": CAUSE, "category": "host"},
            )
        )
    if others:
        evidence = f"the kernel killed {_listed(others, 'of somebody else ')}; the node is short of memory"
        at = {"at": others[-1].at}
        told.append(
            KERNEL.found("kernel_log", Status.DEGRADED, evidence, len(others), subject=OF_OTHERS, limit=0, data=at)
        )
    return told or [KERNEL.found("kernel_log", Status.OK, "no kill for memory concerns this job", 0)]


def _is_below(group: str, own: Iterable[str]) -> bool:
    return any(group == one or group.startswith(f"{one}/") for one in own)


def _listed(kills: Sequence[MemoryKill], whose: str = "") -> str:
    newest = kills[-1]
    at = f"at {when(newest.at)}: {newest}"
    if len(kills) == 1:
        return f"a process {whose}for memory {at}"
    return f"{len(kills)} processes {whose}for memory, the last one {at}"
