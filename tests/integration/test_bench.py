"""The measurements run, and their JSON says where and what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SMOKE = ("doctor", "primitives", "preemption", "attach", "checkpoints", "restart")


def measured(*names: str) -> dict[str, Any]:
    """Run these measurements with few repetitions; return their JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--json", "--only", ",".join(names)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["failures"] == {}, done.stderr
    return document


def test_the_import_is_measured_and_brings_nothing_heavy() -> None:
    """Whatever the time on a busy machine: torch, numpy, pynvml and structlog stay out of `import resilience_sdk`."""
    document = measured("imports")
    assert {"cpu", "cores", "load", "python", "torch"} <= set(document["machine"])
    ours = [figure for figure in document["figures"] if figure["system"] == "ours"]
    assert [figure["name"] for figure in ours] == ["import", "import with heartbeat, straggler"]
    for figure in ours:
        assert figure["note"].startswith("brings no torch")
        assert 0 < figure["min"] <= figure["median"] <= figure["p95"] <= figure["max"]


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(900)
def test_the_measurements_run() -> None:
    """Those that take little; what they measure on a busy machine is nobody's promise."""
    assert len(measured(*SMOKE)["figures"]) >= len(SMOKE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_said_of_a_jobs_time_is_what_its_ranks_wrote_down() -> None:
    """Slow data, evaluations and saves; stops of 3 and 8 s, which no notice tells of; a launcher that was killed."""
    figures = measured("time")["figures"]
    told = {figure["name"]: figure for figure in figures}
    assert len([name for name in told if name.endswith("worst bucket")]) == 3
    for name, figure in told.items():
        if name.endswith("in mid-run"):
            continue  # how late a look comes there depends on what else the machine does: the bench says it
        # Twice what the bench asks for: this machine has other work.
        assert figure["median"] <= 2 * figure["target"], (name, figure["note"])
