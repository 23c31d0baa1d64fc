"""The jobs of a rehearsal: the user's script under `resilience run`, in a directory of its own, with the faults given.

Nothing of the user's is written: run directory, working directory and trackers are not his.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.plain_file import plain, read_text
from resilience_sdk.core.settings.fields import SINK_FIELDS
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.faults import Plan
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.rank.rehearsal import ANSWERED, SEEN_ENOUGH, read_traces
from resilience_sdk.rehearse.plan import Deadlines, JobFacts
from resilience_sdk.system import programs

OUTPUT = "output.log"
SCRATCH = "{scratch}"
"""Stands in the script's arguments for the directory of the one job."""
_GOODBYE_S = 20.0
_LOOK_EVERY_S = 0.3
# What the user has set for his own job and must not reach a rehearsal of it.
_OF_THE_JOB = {
    *(environ.RUN_DIR, environ.JOB_ID, environ.FAULT, environ.PAGE_DIR, environ.DISABLE, environ.FINISHED_FLAG_FILE),
    *(f"{environ.PREFIX}{name.upper()}" for name in SINK_FIELDS),
}


@attrs.frozen
class RehearsedJob:
    """The user's job: the words of `resilience run` behind its options, and where they are to be understood."""

    words: tuple[str, ...]
    ranks: int
    here: str | None
    """The working directory, where the user wants his own; None: an empty one for each job."""
    python_path: str | None
    """Where `-m module` is found, wherever the job runs; None for a script."""
    limit_s: float
    """After which a job that has not ended is ended."""


Events = tuple[Mapping[str, Any], ...]


def rehearse(
    job: RehearsedJob,
    directory: Path,
    faults: Sequence[Plan],
    deadlines: Deadlines,
    is_answered: Callable[[Events], bool] = lambda events: False,
) -> JobFacts:
    """Run the job once, and again where it was asked to leave, as its scheduler would; return what it left behind.

    As soon as `is_answered` by the events of its journal, no step is slowed down any more. A script that is not what it
    was started as is ended, with no exit code. Raises OSError where the directory cannot be written.
    """
    work = directory / "work"
    work.mkdir(parents=True)
    began_s = time.monotonic()
    env = _environment(job)
    codes: list[int | None] = []
    for start in range(2):
        told = {environ.FAULT: ";".join(map(str, faults))} if faults and start == 0 else {}
        traces = directory / f"traces-{start}"
        whole = {**env, **told, environ.REHEARSAL: str(traces)}
        with _started(job, directory, whole, 2 if faults else 0, deadlines) as process:
            codes.append(_wait(process, job.limit_s, directory, traces, is_answered))
        if codes != [EXIT_PREEMPTED] or not faults:
            break
    run_dir = directory / "run"
    return JobFacts(
        exit_codes=tuple(codes),
        seconds=time.monotonic() - began_s,
        traces=tuple(read_traces(directory / f"traces-{start}") for start in range(len(codes))),
        incidents=tuple(IncidentStore(run_dir).all()) if run_dir.is_dir() else (),
        events=_events(directory),
    )


def last_lines(directory: Path, count: int) -> list[str]:
    """Return the last lines that a job has printed; none where it printed nothing."""
    with contextlib.suppress(OSError):
        return read_text(directory / OUTPUT, errors="replace").splitlines()[-count:]
    return []


def _events(directory: Path) -> Events:
    journal = directory / "run" / "journal"
    return read_journal(journal).events if journal.is_dir() else ()


@contextlib.contextmanager
def _started(
    job: RehearsedJob, directory: Path, env: Mapping[str, str], max_restarts: int, deadlines: Deadlines
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job; at the end of the block it is gone."""
    options = {
        "run-dir": directory / "run",
        "nproc-per-node": job.ranks,
        "max-restarts": max_restarts,
        "stuck-after": deadlines.stuck_after_s,
        "preempt-time": deadlines.preempt_s,
        "term-grace": 2,
        "monitor-interval": 0.1,
        "on-hang": "restart",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    script = [word.replace(SCRATCH, str(directory / "work")) for word in job.words]
    with open(directory / OUTPUT, "ab", opener=plain) as log:
        process = programs.start(
            programs.COMMAND,
            "run",
            *words,
            *script,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=job.here or str(directory / "work"),
        )
        try:
            yield process
        finally:
            programs.end(process, _GOODBYE_S)


def _wait(
    process: subprocess.Popen[bytes],
    limit_s: float,
    directory: Path,
    traces: Path,
    is_answered: Callable[[Events], bool],
) -> int | None:
    """Return the exit code of the job, None where it does not end in its time; tell its ranks of the answer."""
    until_s = time.monotonic() + limit_s
    has_answer = False
    while (left_s := until_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(left_s if has_answer else min(left_s, _LOOK_EVERY_S))
        if (traces / SEEN_ENOUGH).exists():
            return None
        if not has_answer and (has_answer := is_answered(_events(directory))):
            with contextlib.suppress(OSError):  # then it goes on slowly
                (traces / ANSWERED).touch()
    return None


def _environment(job: RehearsedJob) -> dict[str, str]:
    inherited = environ.outside_of_jobs(environ.environment())
    env = {name: value for name, value in inherited.items() if name not in _OF_THE_JOB}
    if job.python_path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (job.python_path, env.get("PYTHONPATH"))))
    env[environ.JOB_ID] = f"rehearsal-{uuid.uuid4().hex[:12]}"
    return env
