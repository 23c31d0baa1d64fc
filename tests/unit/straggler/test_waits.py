"""Waits inside a forward: whose backward they are counted with."""

from __future__ import annotations

import time

import pytest
import torch

from resilience_sdk.straggler.autograd import Engine
from resilience_sdk.straggler.hooks import Guard
from resilience_sdk.straggler.passes import Passes
from resilience_sdk.straggler.waits import NOTHING, ForwardWaits, Waited


@pytest.fixture
def forward(recording):
    """Return a forward that waits for 20 ms, of a model whose waits are bracketed."""
    passes = Passes("", lambda: None, Engine(), Guard(pytest.fail))
    weight = torch.ones(3, requires_grad=True)

    def run():
        passes.forward_begins()
        passes.waits.begin()
        time.sleep(0.02)
        passes.waits.end()
        output = weight * 2
        passes.forward_gives(output)
        passes.forward_ends()
        return output.sum()

    return run


def test_forwards_that_no_backward_follows_are_not_waited_for(recording, forward):
    """An evaluation with gradients on: what it waited is not counted with the next step."""
    for _ in range(10):
        forward()
    forward().backward()
    (waited,) = recording.harvest()["comm_wait"]
    assert 0.02e9 <= waited < 0.04e9


def test_a_backward_counts_the_forwards_that_it_goes_back_through(recording, forward):
    """Two at once, and in another order than they were made, as in the schedule of a pipeline."""
    (forward() + forward()).backward()
    first, second = forward(), forward()
    first.backward()
    second.backward()
    both, *alone = recording.harvest()["comm_wait"]
    assert 0.04e9 <= both < 0.08e9
    assert all(0.02e9 <= waited < 0.04e9 for waited in alone)


def test_only_the_last_forwards_are_kept():
    """Whoever never goes back costs no memory."""
    waits = ForwardWaits()
    for number in range(1000):
        waits.add(number, Waited(number + 1))
    kept = [number for number in range(1000) if waits.take(number) is not NOTHING]
    assert kept == list(range(936, 1000))
    assert waits.take(999) is NOTHING
