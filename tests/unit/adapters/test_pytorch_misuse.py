"""`adapters.pytorch.attach` used wrongly, switched off, copied, and with hooks that fail."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resilience_sdk import preemption, straggler
from resilience_sdk.adapters import _base, pytorch
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler.passes import ModelPasses

from .plain_loop import counts, train, train_step


class Telling(pytorch.Attached):
    """Has something due behind every step, or so many steps later, and notes each time."""

    every = 0

    def __init__(self, *args):
        self.told = []
        super().__init__(*args)

    def between_steps(self, is_leaving):
        self.told.append((self.step, is_leaving))
        return self.step + self.every


def test_switched_off_steps_are_counted_and_nothing_else(monkeypatch, asked, model, optimizer, loader):
    """A loop that ends by them must end. A second use is an error here too: found before the SDK is switched on."""
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    before = lookup.starter()
    lookup.disable()
    try:
        handle = pytorch.attach(model, optimizer, loader, first_step=3)
        with pytest.raises(ConfigError, match=r"detach\(\)"):
            pytorch.attach(model, optimizer)
        train(model, optimizer, loader)
        handle.detach()
    finally:
        lookup.set_starter(before)
        lookup.forget()
    assert (handle.step, asked.checks) == (9, [])
    assert type(loader) is DataLoader
    assert len(optimizer._optimizer_step_post_hooks) == 0


def test_a_model_that_is_gone_is_no_first_use(recording, asked, optimizer):
    """A notebook's cell that is run again makes a new model."""
    for _ in range(2):
        model = nn.Linear(4, 4)
        model.myself = [model]  # a cycle, which only the collector finds
        pytorch.attach(model, torch.optim.SGD(model.parameters(), 0.1))
        del model
    gc.collect()


class Bare(torch.optim.Optimizer):
    """As torch's PostLocalSGDOptimizer: its base was never made."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups


NET, OTHER = nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], 0.1)


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "message"),
    [
        (NET, None, {}, "torch.optim.Optimizer"),
        (NET, object(), {}, "torch.optim.Optimizer"),
        (NET, Bare(OTHER), {}, "of a wrapper pass the one inside"),
        (print, OTHER, {}, "torch.nn.Module"),
        (NET, OTHER, {"first_step": -1}, "first_step=-1"),
        (NET, OTHER, {"first_step": True}, "first_step=True"),
        (NET, OTHER, {"loader": [1, 2]}, "loader"),
    ],
)
def test_wrong_arguments_are_said(recording, asked, model, optimizer, options, message):
    """And nothing stays attached."""
    with pytest.raises(ConfigError, match=message):
        pytorch.attach(model, optimizer, **options)
    assert _base._current is None
    assert not getattr(optimizer, "_optimizer_step_pre_hooks", None)


def test_an_optimizer_of_other_parameters_is_said(recording, asked, model, capfd):
    """Made before fully_shard(), it trains nothing. It may hold copies of its own, so it is no error."""
    pytorch.attach(model, torch.optim.SGD([torch.zeros(1)], 0.1))
    assert "none of the model's parameters" in capfd.readouterr().err


def test_copies_of_model_and_optimizer_record_nothing(recording, asked, model, optimizer):
    """An average of the weights, a snapshot to evaluate: they are not what is trained here."""
    handle = pytorch.attach(model, optimizer)
    other, stepped = copy.deepcopy((model, optimizer))
    train_step(other, stepped, torch.randn(2, 4))
    assert handle.step == recording.snapshot().beats == 0


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_nothing_is_left_where_the_optimizer_refuses_a_hook(recording, asked, model, optimizer, loader, hook):
    """Model, optimizer and loader are as they were, and the next attach finds no other one."""
    plain = getattr(optimizer, hook)

    def refuse(called):
        setattr(optimizer, hook, plain)
        raise ZeroDivisionError

    setattr(optimizer, hook, refuse)
    with pytest.raises(ZeroDivisionError):
        pytorch.attach(model, optimizer, loader)
    assert type(loader) is DataLoader
    hooks = (model._forward_pre_hooks, model._forward_hooks)
    hooks += (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert [dict(each) for each in hooks] == [{}] * 4
    pytorch.attach(model, optimizer, loader).detach()


@pytest.mark.parametrize("part", ["forward_begins", "gradient_comes", "step_begins", "step_ends"])
def test_steps_are_beats_also_without_the_hooks_of_the_sections(
    recording, asked, model, optimizer, loader, monkeypatch, capfd, part
):
    """A section that fails switches sections off and nothing else, wherever in a step that is."""
    monkeypatch.setattr(ModelPasses, part, lambda *_, **__: 1 / 0)
    handle = Telling(model, optimizer, loader, 0)
    train(model, optimizer, loader)
    assert handle.step == recording.snapshot().beats == 6
    assert counts(recording)["step"] == 6
    assert asked.checks == [1, 2, 3, 4, 5, 6]
    assert len(handle.told) == 6
    assert capfd.readouterr().err.count("switched off") == 1
    handle.detach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_steps_are_beats_also_where_the_attached_model_is_gone(recording, asked, optimizer, model, loader):
    """What was attached may have been a wrapper, such as DDP, of the model that is trained on."""
    with pytorch.attach(nn.Sequential(model), optimizer, loader) as handle:
        gc.collect()
        train(model, optimizer, loader)
        assert handle.step == recording.snapshot().beats == 6


def test_steps_are_beats_also_where_the_sections_are_attached_anew(recording, asked, model, optimizer, loader):
    """As for the times of kernels: the new hooks are the script's, and know nothing of the adapter."""
    with pytorch.attach(model, optimizer, loader) as handle:
        straggler.attach(model, optimizer)
        train(model, optimizer, loader)
        assert handle.step == recording.snapshot().beats == 6
    assert asked.checks == [1, 2, 3, 4, 5, 6]


