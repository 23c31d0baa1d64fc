"""The processes that share the tests among them: one that dies costs the test that it died in, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DIES = "import os\ndef test_dies(): os._exit(3)\n"
PASSES = "def test_passes(): pass\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=pytest.mark.release)])
def test_a_process_that_dies_is_named_at_once_and_the_others_go_on(tmp_path: Path, processes: int) -> None:
    """Whoever takes over gets single tests, which xdist alone would have them wait with for ever."""
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(PASSES)
    (tmp_path / "test_dies.py").write_text(DIES)
    (tmp_path / "test_dies_last.py").write_text(PASSES + DIES)
    (tmp_path / "test_dies_first.py").write_text(DIES + PASSES)
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "conftest"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-n", str(processes), "--dist", "loadfile", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": "", "TEST_DURATIONS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 failed, 8 passed" in done.stdout
    assert done.stdout.count(" ended with 3\n") == 3
    crashed = [line for line in done.stdout.splitlines() if line.startswith("crashed: ")]
    assert sorted(crashed) == [
        "crashed: test_dies.py::test_dies",
        "crashed: test_dies_first.py::test_dies",
        "crashed: test_dies_last.py::test_dies",
    ]
