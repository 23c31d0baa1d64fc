"""Platforms on which parts are missing: the SDK does less there, and never raises for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# What Windows has not, as far as the standard library and torch can do without it on this platform.
WINDOWS = """
import os, signal, sys
for name in ("fcntl", "pwd", "resource"):
    sys.modules[name] = None
for name in ("SIGRTMAX", "SIGRTMIN", "SIGUSR1", "SIGUSR2", "SIGCONT", "pidfd_send_signal"):
    delattr(signal, name)
for name in ("pidfd_open", "mkfifo", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
    delattr(os, name)
"""
LOOP = """
from resilience_sdk import heartbeat, straggler, start_run
for step in range(2):
    with heartbeat(), straggler.section("fwd"):
        pass
heartbeat.beat()
with heartbeat.paused("upload"):
    pass
heartbeat.done()
run = start_run()
with run:
    print([step for step, _ in run.steps(range(3))], run.session)
"""
NO_SESSION = """
import sys
sys.modules["resilience_sdk.rank"] = None
from resilience_sdk import heartbeat
for _ in range(2):
    with heartbeat():
        print("step")
heartbeat.beat()
heartbeat.done()
"""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script on its own."""
    places = {"RESILIENCE_PAGE_DIR": str(folder), "RESILIENCE_RUN_DIR": str(folder / "run")}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **places},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_without_posix_the_loop_runs_and_one_line_says_that_nothing_is_watched(tmp_path):
    """Heartbeats, pulses, sections and a run do nothing where the modules of POSIX are missing."""
    result = run(tmp_path, WINDOWS + LOOP)
    assert result.stdout == "[0, 1, 2] None\n", result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "not watched" in result.stderr or "nothing is watched" in result.stderr
    assert not list(tmp_path.rglob("*.page"))


def test_a_session_that_cannot_be_imported_is_said_once(tmp_path):
    """The first use says it, and all others are no-ops."""
    result = run(tmp_path, NO_SESSION)
    assert result.stdout == "step\nstep\n", result.stderr
    (line,) = result.stderr.splitlines()
    assert "nothing is watched" in line
