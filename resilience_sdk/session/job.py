"""The job of a rank that no launcher of ours has described: its key, its run directory, its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from resilience_sdk import console, environ, hostinfo, job_config
from resilience_sdk.errors import DirectoryInUseError, RunDirectoryError
from resilience_sdk.job_config import JobConfig
from resilience_sdk.lease import Lease, current_holder, refuse_other_jobs
from resilience_sdk.run_directory import RunDirectory, choose_run_dir
from resilience_sdk.session.earlier_start import is_over
from resilience_sdk.session.identity import is_alone, parent_process
from resilience_sdk.settings import Settings

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
