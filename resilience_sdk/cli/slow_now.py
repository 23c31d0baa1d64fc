"""Which verdicts about slow ranks stand at this moment: those that are published, if they are of the job that runs."""

from __future__ import annotations

from resilience_sdk.cli.run_state import RunState
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.straggler.published import Standing, read_standing


def standing_now(run_dir: RunDirectory, state: RunState, *, is_running: bool) -> Standing | None:
    """Return what is published of the attempt that runs; None where nothing runs, or nothing of it is known.

    Raises PermissionError where the file is somebody else's.
    """
    standing = read_standing(run_dir.path) if is_running else None
    if standing is None or standing.attempt != state.attempt or standing.job != state.job:
        return None
    return standing
