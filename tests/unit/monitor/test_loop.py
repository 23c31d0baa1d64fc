"""The monitor's rounds: attempts that it has not seen alive are explained all the same, and calm ones cost little."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest

from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.monitor import spawn
from resilience_sdk.monitor.loop import Watcher
from resilience_sdk.monitor.main import MonitorLock
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Recorder
from resilience_sdk.system.hostinfo import process_start_ticks

DUMP_SIGNAL = signal.SIGRTMAX - 3
GONE = 2**22 + 1  # beyond the largest process id


@pytest.fixture
def watch(tmp_path, journal, start_rank):
    """A watcher over pages that the test makes: `page(attempt)` is that of a rank that has died since, `living(rank)`
    that of this process, `blocked(rank, how)` that of another one that beat once."""
    run_dir = RunDirectory.create(tmp_path / "run")
    pages = tmp_path / "pages"
    pages.mkdir(mode=0o700)
    held = os.open(pages / spawn.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    lock = MonitorLock(pages, 1, held)

    def page(attempt, rank=0):
        identity = {"rank": rank, "local_rank": rank, "world_size": 2, "attempt": attempt, "created_ns": 1}
        pid = GONE + attempt
        path = pages / f"{page_stem(attempt, rank, pid)}.page"
        RankPage.create(path, pid=pid, start_ticks=1, facts={"host": "here", "script": "train.py"}, **identity)

    def living(rank):
        identity = {"rank": rank, "local_rank": rank, "world_size": 2, "attempt": 0, "created_ns": time.monotonic_ns()}
        pid = os.getpid()
        path = pages / f"{page_stem(0, rank, pid)}.page"
        page = RankPage.create(path, pid=pid, start_ticks=process_start_ticks(pid), facts={}, **identity)
        return Recorder(page)

    def blocked(rank, how):
        start_rank(rank, f"{how} page", pages / f"a0-r{rank}-PID")

    def start(launcher=None, **chosen):
        settings = Settings(**chosen).to_json()
        config = JobConfig("job", str(run_dir.path), True, settings, "report", "train.py", launcher, 1, 1, 1, 1, 1)
        return Watcher(pages, config, journal, lock)

    yield SimpleNamespace(
        page=page, living=living, blocked=blocked, start=start, store=IncidentStore(run_dir), journal=journal
    )
    lock._file.close()
    os.close(held)


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


def test_while_all_come_on_only_every_second_look_is_a_whole_one(watch):
    """What ranks have completed is taken then; who comes is taken in at once."""
    beats = watch.living(0).beat("step")
    watcher = watch.start(monitor_interval=1.0)
    assert watcher.round(0.0) == 1.0
    for _ in range(2):
        beats.sample(10**8)
    assert watcher.round(0.0) <= 1.0
    assert watcher.learner.book.usual_step_s() == 0.0
    watch.living(1)
    watcher.round(0.0)
    assert watcher.learner.book.usual_step_s() == 0.1


@pytest.mark.parametrize(("passes", "chosen"), [(60, {}), (1, {"heartbeat_timeout": 2.0})])
def test_a_loop_that_fills_its_rings_and_a_short_deadline_are_looked_at_every_time(watch, passes, chosen):
    """64 passes are kept, and a deadline of two seconds should not be a second late."""
    beats = watch.living(0).beat("step")
    watcher = watch.start(monitor_interval=0.1, **chosen)
    for _ in range(passes):
        beats.sample(10**8)
    wait_s = watcher.round(0.0)
    beats.sample(10**8)
    watcher.round(wait_s)
    (watched,) = watcher.table.all()
    assert watched.reader.passes() == [], "the second look took nothing"


def test_a_rank_that_was_looked_at_while_it_worked_is_looked_at_again_when_it_is_hung(watch):
    """At the first look nobody knows yet that it stands still, so no signal asks it; the verdict shows its stack."""
    watch.blocked(0, "gil")
    watcher = watch.start(dump_signal=DUMP_SIGNAL)
    deadline = time.monotonic() + 60
    waited_s = 0.0
    while not watch.store.all() and time.monotonic() < deadline:
        time.sleep(waited_s)
        waited_s = watcher.round(waited_s)
    (incident,) = watch.store.all()
    (culprit,) = incident.culprits
    assert culprit.stack[0].endswith("blocked_here")
