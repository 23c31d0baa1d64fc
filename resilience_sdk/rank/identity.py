"""The identity of a rank.

Rank, local rank, world size, the key of its job, and the job that no launcher of ours has described.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import attrs

from resilience_sdk.core import console, environ, job_config
from resilience_sdk.core.environ import RankIdentity
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Journal
from resilience_sdk.core.lease import Lease, current_holder, refuse_other_jobs
from resilience_sdk.core.run_directory import RunDirectory, choose_run_dir
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import DirectoryInUseError, RunDirectoryError
from resilience_sdk.recorder.page_directory import parse_stem
from resilience_sdk.recorder.page_reader import PageReader, RankSnapshot
from resilience_sdk.system import hostinfo


def is_over(pages: Path, attempt: int, began_ns: int, *, but: int) -> bool:
    """Tell whether the start that began then (monotonic) had ranks, all have ended, and this process is none of them.

    `but`: a process that does not count, since it started them. The ranks of one start are processes before the first
    of them has a page; so whoever was started after that is none of them. Where start times are unknown, False.
    """
    started_ns = _started_ns(os.getpid())
    newest_ns = 0
    for path in pages.glob(f"a{attempt}-r*.page"):
        stem = parse_stem(path.stem)
        if stem is None or stem[2] == but:
            continue
        page = read_page(path)
        if page is None or page.created_ns < began_ns:
            continue
        if not hostinfo.process_is_gone(page.pid, page.start_ticks):
            return False
        newest_ns = max(newest_ns, page.created_ns)
    return started_ns is not None and 0 < newest_ns < started_ns


def read_page(path: Path) -> RankSnapshot | None:
    """Return what a page says now, or None for one that cannot be read."""
    try:
        reader = PageReader(path)
    except OSError:
        return None
    try:
        return reader.snapshot()
    finally:
        reader.close()


def _started_ns(pid: int) -> int | None:
    """Return when a process was started, on the monotonic clock; a tick early at most."""
    ticks = hostinfo.process_start_ticks(pid)
    if ticks is None:
        return None
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    # The kernel counts the time that the machine was suspended, the monotonic clock does not.
    return since_boot_ns - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns())


@attrs.frozen
class Identity:
    """A rank identity, and whether a process group may still correct it."""

    rank: int
    local_rank: int
    world_size: int
    provisional: bool


def find_identity(env: Mapping[str, str]) -> Identity:
    """Return who this process is, by its environment, else its process group, else a guess to be corrected."""
    found = environ.rank_identity(env) or group_identity()
    if found is not None:
        return Identity(found.rank, found.local_rank, found.world_size, provisional=False)
    # Children of mp.spawn are numbered from 1 in the order of their start, which is their rank.
    numbers = multiprocessing.current_process()._identity
    guess = numbers[0] - 1 if numbers else 0
    return Identity(guess, guess, guess + 1, provisional=True)


def group_identity() -> RankIdentity | None:
    """Return the identity in an initialised default process group, without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None
    rank = distributed.get_rank()
    return RankIdentity(rank=rank, local_rank=rank, world_size=distributed.get_world_size(), source="torch.distributed")


def parent_process() -> tuple[int, int]:
    """Return `(pid, start ticks)` of the process that started the ranks, as far as it can be told."""
    parent = multiprocessing.parent_process()
    pid = os.getppid() if parent is None or parent.pid is None else parent.pid
    return pid, hostinfo.process_start_ticks(pid) or 0


