"""The Accelerate adapter in one process, with the real Accelerate: counting, saving, loading, stopping."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from adapter_frameworks import require

from .harness import PROJECT, SCRIPTS

pytestmark = pytest.mark.slow
SCENARIOS = {
    "real_steps": "a step is one of the optimizer, whatever the micro-batches",
    "resumed_by_indices": "a resume goes on at the next sample of a shuffled epoch, to the same bits",
    "resumed_by_seed": "the same with Accelerate's own sampler",
    "resumed_by_loader": "the same with a loader that remembers its place",
    "own_saves": "the script's own numbered directories are whole and counted on",
    "old_runs": "runs that were begun without us load, and the other way round",
    "failed_saves": "a failed save leaves what was there; a half written one is refused",
    "stopped": "a stop saves there, and is resumed there",
    "tracked": "what is logged is in the journal",
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_it_holds(scenario: str, tmp_path: Path) -> None:
    """See `SCENARIOS`; the assertions are in the script."""
    require("accelerate")
    if scenario == "resumed_by_loader":
        require("torchdata")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENCE_", "ACCELERATE_"))}
    env |= {"PYTHONPATH": str(PROJECT), "RESILIENCE_RUN_DIR": "run", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "accelerate_alone.py"), scenario],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert "held" in done.stdout
