"""A rank tells whether those whose pages it finds are its own peers, or ranks of a start that has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from resilience_sdk.rank.identity import is_over
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.system import hostinfo

BEFORE_NS = 1
GONE = 2


def page(folder, rank, *, pid=None, ticks=GONE, attempt=0, created_ns=BEFORE_NS + 1):
    """A rank's page, of a process that is gone unless its start is told."""
    pid = os.getpid() if pid is None else pid
    made = RankPage.create(
        folder / f"{page_stem(attempt, rank, pid)}.page",
        pid=pid,
        start_ticks=ticks,
        rank=rank,
        local_rank=rank,
        world_size=8,
        attempt=attempt,
        created_ns=created_ns,
        facts={},
    )
    return made.path


def test_ranks_that_ended_before_this_process_came_are_an_earlier_start(tmp_path):
    """All of them, in this attempt."""
    for rank in range(2):
        page(tmp_path, rank)
    assert is_over(tmp_path, 0, BEFORE_NS, but=0)
    assert not is_over(tmp_path, 1, BEFORE_NS, but=0)


def test_one_that_lives_means_that_its_start_goes_on(tmp_path):
    """Another rank of the same attempt may have died early."""
    page(tmp_path, 0)
    page(tmp_path, 1, ticks=hostinfo.process_start_ticks(os.getpid()))
    assert not is_over(tmp_path, 0, BEFORE_NS, but=0)


def test_who_started_the_ranks_does_not_count(tmp_path):
    """It may have used the SDK before, and outlives them all."""
    page(tmp_path, 0)
    parent = os.getppid()
    page(tmp_path, 0, pid=parent, ticks=hostinfo.process_start_ticks(parent))
    assert not is_over(tmp_path, 0, BEFORE_NS, but=0)
    assert is_over(tmp_path, 0, BEFORE_NS, but=parent)


def test_a_peer_that_died_before_this_one_came_so_far_is_of_this_start(tmp_path):
    """It made its page when this process was there already: they were started together."""
    page(tmp_path, 0, created_ns=time.monotonic_ns())
    assert not is_over(tmp_path, 0, BEFORE_NS, but=0)


def test_a_process_that_is_started_now_comes_after_it(tmp_path):
    """The same page, seen by a process that was started when it was there."""
    page(tmp_path, 0, created_ns=time.monotonic_ns())
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))  # starts of processes are known by the tick
    code = (
        "import sys; from pathlib import Path; from resilience_sdk.rank.identity import is_over; "
        f"print(is_over(Path(sys.argv[1]), 0, {BEFORE_NS}, but=0))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("left", ["nothing", "an older start", "garbage"])
def test_without_ranks_of_the_start_that_stands_it_is_not_over(tmp_path, left):
    """Who comes first has written it anew; the next ones of that start must not do it again."""
    if left == "an older start":
        page(tmp_path, 0, created_ns=5)
    elif left == "garbage":
        (tmp_path / "a0-r0-7.page").write_bytes(b"x")
    assert not is_over(tmp_path, 0, 6, but=0)


def test_where_start_times_are_unknown_all_is_one_start(tmp_path, monkeypatch):
    """As it was settled once."""
    page(tmp_path, 0, pid=2**22 + 1)
    assert is_over(tmp_path, 0, BEFORE_NS, but=0)
    monkeypatch.setattr(hostinfo, "stat_fields", lambda _pid: [])
    assert not is_over(tmp_path, 0, BEFORE_NS, but=0)
