"""What a monitor does when its page directory goes: it reads on, takes the new one, or leaves it to who was faster."""

from __future__ import annotations

import fcntl
import os
import shutil
import time

import pytest

from resilience_sdk.monitor import spawn
from resilience_sdk.monitor.main import MonitorLock
from resilience_sdk.monitor.ranks import RankTable
from resilience_sdk.recorder import page_layout
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.system.hostinfo import process_start_ticks


@pytest.fixture
def pages(tmp_path):
    """The page directory."""
    place = tmp_path / "pages"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def page(pages):
    """The page of this process, as rank 0."""
    pid = os.getpid()
    identity = {"rank": 0, "local_rank": 0, "world_size": 1, "attempt": 0, "created_ns": time.monotonic_ns()}
    path = pages / f"{page_stem(0, 0, pid)}.page"
    return RankPage.create(path, pid=pid, start_ticks=process_start_ticks(pid), facts={}, **identity)


def test_a_rank_whose_page_is_removed_is_watched_on(pages, page):
    """What it writes is still seen, also once it has made its page again, and it is the same rank all the time."""
    table = RankTable(pages)
    (watched,) = table.scan()
    shutil.rmtree(pages)
    assert table.scan() == []
    assert table.all() == [watched]
    page.words[page_layout.W_COLLECTIVES] = 7
    watched.refresh()
    assert watched.snapshot.collectives == 7
    pages.mkdir(mode=0o700)
    page.make_again()
    assert table.scan() == []
    page.words[page_layout.W_COLLECTIVES] = 8
    watched.refresh()
    assert watched.snapshot.collectives == 8
    assert watched.alive
    assert not watched.adrift
    assert table.take_refused() == []


def test_a_page_that_its_rank_is_done_with_is_forgotten(pages, page):
    """A rank that takes its page back is no rank that hangs."""
    table = RankTable(pages)
    assert len(table.scan()) == 1
    page.words[page_layout.W_EXIT_STATE] = page_layout.EXIT_CLEAN
    page.path.unlink()
    table.scan()
    assert table.all() == []


def test_a_page_of_another_process_does_not_take_the_place(pages, page):
    """A file of that name that somebody else has put there is not read."""
    table = RankTable(pages)
    (watched,) = table.scan()
    data = bytearray(bytes(page.bytes))
    page.path.unlink()
    data[page_layout.W_START_TICKS * 8] ^= 1
    page.path.touch(mode=0o600)
    page.path.write_bytes(data)
    table.scan()
    page.words[page_layout.W_COLLECTIVES] = 9
    watched.refresh()
    assert watched.snapshot.collectives == 9


def lock_of(pages):
    """Take the lock in a page directory as a monitor does."""
    lock = os.open(pages / spawn.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


@pytest.fixture
def begin(pages):
    """Become a monitor of the page directory, with that number, as `program.main` does."""
    states = []

    def begin(generation):
        state = MonitorLock(pages, generation, lock_of(pages))
        states.append(state)
        return state

    yield begin
    for state in states:
        state._file.close()
        os.close(state._lock)


def test_a_monitor_takes_the_new_directory(pages, begin):
    """It has the lock there, and says that it is the one, with the next number."""
    state = begin(1)
    shutil.rmtree(pages)
    assert not state.in_charge()
    pages.mkdir(mode=0o700)
    assert state.take_again()
    assert state.in_charge()
    assert spawn.read_state(pages)["generation"] == 2
    assert spawn.is_alive(pages)
    with pytest.raises(BlockingIOError):
        lock_of(pages)


def test_of_two_monitors_one_is_in_charge(pages, begin):
    """A new one was faster in the new directory: the old one finds that, and changes nothing there."""
    old = begin(1)
    shutil.rmtree(pages)
    pages.mkdir(mode=0o700)
    new = begin(5)
    assert not old.take_again()
    assert not old.in_charge()
    assert new.in_charge()
    assert spawn.read_state(pages)["generation"] == 5


def test_a_monitor_whose_state_alone_was_removed_says_it_again(pages, begin):
    """A cleaner takes old files one by one; the lock is still the same file."""
    state = begin(1)
    (pages / spawn.STATE).unlink()
    assert not state.in_charge()
    assert state.take_again()
    assert state.in_charge()


def test_a_monitor_that_may_come_back_is_waited_for(pages, begin, monkeypatch):
    """It alone has the pages of ranks that are stopped: nobody starts another one at once."""
    watch = spawn.MonitorWatch(pages)
    started = []
    monkeypatch.setattr(spawn, "ensure_monitor", lambda place: bool(started.append(place) or True))
    state = begin(1)
    assert not watch.keep_alive()
    shutil.rmtree(pages)
    pages.mkdir(mode=0o700)
    assert not watch.keep_alive()
    assert not started
    now = time.monotonic()
    monkeypatch.setattr(spawn.time, "monotonic", lambda: now + 3.0)
    assert watch.keep_alive()
    assert started == [pages]
    assert not state.in_charge()
