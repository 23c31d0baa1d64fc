"""Commands whose output nobody can read: closed, full, or with a reader that has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def resilience(words: str, *, cwd: Path, buffered: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `resilience WORDS` in a shell that writes down its exit code; `2>&-` and the like may stand in the words.

    Descriptor 9 is a pipe that nobody reads.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if not buffered:
        env["PYTHONUNBUFFERED"] = "1"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            ["bash", "-c", f"exec 9>&{writer}; {sys.executable} -m resilience_sdk {words}; echo $? >code"],
            cwd=cwd, env=env, capture_output=True, text=True, timeout=60, pass_fds=[writer],
        )  # fmt: skip
    finally:
        os.close(writer)


def code(cwd: Path) -> int:
    return int((cwd / "code").read_text())


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_verdict_needs_no_output(closed: str, tmp_path: Path) -> None:
    """`if resilience why >&-`: the exit code is the command's own, and there is no stack trace."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "finished").touch()
    for command in ("outcome run --exit-code", "status run"):
        done = resilience(f"{command} {closed}", cwd=tmp_path)
        assert (code(tmp_path), done.stderr) == (0, "")
    done = resilience(f"outcome nowhere {closed}", cwd=tmp_path)
    assert code(tmp_path) == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == ("2>&-" not in closed)


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", ["--help", "--version", "status run", "outcome run --json", "demo --help"])
def test_a_full_disk_is_told_in_one_line(words: str, buffered: bool, tmp_path: Path) -> None:
    """Whether the text is written at once or at the end."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "finished").touch()
    done = resilience(f"{words} >/dev/full", cwd=tmp_path, buffered=buffered)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if "demo" not in words:  # argparse hides what happened to its help
        assert (code(tmp_path), len(done.stderr.splitlines())) == (2, 1)
        assert "No space left" in done.stderr


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("words", ["--help", "--version", "status run", "outcome run --exit-code", "help"])
def test_a_reader_that_left_is_told_as_by_other_programs(words: str, buffered: bool, tmp_path: Path) -> None:
    """Quietly and with 141: 0 would be a verdict that nobody gave."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "finished").touch()
    done = resilience(f"{words} >&9", cwd=tmp_path, buffered=buffered)
    assert (code(tmp_path), done.stderr) == (141, "")


def test_a_command_that_runs_a_job_keeps_its_exit_code(tmp_path: Path) -> None:
    """`resilience supervise ... 2>&1 | head -1`: a scheduler must not see 120 for a job that ended with 75."""
    resilience("supervise --run-dir run -- true >&9 2>&9", cwd=tmp_path)
    assert code(tmp_path) == 0


def test_what_a_job_prints_gets_into_no_file_of_ours(tmp_path: Path) -> None:
    """With a stream closed, the next file has its number, and C libraries print to numbers."""
    (tmp_path / "job.py").write_text(
        "import os; open('shown', 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    )
    done = resilience(f"supervise --run-dir run -- {sys.executable} job.py <&- >&- 2>&-", cwd=tmp_path)
    assert (code(tmp_path), done.stderr) == (0, "")
    assert (tmp_path / "shown").read_text().split() == ["/dev/null"] * 3
