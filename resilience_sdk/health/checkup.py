"""The checkup of one node: chooses the probes for a job, runs them, and makes the report.

Also the preflight of a launcher, which starts `main` by name, because it is on the same floor: what a driver does to
that process is not the launcher's.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say
from resilience_sdk.core.run_directory import choose_run_dir
from resilience_sdk.core.settings import Settings, settings_from_json
from resilience_sdk.errors import ConfigError
from resilience_sdk.health import more, probes
from resilience_sdk.health.compute import CPU, slow_devices
from resilience_sdk.health.findings import Finding, HealthReport, to_event, told_faults
from resilience_sdk.health.gpu import cuda_devices
from resilience_sdk.health.host import process_table, start_environment
from resilience_sdk.health.network import split_endpoint
from resilience_sdk.health.probes import Context, Probe
from resilience_sdk.health.runner import run_probes
from resilience_sdk.health.software import OF_ONE_NODE, PREFIXES, dispositions, signals
from resilience_sdk.system import procfs
from resilience_sdk.system.hostinfo import host_name

# What the probes may know of the environment; the rest, and its secrets, is not theirs.
_VARIABLES = OF_ONE_NODE | {
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    environ.INTERNAL_JOB,
}
_PREFIXES = (*PREFIXES, "SLURM_", "OMPI_COMM_WORLD_")
_SECRETS = frozenset({"SLURM_JWT"})  # who has it may submit and cancel jobs in the user's name


def preflight(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    data: Sequence[str | os.PathLike[str]] = (),
    rendezvous: str | None = None,
    local_ranks: int | None = None,
    settings: Settings | None = None,
    compute: bool = False,
    limit_s: float | None = None,
) -> HealthReport:
    """Look at this node before a job, as `resilience doctor` does, and return what was found.

    Starts a process per probe and waits for them, at most for the longest deadline (3.5 s, of the GPUs 15 s) or
    `limit_s`. Never call it from a training loop. Changes nothing but a few small files in the run directory (or
    where that will be made), which it removes.

    Args:
        run_dir: The run directory; without it that of the settings, else the one that a job would get.
        data: Directories and files that the job reads.
        rendezvous: `host:port`; without it `MASTER_ADDR` and `MASTER_PORT`.
        local_ranks: Ranks on this node; without it `LOCAL_WORLD_SIZE`, else one for each GPU device.
        settings: Without them those of the launcher, else of the environment and its configuration file.
        compute: Whether each GPU (without one the processor) multiplies matrices whose product is known; takes as
            long as torch needs to start there, at most 60 s.
        limit_s: Seconds that no probe may exceed.

    Raises:
        ConfigError: An argument is wrong.
    """
    env = environ.environment()
    if settings is None:
        from resilience_sdk.rank.lifecycle import effective_settings  # late: the doctor has its settings already

        settings = effective_settings(env)
    place = None if run_dir is None else os.fspath(run_dir)
    context = job_context(env, settings, run_dir=place, data=data, rendezvous=rendezvous, local_ranks=local_ranks)
    context = attrs.evolve(context, own_pids=own_processes(os.getpid(), env))
    return examine(context, settings, compute=compute, limit_s=limit_s)


def job_context(
    env: Mapping[str, str],
    settings: Settings,
    *,
    run_dir: str | None = None,
    data: Sequence[str | os.PathLike[str]] = (),
    rendezvous: str | None = None,
    local_ranks: int | None = None,
) -> Context:
    """Return what the probes are told of a job that starts in this environment; raises ConfigError."""
    place, _ = choose_run_dir("run", env, run_dir or settings.run_dir)
    if rendezvous is None and env.get("MASTER_ADDR"):
        rendezvous = f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', '')}"
    if rendezvous is not None:
        try:
            split_endpoint(rendezvous)
        except ValueError as error:
            raise ConfigError(f"rendezvous: {error}") from None
    if local_ranks is None:
        told = env.get("LOCAL_WORLD_SIZE", "")
        is_told = told.isdecimal() and int(told) > 0
        local_ranks = int(told) if is_told else max(1, cuda_devices(env, gpu_devices()))
    return Context(
        run_dir=str(place),
        data_dirs=tuple(os.path.abspath(path) for path in data),
        rendezvous=rendezvous,
        local_ranks=local_ranks,
        settings=settings.to_json(),
        environment={
            name: value
            for name, value in env.items()
            if name not in _SECRETS and (name in _VARIABLES or name.startswith(_PREFIXES))
        },
    )


def examine(
    context: Context, settings: Settings, *, compute: bool = False, limit_s: float | None = None, patience: float = 1.0
) -> HealthReport:
    """Run the probes of a job on this node, and look at the signals of this very process.

    `patience` multiplies the deadlines of the probes; `limit_s` holds after that.
    """
    began, at = time.monotonic(), time.time()
    chosen = [*probes_for(context), *(compute_probes(context.environment) if compute else ())]
    chosen = [attrs.evolve(probe, deadline_s=patience * probe.deadline_s) for probe in chosen]
    found = for_this_torch(slow_devices(run_probes(chosen, context, limit_s=limit_s)))
    found += signals(settings, dispositions(context.root))
    return HealthReport(node=host_name(), at=at, took_s=round(time.monotonic() - began, 3), findings=tuple(found))


def probes_for(context: Context) -> list[Probe]:
    """Return the probes of a job: one for each part of the node, for each directory, and those of one file."""
    places = [*([context.run_dir] if context.run_dir else []), *context.data_dirs]
    return [
        *(probes.GPU, probes.HOST, probes.KERNEL, probes.PROCESSES, probes.NETWORK, probes.RENDEZVOUS),
        *(attrs.evolve(probes.STORAGE, only=place) for place in dict.fromkeys(places)),
        probes.SOFTWARE,
        *more.found(),
    ]


def compute_probes(env: Mapping[str, str]) -> list[Probe]:
    """Return a compute check for each GPU that the job may see, or one for the processor where there is none."""
    devices = [f"cuda:{number}" for number in range(cuda_devices(env, gpu_devices()))] or [CPU]
    return [attrs.evolve(probes.COMPUTE, only=device) for device in devices]


def for_this_torch(findings: list[Finding]) -> list[Finding]:
    """Return findings of which none of a GPU stops a job whose torch was built for the processor alone. Pure."""
    told = (finding.data.get("same", {}) for finding in findings if finding.check == "torch")
    built: Mapping[str, object] = next(told, {})
    if built.get("cuda", "not known") is not None:
        return findings
    return [attrs.evolve(finding, must=False) if finding.probe == probes.GPU.name else finding for finding in findings]


def gpu_devices() -> int:
    """Return how many GPUs the NVIDIA driver shows this process."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def own_processes(pid: int, env: Mapping[str, str], root: str = "/") -> tuple[int, ...]:
    """Return the process ids of the job that process `pid` is of, as far as this machine's process table tells.

    Of a rank, which its variables `env` make it: whoever started it (the launcher, a scheduler's step) and everything
    below that. Of another process: what it has started itself.
    """
    parents = {process.pid: process.parent for process in process_table(root)}
    proc = procfs.below(root, "/proc")

    def is_rank(other: int) -> bool:
        # A rank that was forked got its variables later than the kernel shows them.
        return environ.rank_identity(env if other == pid else start_environment(proc / str(other))) is not None

    return tuple(sorted(below(first_of_job(pid, parents, is_rank), parents)))


