"""An attach that fails half-way leaves accelerator, optimizer, model and loader as they were; it may be repeated."""

from __future__ import annotations

import types

import pytest
import torch
from adapter_frameworks import require
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters.accelerate import attaching
from resilience_sdk.adapters.accelerate.prepared import find_prepared


@pytest.fixture
def prepared():
    """What a real accelerator has prepared on a CPU, and the accelerator."""
    require("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = nn.Linear(1, 1)
    accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    )
    yield accelerator, find_prepared(accelerator, env={})
    accelerator.free_memory()
    accelerator.state._reset_state()
    accelerator.gradient_state._reset_state()


@pytest.mark.parametrize("step", ["Uneven", "OwnSaves", "listening", "connect"])
def test_nothing_is_left_of_it(prepared, recording, monkeypatch, step):
    """Whichever of its steps it is."""
    accelerator, found = prepared
    session = types.SimpleNamespace(may_resume=False, journal=None)
    own, kind = dict(vars(accelerator)), type(found.loader)

    def attach():
        return attaching.Attached(accelerator, found, session, saves=False, resumes=False)

    with monkeypatch.context() as patch:
        if step == "listening":
            patch.setattr(attaching.listening, "begin", lambda _: 1 / 0)
        else:
            patch.setattr(attaching, step, lambda *_: 1 / 0)
        if step == "Uneven":
            patch.setattr(type(accelerator), "num_processes", 2)
        with pytest.raises(ZeroDivisionError):
            attach()
    assert vars(accelerator) == own
    assert type(found.loader) is kind
    hooks = (found.model._forward_pre_hooks, found.model._forward_hooks)
    hooks += (found.optimizer._optimizer_step_pre_hooks, found.optimizer._optimizer_step_post_hooks)
    assert [dict(each) for each in hooks] == [{}] * 4
    attach().detach()


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_nothing_is_left_where_the_optimizer_refuses_a_hook(recording, hook):
    """In a loop of plain PyTorch, too."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    plain = getattr(optimizer, hook)

    def refuse(called):
        setattr(optimizer, hook, plain)
        raise ZeroDivisionError

    setattr(optimizer, hook, refuse)
    with pytest.raises(ZeroDivisionError):
        pytorch.attach(net, optimizer, loader)
    assert type(loader) is DataLoader
    hooks = (net._forward_pre_hooks, net._forward_hooks)
    hooks += (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert [dict(each) for each in hooks] == [{}] * 4
    pytorch.attach(net, optimizer, loader).detach()
