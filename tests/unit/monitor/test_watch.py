"""Attempts that the monitor has not seen alive are explained all the same, under a launcher that is not ours."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from resilience_sdk.incidents import IncidentStore
from resilience_sdk.job_config import JobConfig
from resilience_sdk.monitor.watch import Watcher
from resilience_sdk.rank_page import RankPage, page_stem
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.settings import Settings

GONE = 2**22 + 1  # beyond the largest process id


@pytest.fixture
def watch(tmp_path, journal):
    """A watcher over pages that the test makes; `page(attempt)` is that of a rank that has died since."""
    run_dir = RunDirectory.create(tmp_path / "run")
    pages = tmp_path / "pages"
    pages.mkdir(mode=0o700)

    def page(attempt, rank=0):
        identity = {"rank": rank, "local_rank": rank, "world_size": 2, "attempt": attempt, "created_ns": 1}
        pid = GONE + attempt
        path = pages / f"{page_stem(attempt, rank, pid)}.page"
        RankPage.create(path, pid=pid, start_ticks=1, facts={"host": "here", "script": "train.py"}, **identity)

    def start(launcher=None):
        settings = Settings().to_json()
        config = JobConfig("job", str(run_dir.path), True, settings, "report", "train.py", launcher, 1, 1, 1, 1, 1)
        return Watcher(pages, config, journal, lambda: True)

    return SimpleNamespace(page=page, start=start, store=IncidentStore(run_dir), journal=journal)


def exits(journal):
    """The attempts in which a rank's end was journalled."""
    events = [json.loads(line) for line in journal.path.read_text().splitlines()] if journal.path.exists() else []
    return [event["attempt"] for event in events if event["event"] == "rank_exit"]


def test_a_rank_that_comes_and_goes_between_two_looks_is_explained(watch):
    """It dies of what it has just loaded; that it came at all tells which checkpoint kills."""
    watcher = watch.start()
    watch.page(0)
    watcher.round(0.0)
    for attempt in (1, 2):
        watch.page(attempt)
        watcher.round(0.0)
    assert [(incident.kind, incident.attempt) for incident in watch.store.all()] == [("crash", n) for n in range(3)]
    assert exits(watch.journal) == [1, 2]


def test_what_lies_there_at_the_beginning_is_taken_as_before(watch):
    """Pages of attempts that this monitor was not there for say nothing but that the newest of them was the last."""
    for attempt in (3, 4):
        watch.page(attempt)
    watcher = watch.start()
    for _ in range(2):
        watcher.round(0.0)
    assert [incident.attempt for incident in watch.store.all()] == [4]


def test_our_launcher_tells_the_ends_of_its_ranks_itself(watch):
    """It sees every exit code, so the monitor leaves them alone."""
    watcher = watch.start(launcher=1)
    for attempt in range(2):
        watch.page(attempt)
        watcher.round(0.0)
    assert watch.store.all() == []
    assert exits(watch.journal) == []
