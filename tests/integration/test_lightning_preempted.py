"""A Lightning training on two gloo ranks is asked to leave: by a signal to one rank, to the other, to both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from adapter_frameworks import require

from tests.integration.lightning_runs import TARGETS, leave, run_to

pytestmark = pytest.mark.slow
ROUNDS = 3


@pytest.fixture(autouse=True)
def frameworks():
    """What all of these need."""
    require("lightning.pytorch", "lightning")
    require("torchdata")


def test_signals_to_any_rank_stop_all_behind_one_step_and_the_resume_is_bit_equal(tmp_path):
    """Each ends with 75, saved, and the next start goes on at the very step; the end is that of a run undisturbed."""
    asked, undisturbed = tmp_path / "asked", tmp_path / "undisturbed"
    asked.mkdir()
    undisturbed.mkdir()
    at = 0
    for ranks in TARGETS * ROUNDS:
        left = leave(asked, ranks)
        assert (left.code, left.began) == (75, at), left.screen
        assert left.stopped[0] == left.stopped[1], left.screen
        at = left.stopped[0]
        assert f"step-{at:08d}" in os.listdir(asked / "run" / "checkpoints"), left.screen
    assert run_to(asked, at + 10) == run_to(undisturbed, at + 10)


def test_under_torchrun_a_signal_to_one_rank_stops_both(tmp_path):
    """The launcher's own exit code tells less; what stands in the run directory tells all."""
    left = leave(tmp_path, (1,), (sys.executable, "-m", "torch.distributed.run", "--standalone"))
    assert left.code not in (None, 0)
    assert left.stopped[0] == left.stopped[1], left.screen
    assert f"step-{left.stopped[0]:08d}" in os.listdir(tmp_path / "run" / "checkpoints"), left.screen
    assert not (tmp_path / "run" / "finished").exists()


def test_ranks_that_lightning_starts_itself_are_one_job(tmp_path):
    """`python train.py` with two devices: rank 0 starts the other one, and the exit code is ours."""
    left = leave(tmp_path, (1,), (sys.executable,), options=(), DEVICES="2")
    assert left.code == 75, left.screen
    assert left.stopped[0] == left.stopped[1], left.screen
    assert f"step-{left.stopped[0]:08d}" in os.listdir(tmp_path / "run" / "checkpoints"), left.screen
    again = leave(tmp_path, (0, 1), (sys.executable,), options=(), DEVICES="2")
    assert (again.code, again.began) == (75, left.stopped[0]), again.screen
