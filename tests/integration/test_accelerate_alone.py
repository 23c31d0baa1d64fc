"""The Accelerate adapter in one process, with the real Accelerate: counting, saving, loading, stopping."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_frameworks import require
from to_the_end import output_of

from .harness import SCRIPTS

pytestmark = pytest.mark.slow
TOGETHER = (
    "real_steps",  # a step is one of the optimizer, whatever the micro-batches
    "one_step",  # is saved at the end
    "scaled",  # also where a scaler skips some
    "own_saves",  # the script's own numbered directories are whole and counted on
    "old_runs",  # runs that were begun without us load, and the other way round
    "failed_saves",  # a failed save leaves what was there; a half written one is refused
    "tracked",  # what is logged is in the journal
    "stopped",  # a stop saves there, and is resumed there
)


def run(folder: Path, *scenarios: str) -> None:
    """Run scenarios, whose assertions are in the script, in one process and one run directory."""
    require("accelerate")
    script = SCRIPTS / "accelerate_alone.py"
    output = output_of(folder, script, *scenarios, without=("ACCELERATE_",), RESILIENCE_RUN_DIR="run")
    assert [line for line in output.splitlines() if line.endswith(" held")] == [f"{each} held" for each in scenarios]


def test_what_it_counts_and_what_the_script_saves(tmp_path: Path) -> None:
    """See `TOGETHER`."""
    run(tmp_path, *TOGETHER)


@pytest.mark.parametrize("sampler", ["indices", "seed", "loader"])
def test_a_resume_goes_on_at_the_next_sample(tmp_path: Path, sampler: str) -> None:
    """Of a shuffled epoch, to the same bits: with a plain sampler, Accelerate's own, and a loader with a memory."""
    if sampler == "loader":
        require("torchdata")
    run(tmp_path, f"resumed_by_{sampler}")


@pytest.mark.parametrize("way", ["generator_first", "generator_first_without_batches"])
def test_a_save_waits_for_all_that_train_on_a_batch(tmp_path: Path, way: str) -> None:
    """To the same bits, with several optimizers in turns."""
    run(tmp_path, way)
