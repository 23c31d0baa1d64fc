"""What fails under `straggler.attach`: the user's code, a hook of ours, or a part of torch."""

from __future__ import annotations

import types

import pytest
import torch

from resilience_sdk import faults, heartbeat, straggler
from resilience_sdk.recorder import lookup

from .attached import ALL, batch, counts, train_step


def test_a_forward_that_fails_is_closed_and_not_counted(recording, attached, net):
    """Its exception passes."""
    net.fails = "forward"
    with pytest.raises(OSError, match="forward"):
        net(batch())
    assert recording.stack() == []
    assert counts(recording) == {}


def test_a_backward_that_fails_is_closed_and_not_counted(recording, attached, net, optimizer):
    """At the latest by the next forward; a heartbeat around it closes it at once."""
    net.fails = "backward"
    with pytest.raises(OSError, match="backward"):
        net(batch()).sum().backward()
    net.fails = None
    train_step(net, optimizer)
    assert counts(recording) == {"fwd": 2, "bwd": 1, "comm_wait": 1, "optim": 1}
    net.fails = "backward"
    with pytest.raises(OSError, match="backward"), heartbeat():
        net(batch()).sum().backward()
    assert recording.stack() == []
    net.fails = None
    recording.harvest()
    train_step(net, optimizer)
    assert counts(recording) == dict.fromkeys(ALL, 1)


def test_an_optimizer_that_fails_leaves_nothing_open(recording, attached, net, optimizer):
    """An exception out of the step: no sample, and the next forward closes the section."""
    net(batch()).sum().backward()

    def fail(*_):
        raise OSError("step")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="step"):
        optimizer.step()
    handle.remove()
    assert recording.stack() == ["optim"]
    recording.harvest()
    train_step(net, optimizer)
    assert recording.stack() == []
    assert counts(recording) == dict.fromkeys(ALL, 1)


def test_a_hook_that_fails_ends_the_timing_and_nothing_else(recording, attached, net, optimizer, capfd):
    """Training goes on, and one line says why it is not timed any more."""

    def broken():
        raise OSError("no page")

    lookup.set_starter(broken)
    lookup.forget()
    for _ in range(3):
        train_step(net, optimizer)
    assert capfd.readouterr().err.splitlines() == [
        "resilience: attach: a hook failed, all are switched off and training goes on: OSError: no page"
    ]


def test_a_hook_that_fails_leaves_nothing_open(recording, attached, net, capfd):
    """The backward is under way when it happens; what is open then would look like a hang."""
    output = net(batch())
    attached._passes.waits.block = 5  # no block
    attached._passes.waits._has_opened = True
    next(net.parameters()).register_hook(lambda _: attached._guard(lambda: attached._passes.waits._show_end(1))())
    output.sum().backward()
    assert recording.stack() == []
    assert "AttributeError" in capfd.readouterr().err


def test_switched_off_it_does_nothing(recording, attached, net, optimizer):
    """With the SDK disabled the hooks find no section."""
    lookup.disable()
    train_step(net, optimizer)
    assert counts(recording) == {}


def test_a_fault_may_slow_the_backward_down(recording, net, optimizer, monkeypatch):
    """`slow:section=bwd` strikes inside it, as it does in a section of the user's."""
    monkeypatch.setattr(faults, "_injector", faults.Injector())
    faults.load("", 0, 0)
    faults.inject("slow", section="bwd", seconds=0.2)
    handle = straggler.attach(net, optimizer)
    all_s = train_step(net, optimizer)
    handle.detach()
    took = {name: samples[0] / 1e9 for name, samples in recording.harvest().items()}
    assert took["bwd"] >= 0.2
    assert took["fwd"] <= all_s - 0.2


def test_without_engine_callbacks_the_backward_is_not_timed(recording, net, optimizer, monkeypatch):
    """Nobody can tell where it ends; it is never open, and the rest is timed."""
    without_callbacks = types.SimpleNamespace(run_backward=torch.autograd.Variable._execution_engine.run_backward)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", without_callbacks)
    handle = straggler.attach(net, optimizer)
    train_step(net, optimizer)
    handle.detach()
    assert counts(recording) == {"fwd": 1, "optim": 1}
    assert recording.stack() == []
