"""Waits inside a forward: whose backward they are counted with."""

from __future__ import annotations

from time import monotonic_ns, sleep

import pytest
import torch

from resilience_sdk.straggler.model_hooks import Guard
from resilience_sdk.straggler.passes import Engine, ModelPasses


class OnTheHost:
    """A model on no device."""

    def find_clock(self):
        return None


@pytest.fixture
def passes(recording):
    return ModelPasses("", OnTheHost(), Engine(), Guard(pytest.fail))


@pytest.fixture
def forward(passes):
    """Return a forward that waits for 20 ms, of a model whose waits are bracketed; it says how long that took."""
    weight = torch.ones(3, requires_grad=True)

    def run(wait_s=0.02):
        passes.forward_begins()
        began = monotonic_ns()
        passes.waits.begin()
        sleep(wait_s)
        passes.waits.end()
        took_ns = monotonic_ns() - began
        output = weight * 2
        passes.forward_gives(output)
        passes.forward_ends()
        return output.sum(), took_ns

    return run


def go_back(*forwards):
    """Run one backward through these forwards; return the most that it and they can have waited."""
    began = monotonic_ns()
    sum(output for output, _ in forwards).backward()
    return sum(took_ns for _, took_ns in forwards) + monotonic_ns() - began


def test_forwards_that_no_backward_follows_are_not_waited_for(recording, forward):
    """An evaluation with gradients on: what it waited is not counted with the next step."""
    for _ in range(10):
        forward()
    most = go_back(forward())
    (waited,) = recording.harvest()["comm_wait"]
    assert 0.02e9 <= waited <= most


def test_a_backward_counts_the_forwards_that_it_goes_back_through(recording, forward):
    """Two at once, and in another order than they were made, as in the schedule of a pipeline."""
    most_of_both = go_back(forward(), forward())
    first, second = forward(), forward()
    most = [go_back(first), go_back(second)]
    both, *alone = recording.harvest()["comm_wait"]
    assert 0.04e9 <= both <= most_of_both
    assert all(0.02e9 <= waited <= bound for waited, bound in zip(alone, most, strict=True))


def test_only_the_last_forwards_are_kept(passes, forward):
    """Whoever never goes back costs no memory."""
    for _ in range(200):
        forward(0.0)
    assert sorted(passes._forward_waits) == list(range(137, 201))
