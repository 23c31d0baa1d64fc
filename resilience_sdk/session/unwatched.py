"""The files of a rank that ends before there is a monitor, which would have removed them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from resilience_sdk import job_config
from resilience_sdk.monitor.spawn import all_locks


def remove_unwatched(pages: Path, stem: Path) -> None:
    """Remove the page directory of a rank that no monitor watches, if it is alone there; never raises.

    `stem`: the rank's own files, without suffix. With a second rank there, a monitor is about to come.
    """
    with contextlib.suppress(OSError, ImportError):
        if not (pages / job_config.FILE).exists():
            return
        with all_locks(pages) as mine:
            if mine and {page.with_suffix("") for page in pages.glob("*.page")} <= {stem}:
                for path in pages.iterdir():
                    path.unlink()
                pages.rmdir()
