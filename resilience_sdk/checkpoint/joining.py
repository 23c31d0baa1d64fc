"""The job of a `Checkpointer`: where it writes, in whose name, and that nobody else writes there."""

from __future__ import annotations

import os
from pathlib import Path

import resilience_sdk
from resilience_sdk import lanes
from resilience_sdk.checkpoint.record import Place, Record
from resilience_sdk.checkpoint.writer import WriterHold, hold_checkpoints
from resilience_sdk.console import say_once
from resilience_sdk.errors import DirectoryInUseError, RunDirectoryError
from resilience_sdk.run_directory import RunDirectory


def directory_of_job() -> Path:
    """Return the run directory of the job that this process is in; raises `RunDirectoryError` where none is named."""
    own = resilience_sdk._own_checkpoints()
    path: Path | None = None if own is None else own.directory_of_job()
    if path is None:
        raise RunDirectoryError(
            "Checkpointer(run_dir=...) is missing, and this job has named no run directory: give one to resume from "
            "later, such as run_dir='runs/a', or set RESILIENCE_RUN_DIR"
        )
    return path


def open_directory(path: str | os.PathLike[str], *, read_only: bool, group_readable: bool) -> RunDirectory:
    """Return the run directory at `path`, made if it is to be written; raises `RunDirectoryError`."""
    return RunDirectory.open(path) if read_only else RunDirectory.create(path, group_readable=group_readable)


def become_writer(run_dir: RunDirectory, record: Record) -> WriterHold | None:
    """Return the hold on `run_dir`, on rank 0; raises `DirectoryInUseError` where another process or job has it.

    None where nothing is held: the SDK is switched off, or the disk refuses, which is said. A training that could save
    nothing yet must be able to start.
    """
    own = resilience_sdk._own_checkpoints()
    claim = None if own is None else own.claim(run_dir)
    if claim is None:
        return None
    try:
        return hold_checkpoints(run_dir, claim)
    except DirectoryInUseError:
        raise
    except RunDirectoryError as error:
        why = f"nothing keeps another process from writing checkpoints there: {error}"
        if say_once(f"writer:{run_dir.path}", why):
            record.degraded("writer", why)
        return None


def start_recording(run_dir: RunDirectory) -> None:
    """Let the job begin to record there, on each rank, unless it has begun elsewhere or the recording is off."""
    own = resilience_sdk._own_checkpoints()
    if own is not None and lanes.starter() is resilience_sdk._start_recording:
        own.start_in(run_dir)


def nowhere(_: RunDirectory) -> Place | None:
    """Return where a reader journals: nowhere, it is no part of the job."""
    return None
