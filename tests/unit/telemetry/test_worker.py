"""A sink may be slow, dead or broken: no line is lost to it, and no other sink waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from told_run import ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.errors import MissingExtraError
from resilience_sdk.telemetry.exporter import Worker
from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin
from resilience_sdk.telemetry.tail import Line


class Keeping(Sink):
    """Keeps what it is sent; fails, or is stuck, as often and as long as the test wants."""

    name = "keeping"

    def __init__(self, place: TelemetryOrigin, failures: int = 0) -> None:
        super().__init__(place)
        self.failures = failures
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.kept: list[int] = []
        self.seen = 0
        self.opened = 0
        self.changed = threading.Condition()

    def open(self) -> None:
        self.opened += 1

    def digest(self, line: Line) -> tuple[int, ...]:
        self.seen += 1
        return (line.event["number"],) if "number" in line.event else ()

    def send(self, items: deque[Any]) -> None:
        assert self.may_go_on.wait(30)
        while items:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("not today")
            with self.changed:
                self.kept.append(items[0])
                self.changed.notify_all()
            items.popleft()

    def wait_for(self, count: int) -> list[int]:
        """Wait until so many were sent, and return them."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.kept) >= count, 20), self.kept
            return list(self.kept)


class Told:
    """What workers said of failures and recoveries."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.recoveries: list[str] = []

    def worker(self, run: ToldRun, sink: Sink) -> Worker:
        """Return a worker that tells here and does not wait long."""
        return Worker(
            sink,
            run.run_dir.journal,
            note_failure=lambda name, error: self.failures.append(f"{name}: {error}"),
            note_recovery=lambda name, _: self.recoveries.append(name),
            first_pause_s=0.01,
            poll_s=0.02,
        )


@pytest.fixture
def told() -> Told:
    """What is told in a test."""
    return Told()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ToldRun]:
    """A run with five events."""
    made = ToldRun.make(tmp_path)
    for number in range(5):
        made.tell(Event.DEGRADED, number=number)
    return made


def test_what_is_written_arrives_in_order_and_once(run: ToldRun, told: Told) -> None:
    """Before, while and until the job is over."""
    sink = Keeping(run.place())
    worker = told.worker(run, sink)
    worker.start()
    sink.wait_for(5)
    run.tell(Event.DEGRADED, number=5)
    sink.wait_for(6)
    run.tell(Event.DEGRADED, number=6)
    worker.finish()
    assert worker.join(20)
    assert sink.kept == list(range(7))
    assert told.failures == []


def test_a_sink_that_fails_is_tried_again_and_told_once(run: ToldRun, told: Told) -> None:
    """Opened anew each time; what was sent before the failure is not sent again."""
    sink = Keeping(run.place(), failures=3)
    worker = told.worker(run, sink)
    worker.start()
    assert sink.wait_for(5) == list(range(5))
    worker.finish()
    assert worker.join(20)
    assert told.failures == ["keeping: not today"]
    assert told.recoveries == ["keeping"]
    assert sink.opened == 4


def test_a_stuck_sink_delays_no_other(run: ToldRun, told: Told) -> None:
    """And loses nothing: when it works again, everything that it missed stands in the journal."""
    stuck, well = Keeping(run.place()), Keeping(run.place())
    stuck.name = "stuck"
    stuck.may_go_on.clear()
    workers = [told.worker(run, stuck), told.worker(run, well)]
    for worker in workers:
        worker.start()
    for number in range(5, 200):
        run.tell(Event.DEGRADED, number=number)
    assert well.wait_for(200) == list(range(200))
    assert stuck.kept == []
    assert not workers[0].join(0.1)
    stuck.may_go_on.set()
    assert stuck.wait_for(200) == list(range(200))
    for worker in workers:
        worker.finish()
        assert worker.join(20)


def test_the_next_exporter_goes_on_where_this_one_ended(run: ToldRun, told: Told) -> None:
    """It sees every line, for its counters, and sends what was not sent; a sink's memory is kept too."""
    first = Keeping(run.place())
    worker = told.worker(run, first)
    worker.start()
    first.memory["id"] = "abc"
    first.wait_for(5)
    worker.finish()
    assert worker.join(20)
    run.tell(Event.DEGRADED, number=5)
    second = Keeping(run.place())
    worker = told.worker(run, second)
    worker.start()
    assert second.wait_for(1) == [5]
    worker.finish()
    assert worker.join(20)
    assert second.seen == 6
    assert second.memory == {"id": "abc"}


