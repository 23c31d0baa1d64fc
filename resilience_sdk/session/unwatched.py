"""The files of a rank that ends without a monitor, which would have removed them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from resilience_sdk import job_config
from resilience_sdk.monitor.spawn import all_locks

_TRIES = 20
_PAUSE_S = 0.01


def remove_own(pages: Path, stem: Path) -> None:
    """Remove a rank's files, where no monitor can be started, with the last rank's all that is there; never raises."""
    with contextlib.suppress(OSError):
        for path in pages.glob(f"{stem.name}.*"):
            path.unlink()
        for _ in range(_TRIES):  # ranks that leave together meet at the locks
            remove_unwatched(pages, stem)
            if not pages.exists() or any(pages.glob("*.page")):
                return
            time.sleep(_PAUSE_S)


def remove_unwatched(pages: Path, stem: Path) -> None:
    """Remove the page directory of a rank that no monitor watches, if it is alone there; never raises.

    `stem`: the rank's own files, without suffix. With a second rank there, a monitor is about to come.
    """
    with contextlib.suppress(OSError, ImportError):
        if not (pages / job_config.FILE).exists():
            return
        with all_locks(pages) as mine:
            if mine and {page.with_suffix("") for page in pages.glob("*.page")} <= {stem}:
                # Moved away first: then nobody can make a lock in it meanwhile, which would keep it for ever.
                doomed = pages.rename(pages.with_name(f".{pages.name}.{os.getpid()}"))
                for path in doomed.iterdir():
                    path.unlink()
                doomed.rmdir()
