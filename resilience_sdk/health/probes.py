"""The table of probes and of what each of them checks (`probes.json`), and what they are told about the job.

Naming a probe loads nothing of it. The table is JSON: the process of every probe reads it, and to read TOML would cost
it as much as a third of its start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.environ import has_several_nodes
from resilience_sdk.health.findings import Finding, Status

KERNEL_LOG = "/dev/kmsg"


@attrs.frozen(kw_only=True)
class Context:
    """What the probes need to know of the job; plain values, handed to their processes as JSON.

    `root` stands before /proc and /sys, so that tests can show a machine that is not theirs. `only` is what one
    probe of a family is to look at (the directory of a storage probe). `environment` holds the variables that the
    job's ranks will have.
    """

    run_dir: str | None = None
    data_dirs: Sequence[str] = ()
    rendezvous: str | None = None  # host:port
    local_ranks: int = 1
    nodes: int | None = None  # of the job, where a launcher knows; else its variables are asked
    root: str = "/"
    only: str = ""
    deadline_s: float = 60.0  # what the probe that reads this has left; set in its process
    listen_s: float = 0.2  # how long a probe may wait for events
    kernel_log: str = KERNEL_LOG
    log_newer_s: float | None = None  # only what the kernel has said in these last seconds; else all that it has
    own_pids: Sequence[int] = ()  # the job's own processes
    settings: Mapping[str, Any] = attrs.field(factory=dict)  # Settings.to_json()
    environment: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def has_nodes_elsewhere(self) -> bool:
        """Tell whether the job has ranks on other nodes; False where nothing says so."""
        if self.nodes is not None:
            return self.nodes > 1
        # A batch script has no rank yet, and stands for the whole allocation.
        return has_several_nodes(self.environment) or self._allocated_nodes > 1

    @property
    def world_size(self) -> int:
        """Return how many ranks the job has, as far as that is known; at least those of this node."""
        if self.nodes is not None:
            return self.nodes * self.local_ranks
        told = [_count(self.environment.get(name)) for name in ("WORLD_SIZE", "SLURM_NTASKS")]
        return max(*told, self._allocated_nodes * self.local_ranks)

    @property
    def _allocated_nodes(self) -> int:
        env = self.environment
        return _count(env.get("SLURM_NNODES", env.get("SLURM_JOB_NUM_NODES")))


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 1


@attrs.frozen(kw_only=True)
class HealthCheck:
    """What is looked at, how much of it is too much, and what to do then.

    `limit` is in `unit`, and a value beyond it is bad; None where the driver gives it, where it follows from the job or
    the machine, so that the probe computes it, or where there is nothing to count.
    `growth_per_minute` is the limit of a counter's growth between two looks. `must`: what fails here is not to be used.
    `cure` is empty where only the probe can tell. The documentation of GPUs shows `looks_at` and `source`.
    """

    unit: str = ""
    cure: str = ""
    must: bool = False
    limit: float | str | None = None
    growth_per_minute: float | None = None
    looks_at: str = ""
    source: str = ""


@attrs.frozen(kw_only=True)
class Probe:
    """One look at one part of the world, in a process of its own.

    `function` names `module:function`; it is called with a `Context` and yields
    `Finding`s, each of which is told at once: what was seen before a hang or a crash counts. It may block and it
    may crash. After `deadline_s` seconds, counted from the start of the process, it is killed and left alone.
    `cure` is what to do when it hangs or crashes, `must` whether that stops a job. `only` becomes `Context.only`.
    """

    name: str
    about: str
    function: str = ""
    deadline_s: float = 0.0
    cure: str = ""
    must: bool = False
    only: str = ""
    checks: Mapping[str, HealthCheck] = attrs.field(factory=dict, eq=False, repr=False)

    def limit(self, check: str) -> float:
        """Return the limit of a check that has one in the table."""
        limit = self.checks[check].limit
        assert isinstance(limit, (int, float))
        return limit

    def found(
        self,
        check: str,
        status: Status,
        evidence: str = "",
        value: float | int | str | None = None,
        *,
        subject: str = "",
        data: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Finding:
        """Return the finding of a check; `changes` are what differs from its row in the table, such as its `cure`.

        Where there is no value there is no limit but one of `changes`. A cure stays only where something is wrong, or
        where what could not be looked at has one of its own. Its ` -i N`
        becomes the number of the GPU, so that commands can be copied.
        """
        row = attrs.evolve(self.checks[check], **changes)
        number = subject.removeprefix("GPU ")
        cure = row.cure.replace(" -i N", f" -i {number}") if number.isdecimal() else row.cure
        more = dict(data or {})
        if more.get("works") is False:
            more["lost"] = cure
        if row.growth_per_minute is not None and isinstance(value, int):
            more["growth"] = {"per_minute": row.growth_per_minute, "cure": cure}
        is_told = status is not Status.OK and (status is not Status.UNAVAILABLE or "cure" in changes)
        return Finding(
            probe=self.name,
            check=check,
            subject=subject,
            status=status,
            value=value,
            unit="" if value is None else row.unit,
            threshold=None if value is None and "limit" not in changes else row.limit,
            evidence=evidence,
            cure=cure if is_told else "",
            must=row.must,
            data=more,
        )


def _probe(name: str, table: dict[str, Any]) -> Probe:
    checks = {check: HealthCheck(**row) for check, row in table.pop("checks").items()}
    if function := table.pop("function", ""):  # one without looks at what the asking process knows
        table["function"] = f"{__package__}.{function}"
    return Probe(name=name, checks=checks, **table)


PROBES: Mapping[str, Probe] = {
    name: _probe(name, table)
    for name, table in json.loads(Path(__file__).with_name("probes.json").read_text(encoding="utf-8")).items()
}
GPU = PROBES["gpu"]
# Xid events, as long as a watch has nothing else to do.
GPU_EVENTS = attrs.evolve(GPU, function=f"{__package__}.gpu:listen")
HOST = PROBES["host"]
KERNEL = PROBES["kernel"]
PROCESSES = PROBES["processes"]
NETWORK = PROBES["network"]
RENDEZVOUS = PROBES["rendezvous"]
STORAGE = PROBES["storage"]
SOFTWARE = PROBES["software"]
SIGNALS = PROBES["signals"]
COMPUTE = PROBES["compute"]
NODES = PROBES["nodes"]
