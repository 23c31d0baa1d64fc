"""The newest checkpoint as launchers and monitors see it: from names, without torch and without reading a payload."""

from __future__ import annotations

import os

from resilience_sdk.checkpoint.manifest import MANIFEST_NAME
from resilience_sdk.checkpoint.select import step_of
from resilience_sdk.run_directory import RunDirectory


def newest_checkpoint(run_dir: RunDirectory) -> int | None:
    """Return the step of the newest complete checkpoint (one with a manifest), or None."""
    newest: int | None = None
    try:
        names = os.listdir(run_dir.checkpoints)
    except OSError:
        return None
    for name in names:
        step = step_of(name)
        if step is None or (newest is not None and step <= newest):
            continue
        if (run_dir.checkpoints / name / MANIFEST_NAME).is_file():
            newest = step
    return newest
