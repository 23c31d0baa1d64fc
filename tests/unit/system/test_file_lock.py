"""A lock between processes that is never waited for long."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from resilience_sdk.system.file_lock import file_lock


def _hold(path: Path, taken: Any, release: Any) -> None:
    with file_lock(path):
        taken.set()
        release.wait()


@pytest.mark.parametrize("name", ["file", ""])
def test_one_holder_at_a_time_and_a_bounded_wait(tmp_path: Path, name: str) -> None:
    """A file (made where there is none) or a directory; another process that holds it is waited for, not for ever."""
    path = tmp_path / name
    context = multiprocessing.get_context("fork")
    taken, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(path, taken, release))
    holder.start()
    assert taken.wait(30)
    began = time.monotonic()
    with file_lock(path, patience_s=0.2) as mine:
        assert not mine
    assert time.monotonic() - began >= 0.2
    release.set()
    with file_lock(path, patience_s=30) as mine:
        assert mine
    holder.join()
    assert holder.exitcode == 0


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """The kernel gives up the lock of a process that dies."""
    context = multiprocessing.get_context("fork")
    taken, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "lock", taken, release))
    holder.start()
    assert taken.wait(30)
    holder.kill()
    holder.join()
    with file_lock(tmp_path / "lock") as mine:
        assert mine
