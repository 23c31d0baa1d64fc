"""Optimizers whose step runs the forward and the backward, in a closure: Lightning's automatic way, and L-BFGS."""

from __future__ import annotations

import time

import pytest
import torch

from resilience_sdk import straggler

from .attached import ALL, batch, counts


@pytest.fixture
def attach(recording, net):
    """Attach the model with an optimizer, and return a closure that trains."""
    handles = []

    def attached(optimizer):
        handles.append(straggler.attach(net, optimizer))

        def closure():
            optimizer.zero_grad()
            loss = net(batch()).square().sum()
            loss.backward()
            time.sleep(0.05)  # what the closure does behind its backward is a part of the step
            return loss

        return closure

    yield attached
    for handle in handles:
        handle.detach()


def seconds(step):
    """Return how long this took: less the sleeps of the model, no `optim` took longer."""
    began = time.monotonic()
    step()
    return time.monotonic() - began


def test_a_step_with_a_closure_is_timed_without_its_forward_and_backward(recording, attach, net):
    """Each step has its four sections; `optim` has the rest of the closure, and is not open while that runs."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    closure = attach(optimizer)
    seen = []
    net.forward_s, net.backward_s = 0.1, 0.1
    net.wrap = lambda output: seen.append(recording.stack()) or output
    steps = [lambda: optimizer.step(closure), lambda: optimizer.step(closure=closure)] * 2
    steps_s = [seconds(step) for step in steps]
    found = recording.harvest()
    assert {name: len(samples) for name, samples in found.items()} == dict.fromkeys(ALL, 4)
    assert all(0.05 <= took / 1e9 <= step_s - 0.2 for took, step_s in zip(found["optim"], steps_s, strict=True))
    assert seen == [["fwd"]] * 4
    assert recording.stack() == []


def test_a_closure_may_run_several_times_per_step(recording, attach, net):
    """L-BFGS: the step is one pass, without all of them."""
    optimizer = torch.optim.LBFGS(net.parameters(), lr=1e-3, max_iter=3)
    closure = attach(optimizer)
    net.backward_s = 0.1
    step_s = seconds(lambda: optimizer.step(closure))
    found = recording.harvest()
    runs = len(found["bwd"])
    assert runs >= 2
    assert {name: len(samples) for name, samples in found.items()} == {
        "fwd": runs,
        "bwd": runs,
        "comm_wait": runs,
        "optim": 1,
    }
    assert 0.05 * runs <= found["optim"][0] / 1e9 <= step_s - 0.1 * runs


def test_a_closure_without_a_backward_costs_the_sample(recording, attach, net):
    """Nobody can tell where it ended."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    attach(optimizer)
    optimizer.step(lambda: net(batch()).sum())
    assert counts(recording) == {"fwd": 1}
    assert recording.stack() == []


def test_a_closure_that_fails_leaves_nothing_open(recording, attach, net):
    """And the next step is timed, also that of another optimizer."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    closure = attach(optimizer)
    for fails in ("forward", "backward"):
        net.fails = fails
        with pytest.raises(OSError, match=fails):
            optimizer.step(closure)
        net.fails = None
        if fails == "forward":
            assert recording.stack() == []
        net(batch()).sum().backward()
        assert recording.stack() == []
        recording.harvest()
        optimizer.step(closure)
        assert counts(recording) == dict.fromkeys(ALL, 1)


def test_an_optimizer_within_an_optimizer_is_one_step(recording, net):
    """A wrapper steps what it wraps; the pass is the wrapper's, to its end."""
    inner = torch.optim.SGD(net.parameters(), 0.1)

    class Wrapper(torch.optim.SGD):
        def step(self):
            inner.step()
            time.sleep(0.05)

    handle = straggler.attach(net)
    Wrapper(net.parameters(), 0.1).step()
    (took,) = recording.harvest()["optim"]
    handle.detach()
    assert took >= 0.05e9


def test_after_a_failed_closure_another_optimizer_is_timed(recording, net):
    """Without an optimizer every one counts; the failed step was not within anything."""
    first, second = torch.optim.SGD(net.parameters(), 0.01), torch.optim.SGD(net.parameters(), 0.1)
    handle = straggler.attach(net)
    net.fails = "forward"
    with pytest.raises(OSError, match="forward"):
        first.step(lambda: net(batch()))
    net.fails = None
    second.step()
    handle.detach()
    assert counts(recording) == {"optim": 1}
