"""What the ranks are doing now, from their pages."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.system.hostinfo import process_start_ticks
from resilience_sdk.telemetry.sinks.base import Metrics, TelemetryOrigin
from resilience_sdk.telemetry.tail import Live


def page(folder: Path, rank: int, pid: int, attempt: int = 0) -> RankPage:
    """Make the page of a rank."""
    return RankPage.create(
        folder / f"a{attempt}-r{rank}-{pid}.page",
        pid=pid,
        start_ticks=process_start_ticks(pid) or 0,
        rank=rank,
        local_rank=rank,
        world_size=2,
        attempt=attempt,
        created_ns=time.monotonic_ns(),
        facts={"host": "here", "script": "train.py"},
    )


def test_only_the_living_count(tmp_path: Path) -> None:
    """A rank that died leaves its page; after the end of the job nobody is asked any more."""
    dead = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    page(tmp_path, 0, os.getpid())
    page(tmp_path, 1, dead.pid)
    live = Live(tmp_path, tmp_path, {})
    assert [rank.rank for rank in live.ranks()] == [0, 1]
    dead.communicate(b"\n")
    assert [rank.rank for rank in live.ranks()] == [0]
    values = {(sample.family.name, sample.labels): sample.value for sample in live.samples()}
    assert values["ranks", ()] == 1
    assert values["rank.heartbeats", ("0",)] == 0
    assert values["process.memory", ("telemetry",)] > 1 << 20  # type: ignore[operator]
    live.up = False
    values = {(sample.family.name, sample.labels): sample.value for sample in live.samples()}
    assert (values["run.up", ()], values["ranks", ()]) == (0, 0)
    live.ended_in_order = False
    values = {(sample.family.name, sample.labels): sample.value for sample in live.samples()}
    assert (values["run.up", ()], values["ranks", ()]) == (1, 0)


def test_the_newest_attempt_of_a_rank_counts(tmp_path: Path) -> None:
    """Pages of two attempts may lie there for a moment."""
    for attempt in (1, 0, 2):
        page(tmp_path, 0, os.getpid(), attempt)
    assert [rank.attempt for rank in Live(tmp_path, tmp_path, {}).ranks()] == [2]


def test_values_come_family_by_family(tmp_path: Path) -> None:
    """Prometheus refuses a family that begins twice, and there are several ranks and processes."""
    for rank in (0, 1):
        page(tmp_path, rank, os.getpid())
    place = TelemetryOrigin(tmp_path, "here", Live(tmp_path, tmp_path, {}), tmp_path, 1.0)
    names = [family.name for family, _ in itertools.groupby(Metrics(place).all(), key=lambda sample: sample.family)]
    assert "rank.heartbeats" in names
    assert len(names) == len(set(names))


def test_garbage_is_no_rank(tmp_path: Path) -> None:
    """A file that is cut or of another version is passed over."""
    (tmp_path / "a0-r0-1.page").write_bytes(b"x")
    (tmp_path / "a0-r1-1.page").write_bytes(b"\0" * (1 << 16))
    assert list(Live(tmp_path, tmp_path, {}).ranks()) == []
