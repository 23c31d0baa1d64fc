"""What the ranks of a run on this host publish right now, from their pages."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience_sdk import environ
from resilience_sdk.hostinfo import process_is_gone, process_state
from resilience_sdk.run_directory import RunDirectory

if TYPE_CHECKING:
    from resilience_sdk.rank_page import RankSnapshot


def live_ranks(run_dir: RunDirectory, env: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return one object per rank that writes into `run_dir` and lives on this host; empty when there is none.

    Never raises and never makes anything: a job elsewhere, of another user or version is simply not seen.
    """
    if not hasattr(os, "getuid"):
        return []
    from resilience_sdk.rank_page import page_directories

    found: dict[int, dict[str, Any]] = {}
    wanted = os.path.realpath(run_dir.path)
    for pages in page_directories(environ.environment() if env is None else env):
        if _run_dir_of(pages) == wanted:
            for rank in _ranks_in(pages):
                if rank["attempt"] >= found.get(rank["rank"], rank)["attempt"]:
                    found[rank["rank"]] = rank
    return [found[rank] for rank in sorted(found)]


def _run_dir_of(pages: Path) -> str | None:
    from resilience_sdk import job_config

    config = job_config.read(pages)
    return os.path.realpath(config.run_dir) if config is not None and isinstance(config.run_dir, str) else None


def _ranks_in(pages: Path) -> list[dict[str, Any]]:
    from resilience_sdk.rank_page import PageReader

    ranks: list[dict[str, Any]] = []
    for path in sorted(pages.glob("*.page")):
        # A page may vanish, be cut or be of another version at any moment.
        with contextlib.suppress(OSError, ValueError):
            reader = PageReader(path)
            try:
                snapshot = reader.snapshot()
            finally:
                reader.close()
            if snapshot is not None and not process_is_gone(snapshot.pid, snapshot.start_ticks):
                ranks.append(_describe(snapshot))
    return ranks


def _describe(snapshot: RankSnapshot) -> dict[str, Any]:
    beat = snapshot.main_lane.last_ns if snapshot.beats else 0
    return {
        "rank": snapshot.rank,
        "attempt": snapshot.attempt,
        "pid": snapshot.pid,
        "process_state": process_state(snapshot.pid),
        "step": snapshot.step,
        "step_is_global": snapshot.step_is_global,
        "seconds_since_beat": None if not beat else round(max(0, time.monotonic_ns() - beat) / 1e9, 3),
        "sections": [section.name for section in snapshot.main_lane.stack],
        "paused": snapshot.paused,
        "done": snapshot.done,
        "progress_signal": snapshot.declared or snapshot.beat_source != "none",
    }
