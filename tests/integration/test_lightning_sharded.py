"""Lightning's sharded strategies on two CPU ranks: each rank saves its own shards, and has them again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_frameworks import require
from harness import job

pytestmark = pytest.mark.slow
KILL = "kill:rank=1,step=12"


@pytest.mark.parametrize("way", ["fsdp", "fsdp2"])
def test_a_killed_rank_resumes_with_the_shards_that_were_saved(tmp_path, way):
    """`FSDPStrategy` and `ModelParallelStrategy`: weights and optimizer of both ranks, to the bit."""
    require("lightning.pytorch", "lightning")
    require("torchdata")
    with job(tmp_path, "--nproc-per-node=2", "lightning_sharded.py", way, env={"RESILIENCE_FAULT": KILL}) as run:
        assert run.finish() == 0, run.screen
        saved, resumed, end = (
            [json.loads(path.read_text()) for path in run.told(name)] for name in ("saved-0-*", "start-1-*", "end-*")
        )
        assert [each["step"] for each in resumed] == [10, 10]
        assert [each["digest"] for each in resumed] == [each["digest"] for each in saved]
        assert saved[0]["digest"] != saved[1]["digest"]
        assert [each["step"] for each in end] == [17, 17]
        parts = os.listdir(run.run_dir / "checkpoints" / "step-00000017" / "sharded")
        assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} <= set(parts)
