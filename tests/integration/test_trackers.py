"""The real trackers: curves of a run that was killed and resumed go on where they were."""

from __future__ import annotations

import json

import needed
import pytest
from harness import job

needed.library("wandb", "wandb")
accumulators = needed.library("tensorboard.backend.event_processing.event_accumulator", "tensorboard")


@pytest.mark.slow
def test_the_curves_of_a_killed_run_go_on(tmp_path):
    """W&B gets the same run id (offline: it sends nothing), TensorBoard one curve without what was lost."""
    options = ("--nproc-per-node", "1", "--max-restarts", "1")
    with job(tmp_path, *options, "tracked.py", env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"}) as run:
        assert run.finish() == 0, run.screen
        first, second = (json.loads(path.read_text()) for path in run.told("begins-*"))
        assert (first["step"], second["step"]) == (0, 3)
        assert second["id"] == first["id"]
        assert len(list((run.folder / "told/wandb").glob(f"offline-run-*-{first['id']}"))) == 2
        curves = accumulators.EventAccumulator(str(run.run_dir / "tensorboard"))
        curves.Reload()
        assert [(event.step, event.value) for event in curves.Scalars("weight")] == [(n, n + 1.0) for n in range(8)]
