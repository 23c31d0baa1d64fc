"""One sentence of `status` on why steps are slow: jobs that are slow for one planted reason, and healthy ones."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import PROJECT, job

pytestmark = pytest.mark.slow

SECONDS = 10.0
FIXED_SECONDS = 12.0  # a line through steps takes 64 of them, of 130 ms


def status_of(run_dir: Path, *words: str) -> str:
    """Return what `resilience status` prints."""
    command = [sys.executable, "-m", "resilience_sdk", "status", str(run_dir), *words]
    printed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout


def status_after(folder: Path, ranks: int, fault: str) -> tuple[dict[str, Any], str]:
    """Run a job that ends well; return its status for programs and for people."""
    words = ("--nproc-per-node", str(ranks), "slow_steps.py", "--fault", fault)
    words += ("--seconds", str(FIXED_SECONDS if fault == "batch" else SECONDS))
    with job(folder, *words) as run:
        assert run.finish() == 0, run.screen
        status: dict[str, Any] = json.loads(status_of(run.run_dir, "--json"))
        return status, status_of(run.run_dir)


SLOW = {
    "loader of one": (1, "loader", "data", 0.5, "of the step waits for data (section data): more DataLoader workers"),
    "loader": (
        2,
        "loader",
        "data",
        0.5,
        "of the step waits for data on all ranks (section data): more DataLoader workers",
    ),
    "save of one": (1, "save", "checkpoint", 0.2, "saves take "),
    "save": (2, "save", "checkpoint", 0.2, "saves take "),
    "rank": (2, "rank", "slow_rank", 0.3, "all ranks wait for rank 1"),
    "batch of one": (1, "batch", "small_batch", 0.7, "of a step does not grow with its work"),
    "batch": (2, "batch", "small_batch", 0.7, "of a step does not grow with its work"),
}
TOGETHER = 3  # they sleep most of their time


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """The status of each slow job, for programs and for people."""
    folders = {name: tmp_path_factory.mktemp("slow") for name in SLOW}
    with ThreadPoolExecutor(TOGETHER) as pool:
        found = {name: pool.submit(status_after, folders[name], *SLOW[name][:2]) for name in SLOW}
        return {name: future.result() for name, future in found.items()}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_job_is_told_why(told: dict[str, tuple[dict[str, Any], str]], name: str) -> None:
    """The planted reason and no other, with the share that it takes; no fault is needed for it."""
    (status, text), (ranks, fault, cause, least, says) = told[name], SLOW[name]
    slow = status["why_slow"]
    assert slow is not None, json.dumps(status["step_time"])
    assert (slow["cause"], slow["evidence"]["ranks"]) == (cause, ranks)
    assert least < slow["share"] < 1
    assert says in slow["text"]
    assert slow["evidence"]["steps"] > 50
    (line,) = (line for line in text.splitlines() if line.startswith("why slow "))
    assert line.split(maxsplit=2)[2] == slow["text"]
    assert status["incidents"]["count"] <= (fault == "rank")  # a rank that stays slow is one


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.release), 2])
def test_a_healthy_job_is_told_what_its_steps_take_and_no_reason(tmp_path: Path, ranks: int) -> None:
    """The shares of its sections are those of the sleeps in them, and so is its throughput."""
    status, text = status_after(tmp_path, ranks, "none")
    assert status["why_slow"] is None
    assert "why slow" not in text
    steps = status["step_time"]
    assert steps["ranks"] == ranks
    assert 0.04 < steps["step_s"] < 0.08
    shares = {section["name"]: section["share"] for section in steps["sections"]}
    assert 0.5 < shares["fwd"] < 0.9
    assert 0 < shares["data"] < 0.1
    assert steps["work_per_s"] == pytest.approx(ranks * 100 / steps["step_s"], rel=0.1)
    (line,) = (line for line in text.splitlines() if line.startswith("steps "))
    assert " ms each over " in line
    assert "fwd " in line
    assert "of work per second" in line
