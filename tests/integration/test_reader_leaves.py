"""A reader of the job's output that goes away ends nothing: what is printed goes on into files of the run directory."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from harness import PATIENCE_S, PROJECT, SCRIPTS

from resilience_sdk.core.journal import read_journal

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def started(tmp_path, output):
    """Start a job of one rank with its standard output and error in `output`."""
    told, run_dir = tmp_path / "told", tmp_path / "run"
    told.mkdir()
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "TOLD": str(told), "RESILIENCE_PAGE_DIR": str(tmp_path)}
    words = (sys.executable, "-m", "resilience_sdk.launcher", "--run-dir", str(run_dir), "printing.py")
    launcher = subprocess.Popen(
        words, cwd=SCRIPTS, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        yield launcher, told, run_dir
    finally:
        launcher.kill()
        launcher.wait()


def read_line_of_rank(fd):
    """Read until the first line of the rank has come, with its end, which is written by itself."""
    seen = b""
    while b"\n" not in seen.partition(b"attempt 0 begins")[2]:
        seen += os.read(fd, 4096)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_leaves(tmp_path, kind):
    """A closed pipe (`| head`) or terminal: both streams, before and after a restart; the launcher's words, too."""
    reader, writer = os.pipe() if kind == "pipe" else os.openpty()
    with started(tmp_path, writer) as (launcher, told, run_dir):
        os.close(writer)
        read_line_of_rank(reader)
        os.close(reader)
        (told / "go").touch()
        assert launcher.wait(PATIENCE_S) == 0
    lines = (run_dir / "logs/output-rank-0.txt").read_text().splitlines()
    printed = [line for line in lines if not line.startswith("resilience: ")]
    each = [f"{what} {line}" for line in range(3) for what in ("line", "error")]
    assert printed == [
        *(f"attempt 0 {what}" for what in each),
        "attempt 1 begins",
        *(f"attempt 1 {what}" for what in each),
        "by the descriptor",
    ]
    (launchers,) = set((run_dir / "logs").glob("output-*.txt")) - {run_dir / "logs/output-rank-0.txt"}
    assert "resilience: finished" in launchers.read_text()
    (incident,) = (run_dir / "incidents").glob("*/report.json")  # of the exit code, and of nothing else
    assert "exit code 3" in json.dumps(json.loads(incident.read_text())["evidence"])
    degraded = [e for e in read_journal(run_dir / "journal").events if e["event"] == "degraded"]
    assert {e["attempt"] for e in degraded if e["what"] == "output"} == {0, 1}


def test_an_output_without_room(tmp_path):
    """A redirect to a disk that is full: what was refused is in the file, and the next words are tried again."""
    with open("/dev/full", "w") as full, started(tmp_path, full) as (launcher, told, run_dir):
        (told / "go").touch()
        assert launcher.wait(PATIENCE_S) == 0
    assert "attempt 1 error 2" in (run_dir / "logs/output-rank-0.txt").read_text()
