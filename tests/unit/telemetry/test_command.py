"""`python -m resilience_sdk.telemetry` as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from told_run import ToldRun

from resilience_sdk.telemetry.__main__ import main


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    program = [sys.executable, "-m", "resilience_sdk.telemetry", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere"], "there is no run directory"),
        ([".", "--otlp-endpoint", "collector"], "otlp_endpoint"),
        ([".", "--prometheus-address", "0.0.0.0:9464"], "prometheus_token"),
    ],
)
def test_bad_usage_says_what_is_wrong(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with 2, before anything is started."""
    assert main(options) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_there_is_is_delivered_where_no_job_runs(tmp_path: Path) -> None:
    """It ends by itself, once; without a sink it says how to name one."""
    run = ToldRun.make(tmp_path)
    run.begin()
    done = command(str(run.run_dir.path), "--prometheus-textfile", str(tmp_path / "textfiles"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "textfiles").iterdir())) == 1
    done = command(str(run.run_dir.path))
    assert done.returncode == 0
    assert "docs/telemetry.md" in done.stderr


def test_a_disk_that_takes_no_position_is_said_in_one_line(tmp_path: Path) -> None:
    """The launcher starts it again and again: each stack would stand on the job's screen."""
    run = ToldRun.make(tmp_path)
    (run.run_dir.path / "telemetry").touch()
    done = command(str(run.run_dir.path), "--event-log", "text")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "nothing can be exported" in done.stderr
