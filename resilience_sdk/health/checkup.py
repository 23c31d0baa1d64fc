"""The preflight of one node: chooses the probes for a job, runs them, and makes the report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk import environ
from resilience_sdk.errors import ConfigError
from resilience_sdk.health import probes
from resilience_sdk.health.compute.probe import CPU, slow_devices
from resilience_sdk.health.findings import Finding
from resilience_sdk.health.gpu.visible import cuda_devices
from resilience_sdk.health.network.rendezvous import split_endpoint
from resilience_sdk.health.own_processes import own_processes
from resilience_sdk.health.probes import Context, Probe
from resilience_sdk.health.report import HealthReport
from resilience_sdk.health.runner import run_probes
from resilience_sdk.health.software.shared import OF_ONE_NODE, PREFIXES
from resilience_sdk.health.software.signals import dispositions, signals
from resilience_sdk.hostinfo import host_name
from resilience_sdk.run_directory import choose_run_dir
from resilience_sdk.settings import Settings

# What the probes may know of the environment; the rest, and its secrets, is not theirs.
_VARIABLES = frozenset(
    {
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        environ.INTERNAL_JOB,
    }
)
_GPU_DEVICE = re.compile(r"nvidia\d+")
_SCHEDULERS = ("SLURM_", "OMPI_COMM_WORLD_")
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
        from resilience_sdk.session.lifecycle import effective_settings  # late: the doctor has its settings already

        settings = effective_settings(env)
    context = job_context(
        env, settings, run_dir=None if run_dir is None else os.fspath(run_dir), data=data, rendezvous=rendezvous,
        local_ranks=local_ranks,
    )  # fmt: skip
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
    return Context(
        run_dir=str(place),
        data_dirs=tuple(os.path.abspath(path) for path in data),
        rendezvous=rendezvous,
        local_ranks=_local_ranks(env) if local_ranks is None else local_ranks,
        settings=settings.to_json(),
        environment={name: value for name, value in env.items() if _is_of_the_job(name)},
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
    return HealthReport(node=host_name(), at=at, took_s=round(time.monotonic() - began, 3), findings=found)


def probes_for(context: Context) -> list[Probe]:
    """Return the probes of a job: one for each part of the node, and for each directory."""
    places = [*([context.run_dir] if context.run_dir else []), *context.data_dirs]
    return [
        probes.GPU,
        probes.HOST,
        probes.KERNEL,
        probes.PROCESSES,
        probes.NETWORK,
        probes.RENDEZVOUS,
        *(attrs.evolve(probes.STORAGE, only=place) for place in dict.fromkeys(places)),
        probes.SOFTWARE,
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
    try:
        return len([name for name in os.listdir("/dev") if _GPU_DEVICE.fullmatch(name)])
    except OSError:
        return 0


def _is_of_the_job(name: str) -> bool:
    if name in _SECRETS:
        return False
    return name in _VARIABLES or name in OF_ONE_NODE or name.startswith((*PREFIXES, *_SCHEDULERS))


def _local_ranks(env: Mapping[str, str]) -> int:
    told = env.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    return max(1, cuda_devices(env, gpu_devices()))
