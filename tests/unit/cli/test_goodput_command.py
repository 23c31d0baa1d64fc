"""What `goodput` says beside its numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from told_fleet import ToldFleetRun

from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.dashboard.runs import RunReader
from resilience_sdk.report.page import render_sections
from resilience_sdk.report.read import read_run


def measured(run: ToldFleetRun, **section: Any) -> None:
    """Tell what steps take, with this section in them."""
    shares = {"share": 0.9, "least": 0.9, "most": 0.9, "rank": 0}
    facts = {"steps": 100, "wall_s": 10.0, "ranks": [0], "data_s": 0.0, "saves_s": 0.0}
    run.tell("A", Event.STEP_TIME, **facts, sections=[{**shares, **section}])


def test_where_no_wait_for_data_is_measured_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop may wait for it all the time, which is then called productive."""
    run = ToldFleetRun.make(tmp_path / "run", ["A"])
    run.start()
    measured(run, name="step", kind="pulse")
    assert main(["goodput", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert "no section says when the loop waits for its data, so that is in outside or productive" in printed
    assert main(["goodput", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data_measured"] is False
    measured(run, name="data", kind="io")
    assert main(["goodput", str(run.path)]) == 0
    assert "no section" not in capsys.readouterr().out


def test_attempts_of_several_jobs_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each job begins with its attempt 0."""
    run = ToldFleetRun.make(tmp_path / "run", ["A"])
    run.start()
    run.at += 60.0
    run.end()
    run.job = "next"
    run.at += 60.0
    run.start()
    assert main(["goodput", str(run.path)]) == 0
    lines = [line.partition(" from ")[0] for line in capsys.readouterr().out.splitlines() if ", attempt " in line]
    assert lines == ["job 1, attempt 0", "job 2, attempt 0"]


def test_a_journal_that_is_gone_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a run in which nothing has happened."""
    run = ToldFleetRun.make(tmp_path / "run", ["A"])
    run.start()
    run.close()
    shutil.rmtree(run.path / "journal")
    assert main(["goodput", str(run.path)]) == 0
    assert "cannot read" in capsys.readouterr().out


def test_steps_that_nobody_counted_are_unknown_in_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a fault without global steps `replayed` is null, also of each attempt, and no 0; then it is a number."""
    run = ToldFleetRun.make(tmp_path / "run", ["A"])
    run.start()
    run.at += 60.0
    run.fail("A", "python_exception", "user")

    def told(*command: str) -> Any:
        assert main([*command, str(run.path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    account = told("goodput")
    assert [one["buckets"]["replayed"] for one in (account, *account["attempts"])] == [None] * 3
    assert sum(filter(None, account["buckets"].values())) == pytest.approx(account["wall_s"])
    assert told("status")["goodput"]["buckets"]["replayed"] is None

    def says() -> list[bool]:
        found = []
        for command in (["goodput"], ["status"], ["top", "--once"]):
            assert main([*command, str(run.path)]) == 0
            (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("goodput"))
            found.append("at most" in line)
        facts = read_run(RunDirectory(run.path))
        row = RunReader(run.path).look()
        return [*found, "at most" in render_sections(facts)["summary"], not row.knows_replayed]

    assert says() == [True] * 5
    run.tell("A", Event.RESUME, step=10)
    assert says() == [False] * 5
    assert told("goodput")["buckets"]["replayed"] == told("status")["goodput"]["buckets"]["replayed"] == 0.0
