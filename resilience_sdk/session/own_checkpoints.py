"""The journal of a `Checkpointer` that was made without a `Run`."""

from __future__ import annotations

from pathlib import Path

from resilience_sdk import environ
from resilience_sdk.checkpoint.record import Place
from resilience_sdk.console import say_once
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.session.identity import fallback_job_key, find_identity
from resilience_sdk.session.lifecycle import current, lacks_page
from resilience_sdk.session.rank_journal import rank_journal


def find_place(run_dir: RunDirectory) -> Place | None:
    """Return where this rank journals its checkpoints in `run_dir`; None where it records nothing. Never raises.

    That is the journal of the session if the job writes there, else one of its own in `run_dir`. Starts nothing.
    """
    session = current()
    if session is None:
        return _without_session(run_dir) if lacks_page() else None
    if _is_same(session.run_dir.path, run_dir.path):
        return Place(session.journal)
    session.settle()
    rank = session.identity.rank
    if rank == 0:
        name = f"--run-dir or {environ.RUN_DIR}" if environ.INTERNAL_JOB in environ.environment() else environ.RUN_DIR
        say_once(
            f"checkpoints:{run_dir.path}",
            f"checkpoints go to {run_dir.path}, all else of this job to {session.run_dir.path}; so that its restarts, "
            f"status and incidents know of them, name the former with {name} too",
        )
    journal = rank_journal(run_dir, session.config.job, session.attempt, rank)
    return Place(journal, is_own=True, elsewhere=session.run_dir.journal)


def _without_session(run_dir: RunDirectory) -> Place:
    env = environ.environment()
    job = environ.job_key(env, fallback_job_key(env))
    return Place(rank_journal(run_dir, job, environ.attempt(env), find_identity(env).rank), is_own=True)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False
