"""`resilience demo` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_keeps_every_promise(tmp_path: Path) -> None:
    """A hung, a killed and a preempted training end with the bits of the undisturbed one; the reports say what was."""
    done = subprocess.run(
        [sys.executable, "-m", "resilience_sdk", "demo", "--json", "--keep", str(tmp_path / "runs")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"], json.dumps(document, indent=1) + done.stderr
    assert done.returncode == 0
    assert [run["name"] for run in document["runs"]] == ["undisturbed", "hung", "killed", "preempted"]
    assert len({run["parameters_sha256"] for run in document["runs"]}) == 1
    assert [run["resumed_at_step"] for run in document["runs"][:3]] == [None, 25, 75]
    assert document["runs"][3]["resumed_at_step"] > 60
    assert document["runs"][3]["incidents"][0]["lost_steps"] == 0
