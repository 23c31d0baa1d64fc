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
OURS = {}
TORCHRUN = {"command": (sys.executable, "-m", "torch.distributed.run", "--standalone")}
PYTHON = {"command": (sys.executable,), "options": (), "DEVICES": "2"}  # Lightning starts rank 1 itself
CODES = (75, 1, 75)  # that of torchrun tells less


def test_signals_to_any_rank_stop_all_behind_one_step_and_the_resume_is_bit_equal(tmp_path):
    """Each once, each under another launcher; `python -m tests.bench --only lightning_signals` does it often.

    Each is saved, and the next start goes on at the very step; the end is that of a run undisturbed.
    """
    require("lightning.pytorch", "lightning")
    require("torchdata")
    asked, undisturbed = tmp_path / "asked", tmp_path / "undisturbed"
    asked.mkdir()
    undisturbed.mkdir()
    at = 0
    for started, code, ranks in zip((OURS, TORCHRUN, PYTHON), CODES, TARGETS, strict=True):
        left = leave(asked, ranks, **started)
        assert (left.code, left.began) == (code, at), left.screen
        assert left.stopped[0] == left.stopped[1], left.screen
        at = left.stopped[0]
        assert f"step-{at:08d}" in os.listdir(asked / "run" / "checkpoints"), left.screen
        assert not (asked / "run" / "finished").exists()
        kept = f"stopped; the newest checkpoint is after {at} steps; to resume: RESILIENCE_RUN_DIR="
        assert (kept in left.screen) == (started is not OURS)  # our launcher says more
    assert run_to(asked, at + 10) == run_to(undisturbed, at + 10)
