"""What is in a save, what is loaded, what weights are called and which processes are made: in real trainings."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resilience_sdk.rank.rehearsed_states import GENERATORS, OPTIMIZER, PLACE, SCHEDULER, kinds_of, names_of

ROOT = Path(__file__).parents[3]
MODEL = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
ADAM = torch.optim.Adam(MODEL.parameters())


@pytest.mark.parametrize(
    ("saved", "kinds"),
    [
        ({"model": MODEL.state_dict(), "epoch": 3}, []),
        ({"a": {"b": ADAM.state_dict()}}, [OPTIMIZER]),
        ([torch.optim.lr_scheduler.StepLR(ADAM, 2).state_dict()], [SCHEDULER]),
        (torch.get_rng_state(), [GENERATORS]),
        ({"python": random.getstate()}, [GENERATORS]),
        ({"numpy": np.random.get_state()}, [GENERATORS]),
        ({"_snapshot": {}, "_steps_since_snapshot": 1}, [PLACE]),
        (object(), []),
    ],
)
def test_the_kinds_of_what_is_saved(saved: Any, kinds: list[str]) -> None:
    """By their shape, wherever in it they are."""
    assert kinds_of(saved) == kinds


def test_weights_have_the_names_of_the_outermost_module() -> None:
    """Without what a wrapper puts before them; a weight of no module has none."""
    # Made here: a test runner may have frozen what was there before, which nobody can look through then.
    model, loose = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    assert names_of(optimizer) == ["0.weight", "0.bias", "1.weight", "1.bias", ""]
    wrapped = nn.Module()
    wrapped.module = model
    assert names_of(optimizer)[0] == "0.weight"
    assert names_of(torch.optim.SGD([loose], lr=0.1)) == []
    del wrapped


_WATCHED = """
import json, sys, time
from pathlib import Path
from resilience_sdk.rank import rehearsed_processes, rehearsed_states

rehearsed_processes._WAITS_S = 0.2
leave = lambda **facts: print(json.dumps(facts), flush=True)
rehearsed_processes.ProcessWatch(leave, int(sys.argv[2]), Path(sys.argv[3])).install()
rehearsed_states.watch_loads(lambda kind: leave(loaded=kind))
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader

def work(*args):
    pass

def main(way):
    if way in ("imports", "makes"):
        from accelerate import Accelerator
        rehearsed_states.watch_frameworks(lambda name: leave(made=name))
        accelerator = Accelerator(cpu=True) if way == "makes" else None
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if way == "group":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if way == "spawn":
        mp.spawn(work, nprocs=1)
    if way == "process":
        for rank in range(2):
            child = mp.get_context("fork").Process(target=work, args=(rank, 2))
            child.start()
            child.join()
    if way == "loads":
        optimizer.load_state_dict(optimizer.state_dict())
        scheduler.load_state_dict(scheduler.state_dict())
        torch.set_rng_state(torch.get_rng_state())
    for batch in DataLoader(torch.arange(4.0), num_workers=1):
        (weight * batch).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("way", "size", "facts"),
    [
        ("alone", 2, [{"alone": True}]),
        ("group", 2, [{"group": 1}]),
        ("spawn", 2, [{"started": "torch.multiprocessing.spawn", "is_rank": True}, {"alone": True}]),
        ("process", 1, [{"started": "work", "is_rank": True}, {"started": "work", "is_rank": True}, {"alone": True}]),
        ("imports", 1, [{"alone": True}]),
        ("makes", 1, [{"made": "accelerate"}, {"alone": True}]),
        ("loads", 1, [{"loaded": "optimizer"}, {"loaded": "scheduler"}, {"loaded": "generators"}, {"alone": True}]),
    ],
)
def test_what_a_rank_sees_of_itself(tmp_path: Path, way: str, size: int, facts: list[dict[str, Any]]) -> None:
    """Once, and not by the workers of a loader; only one of several says that enough is seen, and waits."""
    if way in ("imports", "makes"):
        pytest.importorskip("accelerate")
    script, flag = tmp_path / "watched.py", tmp_path / "flag"
    script.write_text(_WATCHED)
    done = subprocess.run(
        [sys.executable, str(script), way, str(size), str(flag)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == facts
    assert flag.exists() == (size > 1 and way != "group")
