"""Live values of a run: the rank pages of this host, and what the SDK's own processes cost."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.core import job_config
from resilience_sdk.recorder.page_directory import page_directories
from resilience_sdk.recorder.page_reader import PageReader, RankSnapshot
from resilience_sdk.system import hostinfo
from resilience_sdk.telemetry.metrics import FAMILIES, Sample

_MONITOR_STATE = "monitor.json"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_USER_TICKS, _SYSTEM_TICKS, _RESIDENT_PAGES = 11, 12, 21  # of `hostinfo.stat_fields`


class Live:
    """Looks at the ranks of one run on this host, without a lock and without touching them."""

    def __init__(self, run_dir: Path, pages: Path | None, env: Mapping[str, str], *, since: float = 0.0) -> None:
        """Look into `pages`; where nobody told them, into those of this user's jobs that write into `run_dir`.

        The job runs `since` that Unix time, or a later one.
        """
        self._run_dir = os.path.realpath(run_dir)
        self._pages = pages
        self._env = env
        self._since = since
        self.up = True
        """Whether the job runs; who knows it sets it."""
        self.ended_in_order = True
        """False where the job did not end: its launcher was killed, or it goes on and only nobody looks any more."""

    def is_told_of(self, newest: float) -> bool:
        """Tell whether the job runs, and events up to the Unix time `newest` are of it: not of one before it."""
        return self.up and newest >= self._since

    def samples(self) -> Iterator[Sample]:
        """Return the values of this moment; never raises, what cannot be read is left out."""
        yield _sample("run.up", float(self.up or not self.ended_in_order))
        yield _sample("telemetry.timestamp", time.time())
        ranks = list(self.ranks()) if self.up else []
        yield _sample("ranks", float(len(ranks)))
        now_ns = time.monotonic_ns()
        for rank in ranks:
            name = str(rank.rank)
            yield _sample("rank.heartbeats", float(rank.beats), name)
            if rank.step is not None:
                yield _sample("rank.step", float(rank.step), name)
            if rank.main_lane.last_ns:
                yield _sample("rank.heartbeat_age", max(0, now_ns - rank.main_lane.last_ns) / 1e9, name)
        yield from _cost("telemetry", os.getpid())
        for pages in self._directories():
            if (monitor := _monitor_pid(pages)) is not None:
                yield from _cost("monitor", monitor)

    def ranks(self) -> Iterator[RankSnapshot]:
        """Return the pages of the ranks that live, newest attempt of each, by rank."""
        found: dict[int, RankSnapshot] = {}
        for pages in self._directories():
            for path in pages.glob("*.page"):
                # A page may vanish, be cut or be of another version at any moment.
                with contextlib.suppress(OSError, ValueError):
                    reader = PageReader(path)
                    try:
                        rank = reader.snapshot()
                    finally:
                        reader.close()
                    if rank is None or hostinfo.process_is_gone(rank.pid, rank.start_ticks):
                        continue
                    if rank.rank not in found or rank.attempt >= found[rank.rank].attempt:
                        found[rank.rank] = rank
        return iter(found[rank] for rank in sorted(found))

    def _directories(self) -> list[Path]:
        if self._pages is not None:
            return [self._pages]
        return [pages for pages in page_directories(self._env) if self._is_of_run(pages)]

    def _is_of_run(self, pages: Path) -> bool:
        config = job_config.read(pages)
        return config is not None and os.path.realpath(config.run_dir) == self._run_dir


def _monitor_pid(pages: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        state: Any = json.loads((pages / _MONITOR_STATE).read_text())
        pid, ticks = int(state["pid"]), int(state["start_ticks"])
        return None if hostinfo.process_is_gone(pid, ticks) else pid
    return None


def _cost(process: str, pid: int) -> Iterator[Sample]:
    fields = hostinfo.stat_fields(pid)
    if len(fields) > _RESIDENT_PAGES:
        ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        yield _sample("process.cpu", ticks / _TICKS_PER_S, process)
        yield _sample("process.memory", float(int(fields[_RESIDENT_PAGES]) * _PAGE_BYTES), process)


def _sample(name: str, value: float, *labels: str) -> Sample:
    return Sample(FAMILIES[name], labels, value)
