"""The error file of torch's launcher: there as a whole, or not at all."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.rank.exceptions import write_error_file

WRITE = """
import sys
from resilience_sdk.rank.exceptions import write_error_file
try:
    raise ValueError("x" * 100_000)
except ValueError as error:
    write_error_file(error)
"""


def limited() -> None:
    """What a full disk does: the first bytes of a file fit, the others do not."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_write_that_stops_in_the_middle_leaves_no_file(tmp_path: Path) -> None:
    """torchrun's agent dies of one that is there in part; without one it knows the exit code."""
    path = tmp_path / "error.json"
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", WRITE], env=env, preexec_fn=limited, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "could not write" in done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("before", ["", '{"message": {"mess', "[]"])
def test_a_torn_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """What `@record` could not write to its end; what it did write stays."""
    path = tmp_path / "error.json"
    path.write_text(before)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error_file(ValueError("first"))
    assert json.loads(path.read_text())["message"]["message"] == "ValueError: first"
    write_error_file(ValueError("second"))
    assert json.loads(path.read_text())["message"]["message"] == "ValueError: first"


def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename over `/dev/null` would take it away from the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "link"))
    write_error_file(ValueError("told"))
    assert b"ValueError: told" in os.read(reader, 1 << 16)
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
