"""Loops of one's own, killed or preempted at awkward moments, end with the same bits as those that were left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_frameworks import require
from harness import PROJECT, SCRIPTS, job

pytestmark = pytest.mark.slow
IN_MID_WINDOW = 14  # of an epoch's order and of gradients that are added up; a save is due at 12, and is made there


def lines(*files: Path) -> dict[int, str]:
    """Return what the newest try of each step has left."""
    told = "".join(file.read_text() for file in files).splitlines()
    return {int(step): digests for step, _, digests in (line.partition(" ") for line in told)}


def test_a_checkpointer_beside_a_loop(tmp_path: Path) -> None:
    """Samples, augmentation, dropout, weights, gradients, a deque and an array; and it trains as without the SDK."""
    require("torchdata")

    def run(*words: object) -> int:
        command = [sys.executable, "-W", "ignore", SCRIPTS / "exact_checkpointer.py", *words]
        env = {"PYTHONPATH": str(PROJECT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        return subprocess.run(list(map(str, command)), env=env, cwd=tmp_path, timeout=100).returncode

    assert run("alone") == 0
    assert run("whole", "run-whole") == 0
    assert lines(tmp_path / "whole") == lines(tmp_path / "alone")
    assert run("cut", "run-cut", IN_MID_WINDOW) == -signal.SIGKILL
    assert run("cut", "run-cut") == 0
    first_try = [int(line.split()[0]) for line in (tmp_path / "cut").read_text().splitlines()]
    assert first_try.count(12) == 2, "it has gone on behind the save"
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_what_each_rank_has_of_its_own(tmp_path: Path) -> None:
    """Buffers, values, a memory and an order of a sampler's own, behind a kill and behind a stop in a window."""

    def run(name: str, fault: str = "") -> int:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        env = {"RESILIENCE_FAULT": fault} if fault else {}
        with job(folder, "--nproc-per-node", "2", "exact_ranks.py", str(folder / "out"), env=env) as started:
            code = started.finish()
            assert code in (0, 75), started.screen
            return code

    def of_ranks(name: str) -> list[dict[int, str]]:
        return [lines(tmp_path / name / f"out.{rank}") for rank in (0, 1)]

    assert run("whole") == 0
    whole = of_ranks("whole")
    assert whole[0] != whole[1]
    assert sorted(whole[0]) == list(range(30))
    assert run("killed", f"kill:rank=1,step={IN_MID_WINDOW}") == 0
    assert of_ranks("killed") == whole
    assert run("preempted", "preempt:rank=1,step=3") == 75
    first_try = (tmp_path / "preempted" / "out.0").read_text().splitlines()
    assert len(first_try) % 3 == 0, "all ranks have gone on to the end of the window"
    assert run("preempted") == 0
    assert of_ranks("preempted") == whole
    assert len((tmp_path / "preempted" / "out.0").read_text().splitlines()) == len(whole[0]), "no step is done twice"
