"""A save or a stop in the midst of what a loop makes of one batch: it waits for the next batch, else work is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from resilience_sdk.adapters import _batch_work, pytorch
from resilience_sdk.adapters._batch_work import BatchWork, Turns
from resilience_sdk.core import resume_limits
from resilience_sdk.errors import Preempted

from .plain_loop import train_step


class Gan:
    """A generator, which is attached, and a discriminator; each call trains one of them."""

    def __init__(self, model, optimizer):
        self.generator, self.optimizer = model, optimizer
        self.discriminator = nn.Linear(1, 1)
        self.its_optimizer = torch.optim.SGD(self.discriminator.parameters(), 0.1)
        self.did = []

    def train_generator(self, batch):
        self.did.append("g")
        train_step(nn.Sequential(self.generator, self.discriminator), self.optimizer, batch)

    def train_discriminator(self, batch):
        self.did.append("d")
        self.discriminator(self.generator(batch).detach()).sum().backward()
        self.its_optimizer.step()
        self.its_optimizer.zero_grad()


@pytest.fixture
def gan(model, optimizer):
    return Gan(model, optimizer)


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    return lambda: [limit.key for limit in resume_limits.limits()]


PATTERNS = {"generator first": "gd", "discriminator first": "dg", "several times": "gddd", "around": "dgd"}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_stop_comes_where_all_have_trained_on_the_batch(recording, asked, gan, loader, noted, pattern):
    """Though the attached generator is called again, with gradients, behind its own step."""
    asked.add(3)
    handle = pytorch.attach(gan.generator, gan.optimizer, loader)
    with pytest.raises(Preempted):
        for (batch,) in loader:
            for turn in pattern:
                gan.train_generator(batch) if turn == "g" else gan.train_discriminator(batch)
    assert "".join(gan.did) == 3 * pattern
    assert handle.step == 3
    assert noted() == []


@pytest.mark.parametrize(("pattern", "is_behind"), [("gd", True), ("dg", False), ("g", False), ("ggg", False)])
def test_a_loss_behind_the_step_is_none_of_the_next_one_of_a_resume(
    recording, asked, gan, loader, monkeypatch, pattern, is_behind
):
    """What a resume repeats has no such part in its first step, and is not said to differ by it."""
    monkeypatch.setattr(pytorch.numerics, "is_on", lambda: True)
    told = []
    with pytorch.attach(gan.generator, gan.optimizer, loader, first_step=0) as handle:
        handle.proof = SimpleNamespace(step=int, losses_begin_behind=lambda: told.append(handle.step))
        for (batch,) in loader:
            for turn in pattern:
                gan.train_generator(batch) if turn == "g" else gan.train_discriminator(batch)
    assert bool(told) is is_behind


def test_a_stop_comes_behind_all_steps_of_a_batch(recording, asked, model, optimizer, loader, noted):
    """Several are made of it, as in PPO; on the way no step of the next batch is."""
    asked.add(5)
    handle = pytorch.attach(model, optimizer, loader)
    with pytest.raises(Preempted):
        for (batch,) in loader:
            for _ in range(3):
                train_step(model, optimizer, batch)
    assert handle.step == 6
    assert noted() == []


@pytest.mark.parametrize("left_s", [None, 0.0], ids=["time", "no time"])
def test_a_stop_without_time_or_an_end_comes_within_the_batch_and_is_said(
    recording, asked, model, optimizer, loader, noted, monkeypatch, left_s
):
    """A loop that has left its loader asks for no batch any more."""
    monkeypatch.setattr(pytorch.preemption, "time_left", lambda: left_s)
    asked.add(2)
    handle = pytorch.attach(model, optimizer, loader)
    batch = next(iter(loader))[0]
    with pytest.raises(Preempted):
        for _ in range(200):
            train_step(model, optimizer, batch)
    assert handle.step == (2 if left_s == 0.0 else _batch_work.FIRST + 1)
    assert noted() == ["within a batch"]


def test_a_loop_whose_batches_are_not_seen_does_not_wait(recording, asked, model, optimizer, loader, noted):
    """They come from elsewhere, though a loader is attached."""
    asked.add(2)
    handle = pytorch.attach(model, optimizer, loader)
    with pytest.raises(Preempted):
        for _ in range(9):
            train_step(model, optimizer, torch.randn(2, 4))
    assert handle.step == 2
    assert noted() == []


def test_a_batch_that_another_thread_asks_for_is_none_of_the_loop(recording, asked, model, optimizer, loader):
    """Nothing is raised or saved in a thread that reads ahead."""
    import threading

    asked.add(1)
    handle = pytorch.attach(model, optimizer, loader)
    batches, got = iter(loader), []
    train_step(model, optimizer, next(batches)[0])
    ahead = threading.Thread(target=lambda: got.append(next(batches)))
    ahead.start()
    ahead.join()
    assert len(got) == 1
    with pytest.raises(Preempted):
        next(batches)
    assert handle.step == 1


@pytest.mark.parametrize("pattern", ["gd", "dg", "gdd", "dgd", "gggd"])
def test_turns_are_through_where_the_others_have_stepped_as_they_do(pattern):
    """Without a batch that is seen. From the second turn on; an optimizer that never steps is not waited for."""
    made = {name: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for name in "gdx"}
    turns = Turns(made["g"], [made["d"], made["x"]])
    behind = len(pattern) - 1 - pattern.rindex("g") if pattern.count("g") == 1 else 0
    for number in range(4):
        for place, name in enumerate(pattern):
            made[name].step()
            left = len(pattern) - 1 - place
            if name == "g" and number > 1 and pattern.count("g") == 1:
                assert turns.are_open() is (behind > 0)
            if number > 1 and not left:
                assert not turns.are_open()
                turns.held = 0
    turns.leave()


def test_turns_that_change_do_not_hold_for_ever():
    """The other one is trained no more."""
    own, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1) for _ in range(2))
    turns = Turns(own, [other])
    for _ in range(3):
        own.step()
        other.step()
    answers = []
    for _ in range(4):
        own.step()
        answers.append(turns.are_open())
    assert answers[-1] is False


def test_a_loop_without_others_has_no_turns():
    """Nothing is to be waited for where no batch was seen."""
    assert not BatchWork().waits(3, save_s=0.0, left_s=None)
