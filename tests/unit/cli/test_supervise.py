"""The command line of `resilience supervise`: what it takes, and what it refuses before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilience_sdk.cli.main import main
from resilience_sdk.cli.supervise import FLAGS, script_of, shared_options
from resilience_sdk.launcher.options import known_options


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
        (["--run-dir", "run", "--", "/etc/passwd"], "/etc/passwd: cannot be executed"),
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
    assert said[:-1] == []
    assert list(tmp_path.iterdir()) == []  # nothing is made before the mistake is found


@pytest.mark.parametrize(
    ("command", "shared"),
    [
        (["resilience", "run", "--run-dir", "runs/a", "train.py"], {"run_dir": "runs/a"}),
        (["/opt/bin/resilience", "run", "--run_dir=runs/a", "train.py"], {"run_dir": "runs/a"}),
        (["python", "-m", "resilience_sdk", "run", "--run-dir", "runs/a", "-m", "x"], {"run_dir": "runs/a"}),
        (["resilience", "run", "-r3", "--standalone", "--preempt-time", "5min", "x"], {"preempt_time": "5min"}),
        (
            ["resilience", "run", "--nproc-per-node", "2", "--preempt_signals=SIGUSR1", "x"],
            {"preempt_signals": "SIGUSR1"},
        ),
        (["resilience", "run", "--run-dir", "run", "run"], {"run_dir": "run"}),
        (["resilience", "run", "-m", "a.b", "--term-grace", "3"], {}),
        (["resilience", "run", "train.py", "--run-dir", "its-own"], {}),
        (["python", "train.py", "--run-dir", "its-own"], {}),
        (["resilience", "run", "--run-dir"], {}),
        (["ft_launcher", "--term-timeout=90", "--run-dir", "runs/a", "x"], {"run_dir": "runs/a", "preempt_time": "90"}),
        (["ft_launcher", "--workers_stop_timeout", "5", "--term-grace", "6", "x"], {"term_grace": "6"}),
    ],
)
def test_what_the_command_names_is_the_job_s(command: list[str], shared: dict[str, str]) -> None:
    """Else the two would look at two directories, wait for two times, hear two signals. The script's options are its
    own.
    """
    assert shared_options(command) == (shared, None)


def test_an_option_of_the_script_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script may have a `--fresh` of its own: it is not refused."""
    monkeypatch.chdir(tmp_path)
    command = ["no-such-folder/resilience", "run", "train.py", "--fresh"]
    assert main(["supervise", "--run-dir", "run", "--", *command]) == 2
    assert "command not found" in capsys.readouterr().err


def test_the_command_s_file_of_settings_counts() -> None:
    """It may say how long a save takes."""
    assert shared_options(["resilience", "run", "--config", "a.yaml", "x"])[1] == "a.yaml"


def test_options_without_a_value_are_known() -> None:
    """The list is the launcher's own."""
    assert {name for name, has_value in known_options().items() if not has_value and "_" not in name} == FLAGS


def test_a_switch_with_its_value_hides_nothing_behind_it() -> None:
    """`--stop-if-detected true` is no script; what follows is still for `resilience run`."""
    words = ["resilience", "run", "-r3", "--stop-if-detected", "true", "--run-dir", "D", "train.py", "--run-dir", "E"]
    assert shared_options(words) == ({"run_dir": "D"}, None)


def test_the_run_is_called_by_its_script() -> None:
    """Where nobody names a directory, it gets the script's name, else the program's."""
    assert script_of(["torchrun", "--nproc-per-node", "2", "train.py"]) == "train.py"
    assert script_of(["make", "train"]) == "make"
