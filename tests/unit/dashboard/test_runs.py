"""Summaries of runs: right in every state, renewed by what is new, and cheap where nothing is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import needed
import pytest
from dashboard_fleet import fleet, odd
from dashboards import dashboard  # noqa: F401 - what the pages need is there, or these tests are left out
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from told_fleet import ToldFleetRun
from told_run import EVENTS

from resilience_sdk.core.journal import Event
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.dashboard import runs
from resilience_sdk.dashboard.pages import ListPage, environment
from resilience_sdk.dashboard.runs import FoundRuns, IndexedRuns, RunBook, RunReader, run_id
from resilience_sdk.history.indexer import Index

LONG_S = 60.0


def told(path: Path, **facts: Any) -> ToldFleetRun:
    """A run of one node that has begun to step."""
    run = ToldFleetRun.make(path, ["node1"], ranks_per_node=2, at=time.time() - 1000, **facts)
    run.start()
    for rank in range(2):
        run.tell("node1", Event.FIRST_BEAT, rank=rank, step=1, step_is_global=True)
    return run


def test_a_run_is_followed_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    """Each look reads what is new, and comes to what a first look would have found."""
    path = tmp_path / "run"
    run = told(path)
    reader = RunReader(path)
    assert (reader.look().state, reader.summary.step) == ("lost", 1)
    lease = Lease.acquire(RunDirectory(path), "job")
    assert reader.look().state == "running"
    run.at += 500
    run.tell("node1", Event.CKPT_COMMIT, step=70)
    run.fail("node1", "link_down", "network")
    seen = reader.look()
    assert (seen.attempt, seen.incidents, seen.state) == (1, 1, "running")
    assert seen.last_incident is not None
    assert (seen.last_incident.kind, seen.last_incident.cause) == ("crash", "link_down")
    assert "node1" in seen.last_incident.text
    run.tell("node1", Event.STALL, text="rank 1 stuck at x.py:3", since=run.at)
    assert (reader.look().state, reader.summary.detail) == ("stalled", "rank 1 stuck at x.py:3")
    run.at += 100
    run.end()
    lease.release()
    (path / "outcome.json").write_text(json.dumps({"verdict": "stop", "exit_code": 77, "ended_at": run.at}))
    assert (reader.look().state, reader.summary.detail) == ("ended", "stop")
    (path / "finished").touch()
    assert reader.look().state == "finished"
    assert reader.summary == RunReader(path).look()
    assert reader.summary.goodput is not None


def test_a_run_that_is_over_is_not_read_again(tmp_path: Path) -> None:
    """A look at it opens nothing; once something is written there, it is read."""
    (path,) = fleet(tmp_path, 1, now=time.time() - 10 * 86400)
    (path / "lease.json").unlink(missing_ok=True)
    os.utime(path, (1e9, 1e9))
    reader = RunReader(path)
    before = reader.look()
    with mock.patch.object(runs, "read_journal", side_effect=AssertionError), mock.patch("os.scandir", None):
        assert reader.look() is before
    with (path / "journal" / "other-launcher-1.jsonl").open("w") as file:
        file.write('{"event":"run_start","t":2e9,"job":"again","host":"h"}\n')
    assert reader.look().started_at == 2e9


def test_a_journal_that_was_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    """As when a directory was removed and its name used again, or a file was cut."""
    path = tmp_path / "run"
    run = told(path)
    run.fail("node1", "link_down", "network")
    run.close()
    reader = RunReader(path)
    assert reader.look().incidents == 1
    (file,) = (path / "journal").glob("*.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0])
    assert reader.look().incidents == 0
    file.rename(path / "journal" / "gone")
    file.write_bytes(b"".join(lines))
    assert reader.look().incidents == 1


def test_a_line_that_is_being_written_counts_once(tmp_path: Path) -> None:
    """It is read when its end is there."""
    path = tmp_path / "run"
    told(path).close()
    (file,) = (path / "journal").glob("*.jsonl")
    line = b'{"event":"incident","t":3e9,"id":"0001-crash","kind":"crash","cause":"x"}\n'
    reader = RunReader(path)
    reader.look()
    before = file.read_bytes()
    for end in (10, len(line) - 1, len(line)):
        file.write_bytes(before + line[:end])
        assert reader.look().incidents == (end == len(line))  # whole as it looks without its newline, it is not
    assert reader.summary.incidents == 1


def test_every_odd_directory_has_a_summary(tmp_path: Path) -> None:
    """Torn, empty, of another version, and not to be read at all."""
    states = {name: RunReader(path).look() for name, path in odd(tmp_path).items()}
    assert {name: summary.state for name, summary in states.items()} == {
        "empty": "empty", "torn": "lost", "older": "lost", "bare": "empty", "no journal files": "empty",
    }  # fmt: skip
    assert "outcome.json" in (states["torn"].detail or "")
    assert states["torn"].incidents == 1
    assert RunReader(tmp_path / "nowhere").look().state == "gone"
    with mock.patch("os.scandir", side_effect=PermissionError(13, "Permission denied")):
        assert RunReader(tmp_path / "empty").look().state == "unreadable"


@given(events=st.lists(EVENTS, max_size=12), outcome=st.binary(max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_journal_holds(tmp_path_factory: pytest.TempPathFactory, events: list[Any], outcome: bytes) -> None:
    """It comes to a summary, as a whole and line by line; one run never hides the others."""
    folder = tmp_path_factory.mktemp("any")
    path = folder / "run"
    RunDirectory.create(path)
    file = path / "journal" / "h-launcher-1.jsonl"
    (path / "outcome.json").write_bytes(outcome)
    slowly = RunReader(path)
    for event in events:
        with file.open("a") as out:
            out.write(json.dumps(event) + "\n")
        assert slowly.look().state in ("lost", "ended", "empty"), slowly.summary.detail
    assert RunReader(path).look().state in ("lost", "ended", "empty")
    ListPage(RunBook(FoundRuns([str(folder)])), environment()).page()


def test_a_run_that_breaks_us_is_named_and_left_alone_for_a_while(tmp_path: Path) -> None:
    """The others are there."""
    for name in ("good", "bad"):
        told(tmp_path / name).close()
    book = RunBook(FoundRuns([str(tmp_path)]))
    real = runs.read_journal

    def read(directory: Path, **options: Any) -> Any:
        calls.append(directory)
        if directory.parent.name == "bad":
            raise TypeError("a mistake of ours")
        return real(directory, **options)

    calls: list[Path] = []
    with mock.patch.object(runs, "read_journal", read):
        for _ in range(5):
            rows = {row.name: row for row in book.table(LONG_S).rows}
    assert rows["good"].state == "lost"
    assert (rows["bad"].state, rows["bad"].detail) == ("unreadable", "TypeError: a mistake of ours")
    assert [path.parent.name for path in calls].count("bad") == 1


def test_a_book_keeps_to_its_time_and_ends_up_with_all(tmp_path: Path) -> None:
    """A run for which there was no time has no state yet; the next look goes on there."""
    fleet(tmp_path, 12)
    book = RunBook(FoundRuns([str(tmp_path)]))
    read = []
    for _ in range(12):
        table = book.table(0.0)
        read.append(sum(row.state != "unread" for row in table.rows))
    assert len(table.rows) == 12
    assert read == sorted(read)
    assert (read[0], read[-1]) == (1, 12)
    states = [row.is_live for row in table.rows]
    assert states == sorted(states, reverse=True)  # what runs comes first


def test_runs_that_come_and_go_are_seen(tmp_path: Path) -> None:
    """By their ids, which are no paths and stay the same."""
    source = FoundRuns([str(tmp_path)])
    source.every_s = 0.0
    book = RunBook(source)
    assert book.table(LONG_S).rows == ()
    told(tmp_path / "a b/..".replace("/", "")).close()
    (row,) = book.table(LONG_S).rows
    assert row.id == run_id(tmp_path / "a b..")
    assert row.id.startswith("a-b-")
    assert book.path_of(row.id) == (tmp_path / "a b..").resolve()
    assert book.path_of("..") is None
    assert book.path_of(str(tmp_path)) is None
    (tmp_path / "a b..").rename(tmp_path / "other")
    assert [one.name for one in book.table(LONG_S).rows] == ["other"]
    assert book.path_of(row.id) is None


def test_what_cannot_be_listed_is_told(tmp_path: Path) -> None:
    """And what was known stays."""
    told(tmp_path / "a").close()
    source = FoundRuns([str(tmp_path)])
    source.every_s = 0.0
    book = RunBook(source)
    assert len(book.table(LONG_S).rows) == 1
    with mock.patch("os.listdir", side_effect=OSError(5, "Input/output error")):
        table = book.table(LONG_S)
    assert len(table.rows) == 1
    assert table.problems == (f"{tmp_path} cannot be read: Input/output error",)


def test_runs_of_others_that_may_not_be_read_are_counted(tmp_path: Path) -> None:
    """On a disk that many share: in one line, however many there are; the others are shown."""
    for name in ("mine", "theirs", "a third one's"):
        told(tmp_path / name).close()
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.parent.parent == tmp_path and path.parent.name != "mine":
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    with mock.patch.object(Path, "is_dir", refuse):
        table = RunBook(FoundRuns([str(tmp_path)])).table(LONG_S)
    assert [row.name for row in table.rows] == ["mine"]
    (problem,) = table.problems
    assert problem.endswith("a third one's: Permission denied, and 1 more like it")


def test_so_many_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest; the others are counted."""
    monkeypatch.setattr(runs, "_MOST_RUNS", 3)
    paths = fleet(tmp_path, 5)
    table = RunBook(FoundRuns([str(tmp_path)])).table(LONG_S)
    newest = sorted(paths, key=lambda path: -path.stat().st_mtime)[:3]
    assert ({row.name for row in table.rows}, table.hidden) == ({path.name for path in newest}, 2)


def test_an_index_names_runs_also_those_that_are_elsewhere(tmp_path: Path) -> None:
    """Of a run whose directory is not here, what the index knows of it."""
    needed.library("sqlalchemy", "history")
    for name in ("here", "away"):
        run = told(tmp_path / name)
        run.fail("node1", "link_down", "network")
        run.at += 10
        run.fail("node1", "user_code_error", "user")
        run.close()
    database = str(tmp_path / "history.db")
    index = Index(database)
    index.add([tmp_path])
    index.close()
    (tmp_path / "away").rename(tmp_path / "moved")
    book = RunBook(IndexedRuns(database))
    rows = {row.name: row for row in book.table(LONG_S).rows}
    assert {name: row.state for name, row in rows.items()} == {"here": "lost", "away": "gone"}
    assert rows["away"].incidents == rows["here"].incidents == 2
    assert rows["away"].last_incident is not None
    assert "user_code_error" in rows["away"].last_incident.text
    assert rows["away"].started_at is not None
