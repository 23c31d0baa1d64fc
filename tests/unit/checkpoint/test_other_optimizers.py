"""An optimizer that trains what is in the state and is not in it is said, and no save waits for the one that is."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.other_optimizers import OtherOptimizers
from resilience_sdk.checkpoint.ranks import Alone
from resilience_sdk.checkpoint.window import AccumulationWindow
from resilience_sdk.core import console, resume_limits

NAME = "optimizer beside the state: AdamW"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """As a new process."""
    monkeypatch.setattr(console, "_said", set())
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())


def said():
    return [limit.key for limit in resume_limits.limits()]


class Wrapper(torch.optim.Optimizer):
    """Steps by one that it holds."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = [{"of": inner}]

    def step(self, closure=None):
        return self.inner[0]["of"].step(closure)


def train(tmp_path, kind, steps=8):
    """Train by one optimizer, then in another way; return the steps that were saved, every second one being due."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    first = torch.optim.SGD(model.parameters(), 0.1)
    second = torch.optim.AdamW((other if kind == "of something else" else model).parameters(), 0.1)
    state = {"model": model, "optimizer": first}
    if kind == "in the state":
        state["second"] = second
    if kind == "by its scheduler":
        state["scheduler"] = torch.optim.lr_scheduler.StepLR(second, 3)
    if kind == "around one":
        first = Wrapper(first)
        first.inner_one, first.state[model.weight]["own"] = state["optimizer"], 1
    if kind == "in a wrapper":
        state["optimizer"] = first = Wrapper(second)
    saver = Checkpointer(state, run_dir=tmp_path, every=2)
    saver.resume()
    saved = []
    for step in range(steps):
        if kind == "made in each step":
            second = torch.optim.AdamW(model.parameters(), 0.1)
        late = step >= steps // 2 and kind not in ("in a wrapper", "around one")
        if kind == "of something else":
            other(torch.ones(1, 2)).sum().backward()
            second.step()
        stepping = second if late and kind != "of something else" else first
        stepping.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        stepping.step()
        if saver.maybe_save(step + 1):
            saved.append(step + 1)
    return saved


@pytest.mark.parametrize(
    "kind", ["new", "in the state", "in a wrapper", "by its scheduler", "of something else", "made in each step"]
)
def test_an_optimizer_that_is_not_in_the_state_is_said_and_saves_go_on(tmp_path, kind):
    """They waited for the end of a window of the one that steps no more. What is lost of nothing is not said."""
    assert train(tmp_path, kind) == [2, 4, 6, 8]
    assert said() == ([NAME] if kind in ("new", "of something else", "by its scheduler") else [])


def test_a_window_of_one_that_is_saved_stays_open_beside_another(tmp_path):
    """As of one that trains something else in each step."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.AdamW(other.parameters(), 0.1)
    saver, saved = Checkpointer({"model": model, "optimizer": optimizer}, run_dir=tmp_path, every=2), []
    saver.resume()
    for step in range(1, 8):
        (model(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
        second.step()
        if step % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if saver.maybe_save(step):
            saved.append(step)
    assert saved == [3, 6]


def test_it_is_said_at_the_resume_from_such_a_save(tmp_path, capsys, monkeypatch):
    """Before a step is made."""
    train(tmp_path, "new")
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    model = nn.Linear(2, 1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    assert Checkpointer(state, run_dir=tmp_path).resume() == 8
    assert "this resume does not repeat what the optimizer AdamW holds" in capsys.readouterr().err


def test_what_is_updated_by_hand_is_waited_for_no_longer_than_some_windows(capsys):
    """Until an optimizer steps again."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    window, waited = AccumulationWindow.of({"a": optimizer}), []
    for step in range(1, 80):
        model(torch.ones(1, 2)).sum().backward()
        if step <= 2 or step == 70:
            optimizer.step()
        window.at_boundary(step)
        if window.waits(Alone(), None, 0.0):
            waited.append(step)
    assert waited == [*range(3, 35), *range(71, 80)]
    assert "a save has waited for 33 steps for the next step of an optimizer in the state" in capsys.readouterr().err


def test_nothing_is_kept_alive(tmp_path):
    """Neither the checkpointer by the hook, which is torch's own and global, nor a copy of its state."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    saver = Checkpointer({"model": model, "optimizer": optimizer}, run_dir=tmp_path)
    saver.resume()
    others = weakref.ref(saver._others)
    copy.deepcopy(optimizer).step()
    del saver
    gc.collect()
    assert others() is None
    optimizer.step()


def test_one_that_cannot_be_looked_at_is_said_and_steps(capsys):
    """What is saved may be of anybody's kind, and refuse to be read."""

    def refuses():
        raise RuntimeError("not now")

    others = OtherOptimizers(refuses)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    said = capsys.readouterr().err
    assert said.count("whether the optimizer Adam is saved is not known") == 1
    assert "not now" in said
    assert others.names == []
