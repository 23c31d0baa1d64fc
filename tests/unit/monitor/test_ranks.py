"""Only the process that wrote a page is ever pinned, and so only it is ever signalled."""

import mmap
import os

import pytest

from resilience_sdk.monitor.ranks import is_ours, open_target
from resilience_sdk.system.hostinfo import process_start_ticks
from resilience_sdk.system.procfs import has_signal, status_fields


@pytest.fixture
def stem(tmp_path):
    """A page that this very process has mapped."""
    page = tmp_path / "a0-r0-1.page"
    page.write_bytes(bytes(4096))
    with page.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        yield tmp_path / "a0-r0-1"


def test_the_writer_of_the_page_is_pinned(stem):
    """Same start, same user, page mapped: it may be asked."""
    target = open_target(0, os.getpid(), process_start_ticks(os.getpid()), stem)
    assert is_ours(target)
    assert target.alive
    assert target.file(".page").exists()
    target.close()


def test_every_other_process_is_refused(stem, tmp_path):
    """Another start time, another process, a page that is not mapped, a pid that cannot be."""
    mine, start = os.getpid(), process_start_ticks(os.getpid())
    assert open_target(0, mine, start + 1, stem) is None
    assert open_target(0, os.getppid(), process_start_ticks(os.getppid()), stem) is None
    (tmp_path / "a0-r1-1.page").write_bytes(b"")
    assert open_target(0, mine, start, tmp_path / "a0-r1-1") is None
    assert open_target(0, mine, start, tmp_path / "missing") is None
    (tmp_path / "a0-r0-1.page").unlink()
    (tmp_path / "a0-r0-1.page").write_bytes(b"")
    assert open_target(0, mine, start, stem) is None, "its own page is gone, this one is somebody else's"
    assert open_target(0, 0, start, stem) is None
    assert open_target(0, -1, start, stem) is None


def test_a_dead_process_is_noticed(start_rank):
    """Its pidfd tells, and a signal to it is no error."""
    rank = start_rank(0)
    rank.process.kill()
    rank.process.wait(10)
    assert not rank.target.alive
    assert not is_ours(rank.target)
    assert rank.target.send(0) is False
    assert status_fields(rank.target.pid) == {}


def test_signal_masks():
    """Bit n-1 is signal n, up to the last real-time signal; garbage is no signal."""
    assert has_signal("0000000000004000", 15)
    assert not has_signal("0000000000004000", 14)
    assert has_signal("8000000000000000", 64)
    assert not has_signal(None, 15)
    assert not has_signal("zz", 15)
