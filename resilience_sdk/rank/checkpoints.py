"""Checkpoints of a job.

The last save before a stop, and what a `Checkpointer` made without a `Run` gets from the session.

And what is said of a training that ended before it was complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from resilience_sdk import preemption
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.history import JournalPlace
from resilience_sdk.checkpoint.ranks import agreement, find_ranks, group_is_ready
from resilience_sdk.checkpoint.store import Claim
from resilience_sdk.core import environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event
from resilience_sdk.core.lease import current_holder, refuse_other_jobs
from resilience_sdk.core.run_directory import RunDirectory, choose_run_dir
from resilience_sdk.core.settings import load_settings
from resilience_sdk.incidents import count_words
from resilience_sdk.preemption import listener as listening
from resilience_sdk.preemption.listener import StepsDone
from resilience_sdk.rank.exceptions import ended_by
from resilience_sdk.rank.identity import (
    fallback_job_key,
    find_identity,
    parent_process,
    rank_journal,
    refuse_fresh_start,
    shares_key,
)
from resilience_sdk.rank.lifecycle import current, ensure_started, lacks_page

if TYPE_CHECKING:
    from resilience_sdk.rank.session import Session


class _Saves(Protocol):
    def save(self, step: int) -> bool: ...


def save_at_stop(checkpointer: _Saves, step: int, session: Session | None) -> bool:
    """Save after `step` steps and tell whether that worked. Collective: rank 0 decides for all whether it fits.

    Where the disk is full, say, it is tried again while the stop leaves time.
    """
    if not fits(checkpointer, step, session):
        return False
    if isinstance(checkpointer, Checkpointer):
        return checkpointer.save_patiently(step, is_stop=True).unsaved is None
    return checkpointer.save(step)


def wait_limit_s() -> float:
    """Return how long this process may wait for a storage."""
    session = current()
    if session is not None:
        return session.settings.wait_limit
    return load_settings(env=environ.environment(), strict_env=False).wait_limit


def checks_resumes() -> bool:
    """Tell whether resumes are compared with what went before. Starts nothing."""
    session = current()
    settings = load_settings(env=environ.environment(), strict_env=False) if session is None else session.settings
    return settings.resume_check != "off"


def time_left() -> float | None:
    """Return the seconds until this job is ended, None while that is not known. Begins to listen to nothing."""
    return preemption.time_left() if hears_stops() else None


def hears_stops() -> bool:
    """Tell whether this rank takes part in agreeing on a stop, which a check begins or a run."""
    return listening.handlers() is not None


def is_asked() -> bool:
    """Tell whether this rank knows that the job was asked to leave."""
    return listening.is_asked()


def asks_stop(step: int) -> bool:
    """Tell whether all ranks are to stop here, after `step` completed steps. Collective."""
    return preemption.check(StepsDone(step))


def end_unsaved(lost: str, advice: str, *, at_exit: bool = False) -> bool:
    """Let the launcher know that the job is not finished: its last state could not be saved. Never raises.

    `at_exit`: the process ends. False where it is ended by an error, which says more.
    """
    if at_exit and ended_by() is not None:
        return False
    from resilience_sdk.postmortem.facts import UNSAVED

    session = current()
    if session is not None:
        session.ask_launcher(UNSAVED, lost, advice)
    return True


def fits(checkpointer: object, step: int, session: Session | None) -> bool:
    """Tell whether a save after `step` steps fits into the time that is left; if not, say so. Collective."""
    wait = getattr(checkpointer, "wait", None)
    # The save would wait for one in the background, without an end.
    is_free = wait is None or wait(preemption.time_left())
    expected_s = float(getattr(checkpointer, "expected_save_s", 0.0) or 0.0)
    left_s = preemption.time_left()
    is_time = is_free and (left_s is None or expected_s <= left_s)
    if group_is_ready():
        ranks = find_ranks()
        with agreement():
            is_time = bool(ranks.broadcast(is_time))
    if is_time:
        return True
    if session is not None:
        session.journal.emit(Event.CKPT_SKIP, step=step, why="no time", time_left_s=left_s, expected_s=expected_s)
        if session.identity.rank == 0:
            say(f"no last save: it takes about {expected_s:.1f} s, {left_s or 0.0:.1f} s are left")
    return False


def say_how_to_resume(session: Session, good_step: int | None, how: str = "stopped") -> None:
    """Say what is kept, where no launcher of ours does: a stopped run must not look like a lost one. On rank 0."""
    if good_step is None or session.identity.rank != 0 or environ.INTERNAL_JOB in environ.environment():
        return
    kept = f"the newest checkpoint is after {count_words(good_step)}"
    say(f"{how}; {kept}; to resume: {environ.RUN_DIR}={session.run_dir.path} and the same command")


def directory_of_job() -> Path | None:
    """Return the run directory of this process's job, or None where none is named. Starts nothing.

    Raises DirectoryInUseError where the job was to have another one than it has.
    """
    session = current()
    if session is not None:
        refuse_fresh_start(session.config)
        return session.run_dir.path
    path, is_named = _chosen()
    return path if is_named else None


def claim(run_dir: RunDirectory) -> Claim | None:
    """Return in whose name this process writes checkpoints to `run_dir`; None where the SDK is switched off.

    Raises DirectoryInUseError where another job uses `run_dir`.
    """
    env = environ.environment()
    if environ.is_disabled(env):
        return None
    session = current()
    job = environ.job_key(env, fallback_job_key(env)) if session is None else session.config.job
    if shares_key(job, env):  # else the other job may be this one's ranks on another node
        refuse_other_jobs(run_dir, job)
    # Our launcher sees to it that an attempt has ended before the next begins, even if a process cannot be ended.
    is_ours = environ.INTERNAL_JOB in env
    return Claim(job, alone=not is_ours, kin=frozenset({parent_process()[0]}))


def start_in(run_dir: RunDirectory) -> None:
    """Begin to record, if that has not begun: in `run_dir`, unless the job has named another directory."""
    env = environ.environment()
    # Ranks of several nodes may not know that they are one job; rank 0 has made sure that it is nobody else's.
    holder = current_holder(run_dir)
    is_free = holder is None or holder.job == environ.job_key(env, fallback_job_key(env))
    # Not as a directory that the code insists on: where it cannot be recorded in, the training goes on.
    ensure_started(arguments={"run_dir": str(run_dir.path)} if is_free and not _is_named_elsewhere() else None)


def _chosen() -> tuple[Path, bool]:
    env = environ.environment()
    return choose_run_dir("", env, load_settings(env=env, strict_env=False).run_dir)


def _is_named_elsewhere() -> bool:
    env = environ.environment()
    return bool(env.get(environ.RUN_DIR) or load_settings(env=env, strict_env=False).run_dir)


def find_place(run_dir: RunDirectory) -> JournalPlace | None:
    """Return where this rank journals its checkpoints in `run_dir`; None where it records nothing. Never raises.

    That is the journal of the session if the job writes there, else one of its own in `run_dir`. Starts nothing.
    """
    session = current()
    if session is None:
        return _without_session(run_dir) if lacks_page() else None
    if _is_same(session.run_dir.path, run_dir.path):
        return JournalPlace(session.journal)
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
    return JournalPlace(journal, is_own=True, elsewhere=session.run_dir.journal)


def _without_session(run_dir: RunDirectory) -> JournalPlace:
    env = environ.environment()
    job = environ.job_key(env, fallback_job_key(env))
    return JournalPlace(rank_journal(run_dir, job, environ.attempt(env), find_identity(env).rank), is_own=True)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one == other or one.samefile(other)
    except OSError:
        return False
