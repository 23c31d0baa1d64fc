"""A platform without pidfds, epoll and start times of processes: ranks are watched by their numbers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from resilience_sdk.monitor import hang_response, ranks, spawn
from resilience_sdk.monitor.ranks import RankTable
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.system import hostinfo


@pytest.fixture
def bare(monkeypatch):
    """Take away what only Linux has."""
    for module, name in ((os, "pidfd_open"), (signal, "pidfd_send_signal"), (select, "epoll")):
        monkeypatch.delattr(module, name)
    monkeypatch.setattr(hostinfo, "stat_fields", lambda _pid: [])
    monkeypatch.setattr(ranks, "status_fields", lambda _pid: {})


@pytest.fixture
def child():
    """A process that waits."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.stdin.close()
    process.wait(10)


def make_page(folder, pid: int) -> None:
    """Write the page of a rank that is process `pid`, which knows no start time of its own."""
    RankPage.create(
        (folder / page_stem(0, 0, pid)).with_suffix(".page"),
        pid=pid,
        start_ticks=0,
        rank=0,
        local_rank=0,
        world_size=1,
        attempt=0,
        created_ns=time.monotonic_ns(),
        facts={"host": "here", "script": "train.py"},
    )


def test_a_rank_is_found_signalled_and_seen_to_die(bare, child, tmp_path, journal):
    """Its page and its number are all there is, and they do."""
    make_page(tmp_path, child.pid)
    table = RankTable(tmp_path)
    (watched,) = table.scan()
    assert table.take_refused() == []
    assert watched.alive
    assert table.wait(0.0) == []
    assert watched.target.send(0)
    # Without /proc a zombie cannot be told from the living, so the child is collected at once.
    watched.target.send(signal.SIGTERM)
    child.wait(10)
    assert table.wait(5.0) == [watched]
    assert watched.wait_status is None
    ended = hang_response.end_ranks(
        [watched.target], term_grace_s=1, reason="", journal=journal, in_charge=lambda: True
    )
    assert ended.ended == (0,)
    watched.close()


def test_a_frozen_monitor_is_killed_by_its_number(bare, child, tmp_path):
    """Who replaces it has no pidfd to do it with."""
    spawn._kill(child.pid, 0)
    assert child.wait(10) == -signal.SIGKILL
