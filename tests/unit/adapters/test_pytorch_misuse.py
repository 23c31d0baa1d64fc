"""`adapters.pytorch.attach` used wrongly, switched off, copied, and with hooks that fail."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resilience_sdk import lanes, preemption, straggler
from resilience_sdk.adapters import pytorch
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.straggler.passes import Passes

from .plain_loop import counts, train, train_step


def tell_each(told):
    """What is due behind every step, and notes each time."""

    def between_steps(is_leaving):
        told.append(is_leaving)
        return 0

    return between_steps


def test_a_second_use_is_an_error(asked, model, optimizer):
    """Also with another model: two loops would beat at once."""
    pytorch.attach(model, optimizer)
    other = nn.Linear(2, 2)
    for second in ((model, optimizer), (other, torch.optim.SGD(other.parameters(), 0.1))):
        with pytest.raises(ConfigError, match=r"detach\(\)"):
            pytorch.attach(*second)


def test_switched_off_steps_are_counted_and_nothing_else(monkeypatch, asked, model, optimizer, loader):
    """A loop that ends by them must end. A second use is an error here too: found before the SDK is switched on."""
    monkeypatch.setenv("RESILIENCE_DISABLE", "1")
    before = lanes.starter()
    lanes.disable()
    try:
        handle = pytorch.attach(model, optimizer, loader, first_step=3)
        with pytest.raises(ConfigError, match=r"detach\(\)"):
            pytorch.attach(model, optimizer)
        train(model, optimizer, loader)
        handle.detach()
    finally:
        lanes.set_starter(before)
        lanes.forget()
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


@pytest.mark.parametrize(
    ("model", "optimizer", "options", "message"),
    [
        (nn.Linear(2, 2), None, {}, "torch.optim.Optimizer"),
        (nn.Linear(2, 2), object(), {}, "torch.optim.Optimizer"),
        (print, torch.optim.SGD([torch.zeros(1)], 0.1), {}, "torch.nn.Module"),
        (nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], 0.1), {"first_step": -1}, "first_step=-1"),
        (nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], 0.1), {"first_step": True}, "first_step=True"),
        (nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], 0.1), {"loader": [1, 2]}, "loader"),
    ],
)
def test_wrong_arguments_are_said(recording, asked, model, optimizer, options, message):
    """And nothing stays attached."""
    with pytest.raises(ConfigError, match=message):
        pytorch.attach(model, optimizer, **options)
    assert pytorch._current is None
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


def test_a_hook_that_fails_does_not_stop_the_loop(recording, asked, model, optimizer, loader, monkeypatch, capfd):
    """One line; steps are counted on, since loops end by them."""
    monkeypatch.setattr(preemption, "check", lambda step=None: 1 / 0)
    handle = pytorch.attach(model, optimizer, loader)
    train(model, optimizer, loader)
    assert handle.step == 6
    assert capfd.readouterr().err.count("switched off") == 1
    assert recording.stack() == []


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_comes_between_steps_comes_also_where_a_hook_has_failed(
    recording, asked, model, optimizer, loader, monkeypatch, is_watched
):
    """It may be collective: the other ranks, whose hooks are well, would wait in it for this one."""
    monkeypatch.setattr(preemption, "check", lambda step=None: 1 / 0)
    told = []
    watched = loader if is_watched else None
    handle = pytorch.watch(lambda: pytorch.Attached(model, optimizer, watched, 0, between_steps=tell_each(told)))
    train(model, optimizer, loader)
    assert handle.step == 6
    assert told == [False] * (6 if is_watched else 5)


def test_loading_a_state_comes_between_no_steps(recording, asked, model, optimizer):
    """Some optimizers make a step when their state is loaded."""
    told = []
    handle = pytorch.watch(lambda: pytorch.Attached(model, optimizer, None, 0, between_steps=tell_each(told)))
    with handle.paused():
        optimizer.step()
    model(torch.randn(2, 4))
    assert (handle.step, told) == (0, [])


@pytest.mark.parametrize("part", ["forward_begins", "gradient_comes", "step_begins", "step_ends"])
def test_steps_are_beats_also_without_the_hooks_of_the_sections(
    recording, asked, model, optimizer, loader, monkeypatch, capfd, part
):
    """A section that fails switches sections off and nothing else, wherever in a step that is."""
    monkeypatch.setattr(Passes, part, lambda *_, **__: 1 / 0)
    told = []
    handle = pytorch.watch(lambda: pytorch.Attached(model, optimizer, loader, 0, between_steps=tell_each(told)))
    train(model, optimizer, loader)
    assert handle.step == recording.snapshot().beats == 6
    assert counts(recording)["step"] == 6
    assert asked.checks == [1, 2, 3, 4, 5, 6]
    assert told == [False] * 6
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


def test_what_is_due_between_steps_says_when_it_is_due_again(recording, asked, model, optimizer, loader):
    """It is asked behind those steps, when the job is to leave, and behind the first one of another state."""
    told = []

    def between_steps(is_leaving):
        told.append((handle.step, is_leaving))
        return handle.step + 3

    asked.add(16)
    handle = pytorch.watch(lambda: pytorch.Attached(model, optimizer, loader, 0, between_steps=between_steps))
    train(model, optimizer, loader)
    assert told == [(1, False), (4, False)]
    handle.go_to(10)
    with pytest.raises(Preempted):
        train(model, optimizer, loader)
    assert told[2:] == [(11, False), (14, False), (16, True)]


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


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_step_that_a_load_makes_does_nothing_that_is_due(recording, asked, model, optimizer, is_leaving):
    """Half of the state is loaded: what is due is due behind the load."""
    told = []
    if is_leaving:
        asked.add(1)
    handle = pytorch.watch(lambda: pytorch.Attached(model, optimizer, None, 0, between_steps=tell_each(told)))
    train_step(model, optimizer, torch.randn(2, 4))
    with handle.paused():
        optimizer.step()
        optimizer.step()
    assert (handle.step, told) == (1, [])
    if is_leaving:
        with pytest.raises(Preempted):
            model(torch.randn(2, 4))
    else:
        model(torch.randn(2, 4))
    assert told == [is_leaving]


def test_a_state_loaded_while_ranks_are_apart_makes_nothing_due(recording, asked, model, optimizer):
    """Until they meet."""
    told = []
    handle = pytorch.watch(lambda: pytorch.Attached(model, optimizer, None, 0, between_steps=tell_each(told)))
    with handle.apart():
        handle.go_to(7)
        for _ in range(2):
            train_step(model, optimizer, torch.randn(2, 4))
        assert told == []
    handle.meet(lambda step: [step, step])
    assert (handle.step, told) == (9, [False])