def test_a_forward_before_run_steps_makes_no_check_of_its_own(asked, recording, model, optimizer, monkeypatch):
    """Ranks that warm up and others would check differently often, and stop at different steps."""
    with pytorch.attach(model, optimizer):
        model(torch.randn(2, 4)).sum().backward()
        monkeypatch.setattr(pytorch, "is_stepping", lambda: True)
        train_step(model, optimizer, torch.randn(2, 4))
    assert asked.checks == []


# -- what an adapter has to do between two steps


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_hook_that_fails_stops_neither_the_loop_nor_what_comes_between_steps(
    recording, asked, model, optimizer, loader, monkeypatch, capfd, is_watched
):
    """Loops end by the number of steps, and other ranks, whose hooks are well, would wait in what is collective."""
    monkeypatch.setattr(preemption, "check", lambda step=None: 1 / 0)
    handle = Telling(model, optimizer, loader if is_watched else None, 0)
    train(model, optimizer, loader)
    assert handle.step == 6
    assert handle.told == [(step, False) for step in range(1, 7 if is_watched else 6)]
    assert capfd.readouterr().err.count("switched off") == 1
    assert recording.stack() == []


def test_what_is_due_between_steps_says_when_it_is_due_again(recording, asked, model, optimizer, loader):
    """It is asked behind those steps, when the job is to leave, and behind the first one of another state."""
    asked.add(16)
    handle = Telling(model, optimizer, loader, 0)
    handle.every = 3
    train(model, optimizer, loader)
    assert handle.told == [(1, False), (4, False)]
    handle.go_to(10)
    with pytest.raises(Preempted):
        train(model, optimizer, loader)
    assert handle.told[2:] == [(11, False), (14, False), (16, True)]


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_step_that_a_load_makes_does_nothing_that_is_due(recording, asked, model, optimizer, is_leaving):
    """Some optimizers make one when half of the state is loaded: what is due is due behind the load."""
    if is_leaving:
        asked.add(1)
    handle = Telling(model, optimizer, None, 0)
    for told in ([], [(1, is_leaving)]):
        with handle.paused():
            optimizer.step()
            optimizer.step()
        assert (handle.step, handle.told) == (len(told), [])
        if not told:
            train_step(model, optimizer, torch.randn(2, 4))
            continue
        with pytest.raises(Preempted) if is_leaving else contextlib.nullcontext():
            model(torch.randn(2, 4))
        assert handle.told == told


def test_a_state_loaded_while_ranks_are_apart_makes_nothing_due(recording, asked, model, optimizer):
    """Until they meet."""
    handle = Telling(model, optimizer, None, 0)
    with handle.apart():
        handle.go_to(7)
        for _ in range(2):
            train_step(model, optimizer, torch.randn(2, 4))
        assert handle.told == []
    handle.meet(9)
    assert handle.told == [(9, False)]
