"""The one file that reads the environment.

Three kinds of variables live there: who this process is (rank variables of the launchers), what the user
asked for (`RESILIENCE_*`), and what our own processes tell one another (`RESILIENCE_INTERNAL_*`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

import attrs

PREFIX = "RESILIENCE_"
INTERNAL_PREFIX = "RESILIENCE_INTERNAL_"

DISABLE = "RESILIENCE_DISABLE"
FAULT = "RESILIENCE_FAULT"
CONFIG = "RESILIENCE_CONFIG"
JOB_ID = "RESILIENCE_JOB_ID"
PAGE_DIR = "RESILIENCE_PAGE_DIR"
RUN_DIR = "RESILIENCE_RUN_DIR"
REHEARSAL = "RESILIENCE_REHEARSAL"  # directory in which the ranks of a rehearsal write down their steps and saves
AUTO = "RESILIENCE_AUTO"
EXCLUDE_NODES = "RESILIENCE_EXCLUDE_NODES"  # in which a supervised command finds the nodes that it had better leave out
DASHBOARD_TOKEN = "RESILIENCE_DASHBOARD_TOKEN"  # noqa: S105 - the name of one, without which nobody may look
# Known RESILIENCE_* variables that are no settings field.
NON_FIELDS = frozenset({DISABLE, FAULT, AUTO, CONFIG, DASHBOARD_TOKEN, EXCLUDE_NODES, JOB_ID, PAGE_DIR, REHEARSAL})

# Written by the launcher for its ranks and its monitor.
INTERNAL_JOB = "RESILIENCE_INTERNAL_JOB"  # the job key: equal in all processes of the job
INTERNAL_ATTEMPT = "RESILIENCE_INTERNAL_ATTEMPT"  # 0, 1, ... counted by our launcher
INTERNAL_PAGES = "RESILIENCE_INTERNAL_PAGES"  # directory of this job's rank pages; empty: none could be had
INTERNAL_SETTINGS = "RESILIENCE_INTERNAL_SETTINGS"  # JSON file with the launcher's effective settings
INTERNAL_CONFIG = (
    "RESILIENCE_INTERNAL_CONFIG"  # the job as its launcher knows it, settings included: `JobConfig` as JSON
)
INTERNAL_RUN_NAMED = "RESILIENCE_INTERNAL_RUN_NAMED"  # "1": the user named the run directory, so resuming is allowed
INTERNAL_SCREENS = "RESILIENCE_INTERNAL_SCREENS"  # where a worker's streams went before they were led into files
INTERNAL_NVRX = "RESILIENCE_INTERNAL_NVRX"  # what NVIDIA's extension is configured with, for what stands in its place
NVRX_MONITOR = "FT_RANK_MONITOR_IPC_SOCKET"  # the launcher of NVIDIA's extension tells ranks where their monitor is
FINISHED_FLAG_FILE = "FAULT_TOL_FINISHED_FLAG_FILE"


@attrs.frozen
class RankIdentity:
    """Who a process is in its job, as far as its environment tells."""

    rank: int
    local_rank: int
    world_size: int
    source: str  # the variable or mechanism that told


def environment() -> MutableMapping[str, str]:
    """Return the live environment of this process; everything else receives it from here."""
    return os.environ


_OF_OTHER_JOBS = ("PET_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", INTERNAL_PREFIX)
_OF_RANKS = frozenset(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
)


def outside_of_jobs(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a launcher or scheduler around this process has said of its job."""
    return {name: value for name, value in env.items() if name not in _OF_RANKS and not name.startswith(_OF_OTHER_JOBS)}


def is_disabled(env: Mapping[str, str]) -> bool:
    """Tell whether `RESILIENCE_DISABLE` asks every call to be a no-op."""
    return env.get(DISABLE, "").strip().lower() in ("1", "true", "yes", "on")


def is_automatic(env: Mapping[str, str]) -> bool:
    """Tell whether `RESILIENCE_AUTO` asks frameworks to use us with no code."""
    return env.get(AUTO, "").strip().lower() in ("1", "true", "yes", "on")