def first_of_job(pid: int, parents: Mapping[int, int], is_rank: Callable[[int], bool]) -> int:
    """Return the process that has started the ranks: the nearest ancestor of a rank that was not itself started as one.

    A wrapper script between them has a rank's variables. Pure, but for `is_rank`.
    """
    line = [pid]
    while is_rank(line[-1]) and (parent := parents.get(line[-1], 0)) > 1:  # whom init has adopted has no launcher
        if parent in line:
            break  # the table changed while it was read
        line.append(parent)
    return line[-1]


def below(first: int, parents: Mapping[int, int]) -> set[int]:
    """Return a process and all its descendants. Pure."""
    found, fresh = {first}, {first}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


# A person waits for the doctor; a job that is refused for a machine that was only busy has lost its place in the queue.
_PATIENCE = 4.0


def main() -> int:
    """Answer a task of a launcher with a report as JSON, `events` for the journal and `faults` of the SDK.

    The task holds `settings` (`Settings.to_json`), `run_dir`, `rendezvous`, `local_ranks`, `nodes` (how many the job
    has at most), `comes_s` (how long a rendezvous that is not there yet is waited for) and `answer` (a descriptor).
    """
    task = read_task()
    settings = settings_from_json(task["settings"])
    told = {name: task[name] for name in ("run_dir", "rendezvous", "local_ranks")}
    context = attrs.evolve(job_context(environ.environment(), settings, **told), nodes=task["nodes"])
    report = examine(context, settings, compute=True, patience=_PATIENCE)
    again = [attrs.evolve(probes.RENDEZVOUS, deadline_s=_PATIENCE * probes.RENDEZVOUS.deadline_s)]
    findings = wait_for_rendezvous(report.findings, lambda: run_probes(again, context), task["comes_s"])
    report = attrs.evolve(report, findings=tuple(findings))
    events = [to_event(finding) for finding in findings]
    tell(task, {**report.to_json(), "events": events, "faults": told_faults(findings)})
    return 0


def read_task() -> dict[str, Any]:
    """Return the task from standard input; from then on nobody but `tell` can write where the answer goes."""
    task: dict[str, Any] = json.load(sys.stdin)
    os.set_inheritable(task["answer"], False)
    with contextlib.suppress(OSError):  # there may be no standard error
        os.dup2(2, 1)
    return task


def tell(task: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    """Write the answer to a task."""
    with open(task["answer"], "wb", closefd=False) as way:
        way.write(json.dumps(answer).encode() + b"\n")


def wait_for_rendezvous(
    findings: Sequence[Finding], look: Callable[[], Sequence[Finding]], limit_s: float, *, again_s: float = 2.0
) -> list[Finding]:
    """Return findings of which those of the rendezvous are as `look` finds them once it is there, or at the end.

    Waits where nothing else stops the job, `limit_s` at most, and says so once.
    """
    found, ends, said = list(findings), time.monotonic() + limit_s, False
    while (stopping := [finding for finding in found if finding.stops]) and all(map(_may_come, stopping)):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            break
        if not said:
            said = True
            missing = f"{stopping[0].subject or 'the rendezvous'} is not there yet ({stopping[0].evidence})"
            say(f"preflight: {missing}; trying again for up to {left_s:.0f} s")
        time.sleep(min(again_s, left_s))
        found = [*(finding for finding in found if finding.probe != probes.RENDEZVOUS.name), *look()]
    return found


def _may_come(finding: Finding) -> bool:
    """Tell whether time may cure a finding.

    Not a name that does resolve, to a loopback address; nor this machine's own, which is up.
    """
    is_of_rendezvous = finding.probe == probes.RENDEZVOUS.name and finding.check != "own_name"
    return is_of_rendezvous and not finding.data.get("addresses")
