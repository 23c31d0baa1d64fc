from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.ranks import Alone
from resilience_sdk.checkpoint.window import MAX_HELD_STEPS, AccumulationWindow
from resilience_sdk.core import resume_limits


class TwoRanks(Alone):
    """What another rank answers beside this one."""

    def __init__(self, other):
        self.other = other

    def gather(self, message):
        return [message, self.other]


def made(count=1):
    """Return models and their optimizers, and the window of these."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(count)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    return models, optimizers, AccumulationWindow.of(dict(zip("abc", optimizers, strict=False)))


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def test_there_is_none_without_an_optimizer():
    """Nothing is asked of a state that has none."""
    assert AccumulationWindow.of({"model": nn.Linear(1, 1)}) is None


@pytest.mark.parametrize("cleared", ["to none", "to zero", "at the start"])
def test_a_window_is_open_between_two_optimizer_steps(cleared):
    """However gradients are cleared: in front of the next backward, or behind the step."""
    (model,), (optimizer,), window = made()
    opened = []
    for step in range(6):
        if cleared == "at the start" and step % 3 == 0:
            optimizer.zero_grad()
        backward(model)
        if step % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if cleared != "at the start":
                optimizer.zero_grad(set_to_none=cleared == "to none")
        window.at_boundary(step + 1)
        opened.append(window.is_open())
    assert opened == [True, True, False] * 2


def test_a_loop_without_accumulation_has_none():
    """Also where steps of an environment lie between two backwards, or a scaler leaves out a step and clears."""
    (model,), (optimizer,), window = made()
    for step in range(6):
        if step % 2:
            optimizer.zero_grad()
            backward(model)
            if step != 3:
                optimizer.step()
            else:
                optimizer.zero_grad()
        window.at_boundary(step + 1)
        assert not window.is_open(), step


def test_gradients_that_one_network_leaves_in_another_are_no_window():
    """Of two that train in turns each is cleared before its own step."""
    (first, second), (one, two), window = made(2)
    for step in range(4):
        for model, optimizer in ((first, one), (second, two)):
            optimizer.zero_grad()
            (backward(first), backward(second)) if model is second else backward(first)
            optimizer.step()
        window.at_boundary(step + 1)
        assert not window.is_open()


def test_a_save_is_held_until_all_ranks_are_behind_their_windows():
    """Alike on all of them, and no longer than the time that is left allows, nor for ever."""
    (model,), (optimizer,), window = made()
    window.at_boundary(1)
    assert not window.waits(Alone(), None, 0.0)
    assert window.waits(TwoRanks([True, True]), None, 0.0)
    assert window.is_held
    assert not window.waits(TwoRanks([True, False]), None, 0.0)
    assert not window.is_held
    backward(model)
    window.at_boundary(2)
    assert window.waits(Alone(), 100.0, 0.0)
    assert not window.waits(Alone(), 1.0, 2.0)
    for step in range(3, 3 + MAX_HELD_STEPS):
        window.at_boundary(step)
        assert window.waits(Alone(), None, 0.0)
    window.at_boundary(step + 1)
    assert not window.waits(Alone(), None, 0.0)
    optimizer.step()
    window.at_boundary(step + 2)
    assert not window.is_open()


@pytest.mark.parametrize("is_open", [True, False])
def test_what_a_save_of_ones_own_loses_is_said(tmp_path, is_open):
    """At the save and at the resume; one behind an optimizer step has lost nothing."""
    (model,), (optimizer,), _ = made()
    saver = Checkpointer({"model": model, "optimizer": optimizer}, run_dir=tmp_path, every=2)
    assert saver.resume() == 0
    for step in (1, 2, 3):
        backward(model)
        if step == 3:
            optimizer.step()
            optimizer.zero_grad()
        assert saver.maybe_save(step) == (step == 3)  # due behind 2, where the window is open
    if is_open:
        backward(model)
    saver.save(4)
    document = json.loads((tmp_path / "checkpoints/step-00000004/rank-00000.json").read_text())
    assert document.get("open_window", False) == is_open
    if is_open:
        assert any(limit.key == "accumulation window" for limit in resume_limits.limits())


def test_gradients_from_before_the_window_was_watched_are_none_of_it():
    """A checkpointer that comes later saves at once; backward that adds to them opens it."""
    (model,), (optimizer,), _ = made()
    backward(model)
    window = AccumulationWindow.of({"a": optimizer})
    window.at_boundary(1)
    assert not window.is_open()
    backward(model)
    window.at_boundary(2)
    assert window.is_open()


class Bare(torch.optim.Optimizer):
    """Its base was never made, as that of some wrappers."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups


def test_an_optimizer_without_hooks_ends_no_training():
    """Its windows are not known."""
    (model,), (optimizer,), _ = made()
    window = AccumulationWindow.of({"a": Bare(optimizer)})
    backward(model)
    window.at_boundary(1)
    assert not window.is_open()
