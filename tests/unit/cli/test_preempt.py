"""`resilience preempt`: a request in a file, for a job that runs."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest

from resilience_sdk.cli import preempt
from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory in which this very process is the job."""
    run = RunDirectory.create(tmp_path / "run")
    Lease.acquire(run, "job-a")
    return run


def test_the_request_is_whole_and_private(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Version, time, reason and who, in one file that only we may write; a person reads what will happen."""
    before = time.time()
    assert main(["preempt", str(run.path), "--reason", "maintenance at noon\x1b[2J"]) == 0
    request = json.loads(run.preempt.read_text())
    assert request["v"] == 1
    assert before <= request["t"] <= time.time()
    assert request["reason"].startswith("maintenance at noon")
    assert "\x1b" not in request["reason"]
    assert "@" in request["by"]
    assert stat.S_IMODE(run.preempt.stat().st_mode) == 0o600
    said = capsys.readouterr().out
    assert "job job-a" in said
    assert "75" in said
    assert not list(run.path.glob(".preempt*"))


@pytest.mark.parametrize(
    ("job", "is_ours", "launcher", "told"),
    [
        ("launcher-1-2-h", True, "resilience run", "resilience run ends with exit code 75\n"),
        ("elastic-x-h:1", False, "torchrun", "upon which torchrun ends with its own exit code 1: resilience outcome"),
        ("elastic-x-h:1", True, "resilience run", "resilience run ends with exit code 75\n"),
        ("slurm-7.0", False, None, "the ranks leave with 75; where a launcher hides that, resilience outcome"),
    ],
)
def test_what_is_promised_is_true_for_the_launcher_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], job: str, is_ours: bool, launcher: str | None, told: str
) -> None:
    """Only ours leaves with 75; another job's launch in the same directory tells nothing."""
    run = RunDirectory.create(tmp_path / "run")
    Lease.acquire(run, job)
    journal = Journal(run.journal, writer="launcher", host="h", boot_id="", job=job if is_ours else "another")
    journal.emit(Event.RUN_START)
    journal.close()
    assert main(["preempt", str(run.path)]) == 0
    assert told in capsys.readouterr().out
    assert main(["preempt", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launcher"] == launcher


def test_json_has_its_documented_keys(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs: whom it was asked of, and where."""
    assert main(["preempt", str(run.path), "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert tuple(asked) == preempt.KEYS
    assert (asked["job"], asked["pid"], asked["exit_code"]) == ("job-a", os.getpid(), 75)
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    for key in preempt.KEYS:
        assert f"`{key}`" in page, f"docs/commands.md does not describe {key}"


def test_refuses_where_there_is_nothing_to_ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No directory, another directory, a run without a job, one that is finished: one line, 2, and no file."""
    plain, idle, done = tmp_path / "plain", RunDirectory.create(tmp_path / "idle"), RunDirectory.create(tmp_path / "d")
    plain.mkdir()
    done.mark_finished({})
    for path, message in (
        (tmp_path / "none", "there is no run directory"),
        (plain, "is no run directory"),
        (idle.path, "no job runs in it"),
        (done.path, "its training is complete"),
    ):
        assert main(["preempt", str(path)]) == 2
        said = capsys.readouterr()
        assert message in said.err
        assert len(said.err.splitlines()) == 1
        assert said.out == ""
        assert not (path / "preempt").exists()


def test_a_request_that_cannot_be_written_names_another_way(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here a folder is in the way; the line says whom to signal instead."""
    run.preempt.mkdir()
    (run.preempt / "x").touch()
    assert main(["preempt", str(run.path)]) == 2
    assert f"pid {os.getpid()}" in capsys.readouterr().err