def test_a_line_that_is_not_understood_costs_itself_only(run: ToldRun, told: Told) -> None:
    """Our own fault in one line is told, and the others arrive."""

    class Picky(Keeping):
        def digest(self, line: Line) -> tuple[int, ...]:
            if line.event["number"] == 2:
                raise ValueError("two")
            return super().digest(line)

    sink = Picky(run.place())
    worker = told.worker(run, sink)
    worker.start()
    assert sink.wait_for(4) == [0, 1, 3, 4]
    worker.finish()
    assert worker.join(20)
    assert told.failures == ["keeping: two"]


def test_a_full_disk_keeps_no_line_from_a_sink(run: ToldRun, told: Told) -> None:
    """Where the position cannot be written the sink stays open and is served; at the end it is tried until it is."""
    place = run.place()
    (place.state_dir / "keeping.json").mkdir()  # nothing can be renamed to it
    sink = Keeping(place)
    worker = told.worker(run, sink)
    worker.start()
    assert sink.wait_for(5) == list(range(5))
    run.tell(Event.DEGRADED, number=5)
    assert sink.wait_for(6) == list(range(6))
    assert sink.opened == 1  # whoever scrapes or listens notices nothing
    assert [failure.partition(":")[0] for failure in told.failures] == ["position of keeping"]
    worker.finish()
    assert not worker.join(0.2)
    (place.state_dir / "keeping.json").rmdir()
    assert worker.join(20)
    assert sink.opened == 1
    assert len(told.failures) == 1


def test_a_full_disk_does_not_keep_the_end_from_who_comes_for_it(run: ToldRun, told: Told) -> None:
    """A sink that sends nothing has no use for a position, and is not left behind for want of one."""

    class Fetched(Keeping):
        def digest(self, line: Line) -> tuple[int, ...]:
            super().digest(line)
            return ()

    place = run.place()
    (place.state_dir / "keeping.json").mkdir()
    sink = Fetched(place)
    worker = told.worker(run, sink)
    worker.start()
    worker.finish()
    assert worker.join(20)
    assert (sink.seen, sink.opened) == (5, 1)
    assert [failure.partition(":")[0] for failure in told.failures] == ["position of keeping"]


def test_a_sink_that_does_not_come_back_is_seen(run: ToldRun, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not failed, so nothing else would tell of it."""
    sink = Keeping(run.place())
    sink.may_go_on.clear()
    made = told.worker(run, sink)
    made.start()
    while sink.seen < 5:
        assert not made.join(0.001)
    assert not made.is_stuck()
    monkeypatch.setattr("resilience_sdk.telemetry.exporter.STUCK_S", 0.0)
    assert made.is_stuck()
    sink.may_go_on.set()
    made.finish()
    assert made.join(20)
    assert not made.is_stuck()


def test_a_sink_without_its_library_is_not_tried_again(told: Told, run: ToldRun) -> None:
    """One that is installed, and broken: nobody waits for it at the end."""

    class Broken(Keeping):
        def open(self) -> None:
            super().open()
            raise MissingExtraError("a part of it cannot be imported")

    sink = Broken(run.place())
    worker = told.worker(run, sink)
    worker.start()
    assert worker.join(20)
    assert (sink.opened, worker.lacks_library, worker.is_being_fetched()) == (1, True, False)


def test_a_sink_that_wants_to_leave_the_process_is_told_of(run: ToldRun, told: Told) -> None:
    """`sys.exit` ends a thread without a word; the other events are delivered all the same."""

    class Leaving(Keeping):
        def digest(self, line: Line) -> tuple[int, ...]:
            if line.event.get("number") == 2:
                raise SystemExit("it had enough")
            return super().digest(line)

    sink = Leaving(run.place())
    worker = told.worker(run, sink)
    worker.start()
    worker.finish()
    assert worker.join(20)
    assert (sink.kept, told.failures) == ([0, 1, 3, 4], ["keeping: it had enough"])
