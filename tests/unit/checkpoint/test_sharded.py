from __future__ import annotations

import subprocess
import sys

import torch.distributed.checkpoint as dcp

from resilience_sdk.checkpoint.ranks import Alone
from resilience_sdk.checkpoint.sharded import _group


class Two(Alone):
    size = 2
    group = "a gloo group"


def test_one_rank_needs_nobody_where_torch_can_be_told_so():
    """Older versions have no such argument: they find out by themselves, and would fail with it."""

    def older(state_dict, *, process_group=None):
        raise AssertionError("only looked at")

    assert _group(Alone(), older) == {}
    assert _group(Alone(), dcp.save) == _group(Alone(), dcp.load) == {"no_dist": True}
    assert _group(Two(), older) == {"process_group": "a gloo group"}


WHOLE = """
import sys
import torch
from resilience_sdk.recorder import lookup
from resilience_sdk.checkpoint import Checkpointer

lookup.disable()
state = {"model": torch.nn.Linear(2, 2), "weight": torch.ones(3)}
for step, in_background in ((1, False), (2, True)):
    saver = Checkpointer(state, run_dir=f"{sys.argv[1]}/{in_background}", every=1, in_background=in_background)
    assert saver.resume() == 0
    assert saver.save(step) if step == 1 else saver.maybe_save(step)
    assert saver.wait(60)
    assert Checkpointer(state, run_dir=f"{sys.argv[1]}/{in_background}").resume() == step
print([name for name in ("torch.distributed.checkpoint", "torch.distributed.tensor") if name in sys.modules])
"""


def test_what_is_not_sharded_needs_no_dcp(tmp_path):
    """Its first import takes a second or more, of the thread that trains."""
    command = [sys.executable, "-W", "ignore", "-c", WHOLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


SPOILED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from resilience_sdk.checkpoint import Checkpointer

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
for in_background in (False, True):
    model = fully_shard(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    saver = Checkpointer(
        {"model": model}, run_dir=f"{sys.argv[1]}/{in_background}", every=1, in_background=in_background
    )
    assert saver.resume() == 0 and saver.maybe_save(1) and saver.wait(60)
    with torch.no_grad():
        model[0].weight.to_local()[2, 2] = float("nan")
    assert saver.maybe_save(2) and saver.wait(60)
    assert Checkpointer({"model": model}, run_dir=f"{sys.argv[1]}/{in_background}", read_only=True).resume() == 1
dist.destroy_process_group()
"""


def test_a_nan_in_a_part_of_a_rank_is_found(tmp_path):
    """Each rank looks at its part of FSDP2, while the training waits."""
    command = [sys.executable, "-W", "ignore", "-c", SPOILED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step-00000002 is in quarantine: it holds NaN in model.0.weight of rank 0" in done.stderr
