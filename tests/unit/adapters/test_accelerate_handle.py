"""What the handle of an attached accelerator saves, with the real Accelerate, and what it is told of another rank."""

from __future__ import annotations

import types

import pytest
import torch
from adapter_frameworks import require
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters.accelerate import attaching
from resilience_sdk.adapters.accelerate.prepared import find_prepared
from resilience_sdk.journal import Journal
from resilience_sdk.run_directory import RunDirectory
from resilience_sdk.settings import load_settings


@pytest.fixture
def handle(tmp_path, recording):
    """An attach in a new run directory that has no name, and saves every 50 steps; it has not ended."""
    require("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = nn.Linear(1, 1)
    accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    )
    run_dir = RunDirectory.create(tmp_path / "run")
    session = types.SimpleNamespace(
        may_resume=False,
        run_dir=run_dir,
        settings=load_settings(arguments={"checkpoint_every": 50}, env={}, strict_env=False),
        journal=Journal(run_dir.journal, writer="rank0", host="h", boot_id="b", job="j", attempt=0),
    )
    handle = attaching.Attached(accelerator, find_prepared(accelerator, env={}), session, saves=True, resumes=True)
    handle.saved = lambda: sorted(int(path.name.split("-")[1]) for path in run_dir.checkpoints.glob("step-*"))
    yield handle
    handle.detach()
    accelerator.free_memory()
    accelerator.state._reset_state()
    accelerator.gradient_state._reset_state()


def test_a_first_pass_whose_end_is_the_first_question_is_saved(handle):
    """Nothing was resumed, and inside of a joined pass nothing is asked."""
    with handle._loop.apart():
        handle._loop.step = 137
    handle._loop.meet(lambda step: [step])
    assert handle.saved() == [137]


@pytest.mark.parametrize(
    ("own", "other", "saved"), [(7, 7, [7]), (0, 0, []), (0, 7, []), (7, 5, [])], ids=["all", "none", "one", "apart"]
)
def test_the_end_is_saved_where_all_ranks_have_come_to_it(handle, monkeypatch, capsys, own, other, saved):
    """One that has loaded an older state alone is elsewhere: what would be saved then is said, and not taken for it."""
    ended = []
    ranks = types.SimpleNamespace(gather=lambda mine: [mine, other])
    monkeypatch.setattr(attaching, "find_ranks", lambda: ranks)
    monkeypatch.setattr(attaching, "finish", lambda *_, is_complete: ended.append(is_complete))
    handle._loop.step = own
    handle.finish()
    assert (handle.saved(), ended) == (saved, [own == other])
    assert ("NOT SAVED" in capsys.readouterr().err) is (own != other)