def is_dataloader_worker() -> bool:
    """Tell whether this process is a DataLoader worker, which is no rank."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def process_of_rank(pages: Path, attempt: int, rank: int) -> int | None:
    """Return the living process, not this one, that records as this rank already; None when there is none.

    What a rank starts (an evaluation, a pool of helpers) inherits its environment, and would pass for the rank. A
    process that has recorded nothing so far may be a wrapper around the one that trains, so it does not count; nor
    does one that only guessed its rank.
    """
    for path in pages.glob(f"a{attempt}-r{rank}-*.page"):
        stem = parse_stem(path.stem)
        if stem is None or stem[2] == os.getpid():
            continue
        page = read_page(path)
        recorded = page is not None and any(lane.last_ns or lane.stack for lane in page.lanes)
        if page is None or page.provisional or not recorded:
            continue
        if not hostinfo.process_is_gone(page.pid, page.start_ticks):
            return page.pid
    return None


def is_alone(env: Mapping[str, str]) -> bool:
    """Tell whether nothing shows that a launcher started this process together with others."""
    return environ.rank_identity(env) is None and multiprocessing.parent_process() is None


def shares_key(job: str, env: Mapping[str, str]) -> bool:
    """Tell whether all ranks of this job have its key: not on several nodes, where each launcher made up its own."""
    return job != fallback_job_key(env) or not environ.has_several_nodes(env)


def fallback_job_key(env: Mapping[str, str]) -> str:
    """Return the key of a job whose launcher sets no variable: its launching process.

    A plain `python train.py` has no launcher; its parent is a shell that may run several, so it is its own. So is
    the one that Lightning's other ranks are children of.
    """
    is_first = is_alone(env) or environ.lightning_local_rank(env) == 0
    pid = os.getpid() if is_first else parent_process()[0]
    return f"pid-{hostinfo.host_name()}-{pid}-{hostinfo.process_start_ticks(pid)}"


_MOST_SIBLINGS = 100


def join_job(
    pages: Path,
    job: str,
    script: str,
    settings: Settings,
    env: Mapping[str, str],
    run_dir: str | None,
    *,
    resumes: bool = False,
) -> JobConfig:
    """Return what the job agreed on; the first of its ranks on this node decides.

    `run_dir` is what the code names; `resumes`: a sibling of the directory that the user named will not do.
    Raises OSError and RunDirectoryError.
    """
    proposal = propose(job, script, settings, env, run_dir, resumes)
    attempt, parent = environ.attempt(env), proposal.parent_pid
    config = job_config.agree(pages, proposal, lambda began_ns: is_over(pages, attempt, began_ns, but=parent))
    if config.began_ns == proposal.began_ns:
        # The monitor takes the lease over and renews it; until then it is ours.
        Lease.acquire(RunDirectory.create(config.run_dir, group_readable=settings.group_readable), job)
        if not config.run_named:
            console.say_once(
                "run directory", f"run directory: {config.run_dir} (RESILIENCE_RUN_DIR names one to resume in)"
            )
    return config


def propose(
    job: str, script: str, settings: Settings, env: Mapping[str, str], explicit_run_dir: str | None, resumes: bool
) -> JobConfig:
    """Return the job as this rank alone sees it. Raises as `join_job`."""
    run_dir, named = choose_run_dir(script, env, explicit_run_dir or settings.run_dir)
    is_users = bool(explicit_run_dir or settings.run_dir or env.get(environ.RUN_DIR))
    # A foreign launcher may have started this job's own ranks, on another node, under another key.
    may_refuse = is_alone(env)
    if may_refuse and (explicit_run_dir or (resumes and is_users)):
        refuse_other_jobs(RunDirectory(run_dir), job)
    used = _unused(run_dir, job)
    # A process of its own may be started by a shell, which outlives it and restarts nothing.
    parent_pid, parent_ticks = (0, 0) if is_alone(env) else parent_process()
    on_hang = settings.on_hang or "report"
    return JobConfig(
        job=job,
        run_dir=str(used),
        run_named=named,
        instead_of=str(run_dir) if may_refuse and is_users and used != run_dir else None,
        settings=settings.to_json(),
        # Without our launcher nobody restarts: ending the stuck ranks lets the foreign one's policy act.
        on_hang="kill" if on_hang == "restart" else on_hang,
        script=script,
        launcher_pid=None,
        launcher_ticks=None,
        creator_pid=os.getpid(),
        creator_ticks=hostinfo.process_start_ticks(os.getpid()) or 0,
        parent_pid=parent_pid,
        parent_ticks=parent_ticks,
    )


def refuse_fresh_start(config: JobConfig) -> None:
    """Raise `DirectoryInUseError` where a job that resumes would begin anew: the directory it was given was in use."""
    if config.instead_of is not None:
        raise DirectoryInUseError(
            f"{config.instead_of} was in use by another job when this one began, and in {config.run_dir} it would not "
            f"go on from there: end that job, or name another directory with {environ.RUN_DIR}"
        )


def _unused(run_dir: Path, job: str) -> Path:
    """Return `run_dir`, or a sibling where another live job uses it: what is only watched must not end for that."""
    for number in range(1, _MOST_SIBLINGS):
        candidate = run_dir if number == 1 else run_dir.with_name(f"{run_dir.name}.{number}")
        holder = current_holder(RunDirectory(candidate))
        if holder is None or holder.job == job:
            if number > 1:
                console.say_once("in-use", f"{run_dir} is in use by another job; this one uses {candidate}")
            return candidate
    raise RunDirectoryError(f"{run_dir} and {_MOST_SIBLINGS} siblings are in use; name another with {environ.RUN_DIR}")


def rank_journal(run_dir: RunDirectory, job: str, attempt: int, rank: int) -> Journal:
    """Return the journal of a rank in `run_dir`, which opens nothing yet, and name the rank in what it says."""
    host = hostinfo.host_name()
    console.bind(rank=rank, attempt=attempt, node=host)
    return Journal(
        run_dir.journal,
        writer=f"rank{rank}",
        host=host,
        boot_id=hostinfo.boot_id(),
        job=job,
        attempt=attempt,
        rank=rank,
    )
