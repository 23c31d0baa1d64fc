"""Ranks with different numbers of batches: what is said, and what waits until all are through."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from resilience_sdk import preemption
from resilience_sdk.adapters import pytorch
from resilience_sdk.adapters.accelerate import uneven
from resilience_sdk.errors import Preempted


class Accelerator:
    """Joins, and notes when it does."""

    def __init__(self):
        self.told = []

    @contextmanager
    def join_uneven_inputs(self, joinables, even_batches=None):
        self.told.append((joinables, even_batches))
        yield
        self.told.append("waits for the other rank")


@pytest.fixture
def loop(monkeypatch):
    """A loop that is attached; `loop.due` has what it did between two steps, `loop.checks` the steps it checked at."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    due, checks = [], []
    monkeypatch.setattr(preemption, "check", lambda step: checks.append(step) or step == 7)

    def between_steps(is_leaving):
        due.append((loop.step, is_leaving))
        return loop.step

    loop = pytorch.Attached(model, optimizer, None, 0, between_steps=between_steps)

    def forward():
        model(torch.ones(1)).sum().backward()

    def take(steps):
        for _ in range(steps):
            forward()
            optimizer.step()

    loop.due, loop.checks, loop.forward, loop.take = due, checks, forward, take
    yield loop
    loop.detach()


@pytest.fixture
def ranks(monkeypatch):
    """Return what tells the numbers of two ranks, ours and `other`'s."""

    class Ranks:
        other = 0

        def gather(self, mine):
            return [mine, self.other]

    ranks = Ranks()
    monkeypatch.setattr(uneven, "find_ranks", lambda: ranks)
    return ranks


def test_what_is_due_waits_for_all_ranks(loop, ranks):
    """Nothing is agreed inside; at the end all have as many steps, and do it together."""
    accelerator = Accelerator()
    watching = uneven.Uneven(accelerator, loop, [1, 2])
    loop.take(2)
    ranks.other = 5
    with accelerator.join_uneven_inputs("model", even_batches=False):
        assert (loop.due, loop.checks) == ([(1, False), (2, False)], [1, 2])  # of what was before
        loop.take(2)
        assert (loop.step, loop.due[2:], loop.checks[2:]) == (4, [], [])
    assert accelerator.told == [("model", False), "waits for the other rank"]
    assert (loop.step, loop.due[2:], loop.checks[2:]) == (5, [(5, False)], [5])
    loop.take(1)
    assert loop.checks[3:] == [6]
    ranks.other = 7
    with pytest.raises(Preempted), accelerator.join_uneven_inputs("model"):
        pass
    assert (loop.due[3:], loop.checks[4:]) == ([(6, False), (7, True)], [7])
    watching.restore()
    assert "join_uneven_inputs" not in vars(accelerator)


@pytest.mark.parametrize("left_over", [0, 1])
def test_the_wait_for_the_other_ranks_is_long_and_has_an_end(loop, ranks, recording, left_over):
    """In a pause nobody would find that one hangs; nor is it a step's, when micro-batches are left that make none."""
    seen = []

    class Waiting(Accelerator):
        @contextmanager
        def join_uneven_inputs(self, joinables, even_batches=None):
            yield
            seen.append(recording.snapshot())

    accelerator = Waiting()
    uneven.Uneven(accelerator, loop, [1, 2])
    with accelerator.join_uneven_inputs("model"):
        loop.take(1)
        for _ in range(left_over):
            loop.forward()
    [snapshot] = seen
    [waiting] = snapshot.main_lane.stack
    assert (waiting.name, waiting.kind, waiting.timeout_s) == ("join_wait", "comm", 7200.0)
    assert snapshot.paused is None
    assert not recording.snapshot().main_lane.stack


def test_an_exception_meets_nobody(loop, ranks):
    """The other ranks may be elsewhere."""
    ranks.gather = lambda mine: [mine]
    accelerator = Accelerator()
    uneven.Uneven(accelerator, loop, [])
    ranks.gather = lambda _: pytest.fail("it meets the others")
    with pytest.raises(ZeroDivisionError), accelerator.join_uneven_inputs("model"):
        raise ZeroDivisionError
    loop.take(1)
    assert loop.checks == [1]


@pytest.mark.parametrize(("other", "is_said"), [(2, False), (3, True), (None, False)])
def test_a_pass_that_will_not_end_is_said(loop, ranks, capsys, other, is_said):
    """Unless the ranks are joined in it; an unknown number says nothing."""
    ranks.other = other
    accelerator = Accelerator()
    watching = uneven.Uneven(accelerator, loop, [1, 2])
    ranks.other = 0
    with accelerator.join_uneven_inputs("model"):
        watching.pass_begins()
    assert not capsys.readouterr().err
    watching.pass_begins()
    assert ("different numbers of batches ([2, 3])" in capsys.readouterr().err) is is_said
