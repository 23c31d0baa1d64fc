"""Accelerate with ranks that have different numbers of batches: nothing is agreed before all are through."""

from __future__ import annotations

import json

import pytest
from adapter_frameworks import require

from .harness import job

pytestmark = pytest.mark.slow
COMMAND = ("--nproc-per-node", "2", "accelerate_uneven.py")
FOREVER = 10**6  # epochs, of 4 steps for one rank and 3 for the other


def test_a_stop_and_saves_wait_for_the_end_of_the_pass(tmp_path):
    """There all ranks have as many steps, save, leave, and go on from there to the end."""
    require("accelerate")
    with job(tmp_path, *COMMAND, str(FOREVER)) as run:
        assert run.finish(90.0) == 75, run.screen
    left = run.events("ckpt_commit")[-1]["step"]
    assert [event["step"] for event in run.events("ckpt_commit")] == list(range(4, left + 1, 4))
    assert not run.told("end-*")
    epochs = left // 4 + 2
    with job(tmp_path, *COMMAND, str(epochs)) as run:
        assert run.finish(90.0) == 0, run.screen
    first, other = (json.loads(path.read_text()) for path in run.told("end-*"))
    assert first == {"step": 4 * epochs, "epoch": epochs, "samples": 26 * epochs, "first": left, "taken": 4}
    assert (other["step"], other["epoch"], other["first"], other["taken"]) == (4 * epochs, epochs, left, 3)
    assert (run.run_dir / "finished").exists()
    assert [incident["kind"] for incident in run.incidents()] == ["preemption"]
    assert "different numbers" not in run.screen
