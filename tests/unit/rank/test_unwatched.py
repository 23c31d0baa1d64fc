"""What ranks leave behind where no monitor can be started: nothing, once the last one is gone."""

from __future__ import annotations

import threading

from resilience_sdk.core import job_config
from resilience_sdk.rank.preemption import Coordination, knows_no_monitor
from resilience_sdk.rank.session import remove_own


def leave(pages, *numbers):
    """Make the files of some ranks, as a node without a monitor has them."""
    pages.mkdir(mode=0o700)
    (pages / job_config.FILE).write_text("{}")
    assert not Coordination(pages, 0, {}, lambda: False).by_monitor()
    stems = [pages / f"a0-r{number}-{100 + number}" for number in numbers]
    for stem in stems:
        for suffix in (".page", ".fifo", ".stack"):
            stem.with_suffix(suffix).touch()
    return stems


def test_the_last_rank_removes_the_directory_and_others_their_own_files(tmp_path):
    """One rank is gone, the other one's page must stay until it ends."""
    pages = tmp_path / "pages"
    first, last = leave(pages, 0, 1)
    remove_own(pages, first)
    assert sorted(path.name for path in pages.glob("a0-*")) == [
        f"{last.name}{end}" for end in (".fifo", ".page", ".stack")
    ]
    assert knows_no_monitor(pages, 0)  # also for a rank that has not tried to start one
    assert not knows_no_monitor(pages, 1)
    remove_own(pages, last)
    assert not pages.exists()


def test_ranks_that_leave_together_leave_nothing(tmp_path):
    """After an agreed stop they all end in the same moment, and meet at the locks."""
    for attempt in range(20):
        pages = tmp_path / str(attempt)
        stems = leave(pages, *range(4))
        leaving = [threading.Thread(target=remove_own, args=(pages, stem)) for stem in stems]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
        assert not pages.exists(), list(pages.iterdir())
