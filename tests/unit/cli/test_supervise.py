"""The command line of `resilience supervise`: what it takes, and what it refuses before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience_sdk.cli.main import main
from resilience_sdk.cli.supervise import command_run_dir, script_of


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command given"),
        (["--"], "no command given"),
        (["train.py", "--lr", "1"], "write -- before the command: resilience supervise -- train.py"),
        (["--max-job-retires", "3", "--", "true"], "unknown option --max-job-retires"),
        (["--max-job-retries", "few", "--", "true"], "max_job_retries"),
        (["--", "resilience", "run", "--fresh", "train.py"], "--fresh in the command"),
        (["--run-dir", "run", "--", "no-such-program"], "no-such-program: command not found"),
        (["--run-dir", "run", "--", "/etc/hostname"], "/etc/hostname: cannot be executed"),
    ],
)
def test_mistakes_are_one_line_and_2(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line names the thing and the cure."""
    monkeypatch.chdir(tmp_path)
    assert main(["supervise", *words]) == 2
    said = capsys.readouterr().err.splitlines()
    assert message in said[-1]
    assert not [line for line in said[:-1] if "run directory" not in line]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["resilience", "run", "--run-dir", "runs/a", "train.py"], "runs/a"),
        (["/opt/bin/resilience", "run", "--run_dir=runs/a", "train.py"], "runs/a"),
        (["python", "-m", "resilience_sdk", "run", "--run-dir", "runs/a", "-m", "x"], "runs/a"),
        (["resilience", "run", "train.py"], None),
        (["python", "train.py", "--run-dir", "its-own"], None),
        (["resilience", "run", "--run-dir"], None),
    ],
)
def test_a_directory_named_in_the_command_is_the_job_s(command: list[str], named: str | None) -> None:
    """Else supervisor and launcher would look at two directories. Other programs' options are their own."""
    assert command_run_dir(command) == named


def test_the_run_is_called_by_its_script() -> None:
    """Where nobody names a directory, it gets the script's name, else the program's."""
    assert script_of(["torchrun", "--nproc-per-node", "2", "train.py"]) == "train.py"
    assert script_of(["make", "train"]) == "make"
