"""The commands on the history: what a user reads where there is none, or where it lies elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

import needed
import pytest
from told_fleet import ToldFleetRun

from resilience_sdk.cli.main import main
from resilience_sdk.history.exclusion import nodes_to_leave_out
from resilience_sdk.history.indexer import run_directories

needed.library("sqlalchemy", "history")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without runs, and no database that somebody has set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RESILIENCE_DB", raising=False)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line of a refusal."""
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize("words", [["index", "runs"], []])
def test_without_sqlalchemy_every_command_names_the_extra(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, the indexer too."""
    ToldFleetRun.make(Path("runs/exp1"), ["A"]).start()
    with mock.patch.dict(sys.modules, {"sqlalchemy": None, "sqlalchemy.exc": None}):
        assert main(["history", *words]) == 2
        assert "pip install 'resilience-sdk[history]'" in one_line(capsys)
        left_out = nodes_to_leave_out(Path("runs/exp1"), {"RESILIENCE_DB": "h.db"}, since=0.0)
    assert left_out.problem is not None
    assert left_out.problem.startswith(
        "the history was not asked which nodes are suspect: the history needs SQLAlchemy"
    )


def test_where_there_is_no_run_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a directory that was misspelt nor a database."""
    Path("empty").mkdir()
    for named in ("missing", "empty"):
        assert main(["history", "index", named]) == 2
        assert one_line(capsys).endswith(f"{named} is no run directory and has none in it")
    assert sorted(os.listdir(tmp_path)) == ["empty"]
    assert os.listdir("empty") == []


def test_the_indexer_says_how_to_read_what_lies_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """`history` looks in one place; one thing is counted as one."""
    ToldFleetRun.make(Path("my runs/exp1"), ["A"]).start()
    ToldFleetRun.make(Path("resilience-runs/exp2"), ["A"]).start()
    assert main(["history", "index", "my runs"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "2 new events of 1 run in my runs/history.db",
        "to read it: resilience history --db 'my runs/history.db'",
    ]
    assert main(["history", "index"]) == 0
    assert capsys.readouterr().out.splitlines() == ["2 new events of 1 run in resilience-runs/history.db"]
    assert main(["history", "--since", "7d"]) == 0
    assert "nothing has failed in the last 7d" in capsys.readouterr().out


def test_a_run_that_may_not_be_read_is_a_problem_and_no_end(tmp_path: Path) -> None:
    """Of somebody else, say, in a folder that many share."""
    for name in ("mine", "theirs"):
        ToldFleetRun.make(tmp_path / "runs" / name, ["A"]).start()
    is_dir = Path.is_dir

    def refuse(path: Path) -> bool:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied")
        return is_dir(path)

    with mock.patch.object(Path, "is_dir", refuse):
        found, problems = run_directories([tmp_path / "runs"])
    assert [path.name for path in found] == ["mine"]
    assert problems == [f"{tmp_path}/runs/theirs: Permission denied"]


@pytest.mark.parametrize("named", ["mysql://u:secret@h/x", "nosuch://x", "sqlite://", "sqlite:///:memory:"])
def test_what_can_hold_no_history_is_refused(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what can, and without what is secret."""
    ToldFleetRun.make(Path("runs/exp1"), ["A"]).start()
    for words in (["history"], ["history", "index", "runs"], ["nodes"]):
        assert main([*words, "--db", named]) == 2
        line = one_line(capsys)
        assert "the history is in a file or in PostgreSQL" in line
        assert "secret" not in line


def test_a_file_that_is_no_database_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever wants to write there, and whoever wants to read."""
    ToldFleetRun.make(Path("runs/exp1"), ["A"]).start()
    Path("notes.txt").write_text("a text that is long enough to be none of SQLite's files\n" * 10)
    for words in (["history"], ["history", "index", "runs"]):
        assert main([*words, "--db", "notes.txt"]) == 2
        assert "the history notes.txt cannot be" in one_line(capsys)


def test_a_database_that_may_only_be_read_still_tells_its_suspects(tmp_path: Path) -> None:
    """An administrator's, say: this run is not in it, and the nodes that others have failed on are."""
    for number in (1, 2, 3):
        run = ToldFleetRun.make(tmp_path / "runs" / f"exp{number}", ["A", "B", "C"], at=1_000_000.0 + number * 9e4)
        run.start()
        run.at += 7200.0
        run.fail("B", "gpu_fell_off_bus", "hardware", action="exclude_node")
        run.end()
    assert main(["history", "index", "runs"]) == 0
    new = ToldFleetRun.make(tmp_path / "runs" / "new", ["A"], at=2_000_000.0)
    new.start()

    def refuse(*_: object) -> bool:
        from sqlalchemy.exc import OperationalError

        raise OperationalError("", {}, Exception("attempt to write a readonly database"))

    with mock.patch("resilience_sdk.history.indexer.Index._take", refuse):
        found = nodes_to_leave_out(new.path, {}, since=0.0)
    assert list(found.reasons) == ["B"]
    assert found.problem is not None
    assert "was not told of this run" in found.problem
    assert "readonly database" in found.problem