def rank_identity(env: Mapping[str, str]) -> RankIdentity | None:
    """Return the identity that the launcher's variables give, or None when they give none.

    `RANK` decides where it is set. Schedulers set their variables in single-process jobs too, so those
    count only with a size above one.
    """
    rank = _integer(env.get("RANK"))
    if rank is not None:
        return RankIdentity(
            rank=rank,
            local_rank=_integer(env.get("LOCAL_RANK")) or 0,
            # A page refuses a rank beyond its world; who sets only RANK knows of that many ranks at least.
            world_size=max(_integer(env.get("WORLD_SIZE")) or 1, rank + 1),
            source="RANK",
        )
    if (local_rank := lightning_local_rank(env)) is not None and _integer(env.get("NODE_RANK")) == 0:
        size = max(_integer(env.get("WORLD_SIZE")) or 1, local_rank + 1)
        return RankIdentity(rank=local_rank, local_rank=local_rank, world_size=size, source="LOCAL_RANK of Lightning")
    for rank_name, size_names, local_name in (
        ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID"),
    ):
        rank = _integer(env.get(rank_name))
        size = next((n for name in size_names if (n := _integer(env.get(name))) is not None), 1)
        if rank is not None and size > 1:
            return RankIdentity(
                rank=rank, local_rank=_integer(env.get(local_name)) or 0, world_size=size, source=rank_name
            )
    return None


def lightning_local_rank(env: Mapping[str, str]) -> int | None:
    """Return the number of a rank on its node that Lightning itself has started by running the script again, else None.

    Number 0 is the process that the user has started: it starts the others, which are its children.
    """
    is_its = "RANK" not in env and "NODE_RANK" in env and _integer(env.get("WORLD_SIZE")) is not None
    return _integer(env.get("LOCAL_RANK")) if is_its else None


def has_several_nodes(env: Mapping[str, str]) -> bool:
    """Tell whether the launcher's variables say that ranks of this job are elsewhere; False where they say nothing."""
    for local, total in (
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ):
        here, everywhere = _integer(env.get(local)), _integer(env.get(total))
        if here is not None and everywhere is not None:
            return here < everywhere
    nodes = env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES")) if "SLURM_PROCID" in env else None
    return (_integer(nodes) or 1) > 1


def attempt(env: Mapping[str, str]) -> int:
    """Return the number of this attempt: our launcher's, else torchrun's restart count, else 0."""
    for name in (INTERNAL_ATTEMPT, "TORCHELASTIC_RESTART_COUNT"):
        value = _integer(env.get(name))
        if value is not None:
            return value
    return 0


def restarts(env: Mapping[str, str], max_restarts: int) -> bool:
    """Tell whether a launcher starts the ranks again when one fails; `max_restarts` is our own's."""
    if INTERNAL_JOB in env:
        return max_restarts > 0
    most, count = (_integer(env.get(f"TORCHELASTIC_{name}")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return most is not None and count is not None and count < most


def scheduler_job(env: Mapping[str, str]) -> str | None:
    """Return the scheduler's own name of this job (stable over a requeue), or None outside one."""
    job = env.get("SLURM_JOB_ID")
    if not job:
        return None
    task = env.get("SLURM_ARRAY_TASK_ID")
    return f"slurm-{job}_{task}" if task else f"slurm-{job}"


def job_key(env: Mapping[str, str], fallback: str) -> str:
    """Return the key that all processes of one job share and no other job has.

    `fallback` names the launching process (pid, start time, host) for launchers that set no variable.
    """
    if key := env.get(INTERNAL_JOB) or env.get(JOB_ID):
        return key
    if job := env.get("SLURM_JOB_ID"):
        return f"slurm-{job}.{env.get('SLURM_STEP_ID', 'batch')}"
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        # The port tells two jobs with one run id apart, but without the agent's store it is another in each attempt.
        port = env.get("MASTER_PORT", "") if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ""
        return f"elastic-{run_id}-{env.get('MASTER_ADDR', '')}:{port}"
    return fallback


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
