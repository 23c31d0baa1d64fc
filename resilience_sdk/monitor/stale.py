"""What nobody removes: directories of jobs that were killed with their monitor, pages of earlier starts."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from resilience_sdk import hostinfo, job_config
from resilience_sdk.monitor import spawn
from resilience_sdk.monitor.ranks import remove_files
from resilience_sdk.rank_page import PageReader, parse_stem
from resilience_sdk.rank_page.directory import check_private

_MOST_DIRECTORIES = 100  # looked at by one monitor; the next one goes on
_MOST_FILES = 10_000
_YOUNG_S = 60.0  # a directory that changed so lately may be somebody's who has only made it


def remove_stale(pages: Path) -> list[Path]:
    """Remove the siblings of `pages` of whose job no process lives any more; return them.

    What cannot be understood, is locked, young, or of another PID namespace (containers may share the place) is
    left alone. Raises OSError when the parent cannot be read.
    """
    removed = []
    with os.scandir(pages.parent) as entries:
        siblings = [Path(entry.path) for entry in itertools.islice(entries, _MOST_DIRECTORIES)]
    for directory in siblings:
        if directory == pages:
            continue
        with contextlib.suppress(OSError):
            check_private(directory)
            if _is_young(directory) or not _is_abandoned(directory):
                continue  # asked without the locks first: those of the living are not to be disturbed
            with spawn.all_locks(directory) as mine:
                if mine and _is_abandoned(directory):
                    _remove(directory)
                    removed.append(directory)
    return removed


def remove_ended(pages: Path, began_ns: int) -> None:
    """Remove the files of ranks that had their page before a start began (monotonic), and are gone; never raises.

    The monitor that watched them has left, as its job has; they would pass for dead ranks of this one.
    """
    for path in pages.glob("*.page"):
        with contextlib.suppress(OSError), contextlib.closing(PageReader(path)) as reader:
            page = reader.snapshot()
            if page is not None and page.created_ns < began_ns and hostinfo.process_is_gone(page.pid, page.start_ticks):
                remove_files(path.with_suffix(""))


def _is_young(directory: Path) -> bool:
    return abs(time.time() - directory.stat().st_mtime) < _YOUNG_S


def _is_abandoned(directory: Path) -> bool:
    """Tell whether all processes that the directory names are provably gone."""
    config = job_config.read(directory)
    if config is None or config.pid_namespace != hostinfo.pid_namespace():
        return False
    state = spawn.read_state(directory)
    named: list[tuple[int | None, int | None]] = [
        (config.creator_pid, config.creator_ticks),
        (config.launcher_pid, config.launcher_ticks),
        (config.parent_pid or None, config.parent_ticks),  # may start the ranks again
        (state.get("pid"), state.get("start_ticks")),
    ]
    # A page names its process in its file name; without its start time, any process of that number counts.
    stems = (parse_stem(path.name.split(".", 1)[0]) for path in itertools.islice(directory.iterdir(), _MOST_FILES))
    named += [(stem[2], None) for stem in stems if stem is not None]
    return all(pid is None or hostinfo.process_is_gone(pid, ticks or None) for pid, ticks in named)


def _remove(directory: Path) -> None:
    for path in itertools.islice(directory.iterdir(), _MOST_FILES):
        path.unlink()
    directory.rmdir()
