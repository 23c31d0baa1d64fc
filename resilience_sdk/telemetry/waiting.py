"""Waiting for a job that begins later than those who are to tell of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from resilience_sdk.console import say
from resilience_sdk.lease import current_holder
from resilience_sdk.run_directory import RunDirectory

_LOOK_S = 0.5


def wait_for_run(path: str | os.PathLike[str], stop: threading.Event, *, for_a_job: bool) -> RunDirectory | None:
    """Return the run directory `path` once a job has used it (`for_a_job`: once one uses it); None if `stop` is set.

    That it waits is said once.

    Raises:
        RunDirectoryError: `path` is a file, or cannot be read.
    """
    told = False
    while (run := _used(Path(path), held=for_a_job)) is None:
        if not told:
            told = True
            say(f"telemetry: no job has begun in {os.path.abspath(path)} yet; waiting for one (Ctrl-C ends this)")
        if stop.wait(_LOOK_S):
            return None
    return run


def _has_nothing_of_ours(run: RunDirectory) -> bool:
    return run.path.is_dir() and not any(place.exists() for place in (run.journal, run.outcome, run.finished))


def _used(path: Path, *, held: bool) -> RunDirectory | None:
    """Return the run directory where a job has used it or, with `held`, uses it now."""
    run = RunDirectory(path.absolute())
    if not run.path.exists() or (os.access(run.path, os.R_OK | os.X_OK) and _has_nothing_of_ours(run)):
        return None
    run = RunDirectory.open(run.path)
    if current_holder(run) is not None:
        return run
    return None if held or run.is_unused() else run
