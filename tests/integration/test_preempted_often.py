"""One run, preempted again and again at random moments; `python -m tests.bench --only preemptions` does it 50 times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.release
def test_a_run_that_is_preempted_at_random_moments_loses_nothing() -> None:
    """Three signals: each stop is at one step and saved there, and losses and weights are the undisturbed run's."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--json", "--only", "preemptions"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    document = json.loads(done.stdout)
    assert document["failures"] == {}, done.stderr
    agreed, early, resumed = document["figures"]
    assert agreed["samples"] >= 1
    assert agreed["samples"] + early["samples"] <= 3
    assert "0 steps lost" in agreed["note"]
    assert resumed["samples"] >= 1
