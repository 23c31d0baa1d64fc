"""`resilience straggler`: who is slow, and settings for a job that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilience_sdk.cli import straggler
from resilience_sdk.cli.main import main
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.straggler.published import StandingVerdicts, write_report, write_standing
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import SlowVerdict

VERDICT = SlowVerdict("persistent", "bwd", "compute", "", (2,), ("n0",), False, 17, 80, ratio=1.5)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory in which nothing has been compared yet."""
    return RunDirectory.create(tmp_path / "run")


def begin(run: RunDirectory, job: str = "j") -> Lease:
    """Let a job run in it, in its first attempt."""
    lease = Lease.acquire(run, job)
    journal = Journal(run.journal, writer="launcher", host="here", boot_id="b", job=job)
    journal.emit(Event.ATTEMPT_START, attempt=0)
    journal.close()
    return lease


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the command and return what it prints."""
    assert main(["straggler", *words]) == 0
    return capsys.readouterr().out


def test_verdicts_and_report_are_shown(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing known, somebody slow with the report, switched off."""
    begin(run)
    assert "nothing is known" in said(capsys, str(run.path))
    write_standing(run.path, StandingVerdicts(0, 1.0, verdicts=(VERDICT,), job="j"))
    write_report(run.path, Report({0: "n0"}, section_relative={"bwd": {0: 0.5}}))
    shown = said(capsys, str(run.path))
    assert "rank 2 (node n0): section bwd is 50 % slower" in shown
    assert "Rank=0 Node=n0 Score=0.50" in shown
    write_standing(run.path, StandingVerdicts(0, 1.0, enabled=False, job="j"))
    assert "switched off" in said(capsys, str(run.path))


@pytest.mark.parametrize("command", ["straggler", "status"])
def test_verdicts_of_a_job_that_has_ended_are_not_those_of_now(
    run: RunDirectory, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither while nothing runs, nor when the next job is in the attempt of the same number."""

    def shown() -> str:
        assert main([command, str(run.path)]) == 0
        return capsys.readouterr().out

    lease = begin(run)
    write_standing(run.path, StandingVerdicts(0, 1.0, verdicts=(VERDICT,), job="j"))
    assert "rank 2 (node n0)" in shown()
    lease.release()
    assert "rank 2 (node n0)" not in shown()
    begin(run, job="the next")
    assert "rank 2 (node n0)" not in shown()
    write_standing(run.path, StandingVerdicts(0, 1.0, verdicts=(VERDICT,), job="the next"))
    assert "rank 2 (node n0)" in shown()


def test_settings_add_up_until_they_are_reset(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """In their canonical form, in a file that only we may write."""
    said(capsys, str(run.path), "--report-interval", "1min", "--straggler-detection", "off")
    shown = said(capsys, str(run.path), "--relative-threshold", "0.8")
    assert "report_interval = 60, set while the job runs" in shown
    assert "straggler_detection = false, set while the job runs" in shown
    path = run.path / "stragglers" / "settings.json"
    assert json.loads(path.read_text()) == {
        "report_interval": 60.0,
        "straggler_detection": False,
        "relative_threshold": 0.8,
    }
    assert path.stat().st_mode & 0o777 == 0o600
    said(capsys, str(run.path), "--reset")
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--relative-threshold", "7"], "relative_threshold"), (["--report-interval", "soon"], "report_interval")],
)
def test_a_bad_value_is_one_line_and_writes_nothing(
    run: RunDirectory, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2."""
    assert main(["straggler", str(run.path), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (run.path / "stragglers").exists()


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--stop-if-detected"], True),
        (["--stop-if-detected", "true"], True),
        (["--stop-if-detected=off"], False),
        (["--no-stop-if-detected"], False),
        (["--stop-if-detected", "--relative-threshold", "0.7"], True),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_switch_is_given_as_to_run(
    run: RunDirectory, words: list[str], value: bool, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, with a value, or as its `--no-`; the run directory is never taken for the value."""
    said(capsys, *([*words, str(run.path)] if first else [str(run.path), *words]))
    settings = json.loads((run.path / "stragglers" / "settings.json").read_text())
    assert settings["stop_if_detected"] is value


def test_a_misspelt_option_is_one_line_and_writes_nothing(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the option that was meant; a switch with something that is no truth value likewise."""
    for words, message in (
        (["--relativ-threshold", "0.5"], "did you mean --relative-threshold?"),
        (["--stop-if-detected=perhaps"], "--stop-if-detected: expected true or false, not 'perhaps'"),
    ):
        assert main(["straggler", str(run.path), *words]) == 2
        said_ = capsys.readouterr().err
        assert message in said_
        assert len(said_.splitlines()) == 1
    assert not (run.path / "stragglers").exists()


def test_a_file_of_somebody_else_is_refused(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not mixed with ours."""
    said(capsys, str(run.path), "--scores-to-print", "3")
    (run.path / "stragglers" / "settings.json").chmod(0o666)
    assert main(["straggler", str(run.path)]) == 2
    assert "others can write it" in capsys.readouterr().err


def test_json_has_its_documented_keys(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """With or without anything to tell."""
    begin(run)
    write_standing(run.path, StandingVerdicts(0, 1.0, verdicts=(VERDICT,), job="j"))
    found = json.loads(said(capsys, str(run.path), "--json"))
    assert tuple(found) == straggler.KEYS
    assert found["verdicts"][0]["ranks"] == [2]
    page = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    for key in straggler.KEYS:
        assert f"`{key}`" in page, f"docs/commands.md does not describe {key}"
