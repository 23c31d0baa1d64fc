"""Sections by hooks: one model in one process. What several ranks see is in tests/integration/test_attach.py."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import types
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from resilience_sdk import console, faults, heartbeat, lanes, straggler
from resilience_sdk.errors import ConfigError

ALL = ("fwd", "bwd", "comm_wait", "optim")


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError("backward")


class Net(nn.Module):
    """A model whose forward and backward take what they are told to take, in seconds."""

    def __init__(self, forward_s=0.0, backward_s=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.forward_s, self.backward_s = forward_s, backward_s
        self.fails: str | None = None
        self.wrap = lambda output: output

    def forward(self, x):
        if self.fails == "forward":
            raise OSError("forward")
        output = _Sleep.apply(self.layers(x), self.forward_s, self.backward_s)
        return self.wrap(_Fail.apply(output) if self.fails == "backward" else output)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def optimizer(net):
    return torch.optim.SGD(net.parameters(), 0.1)


@pytest.fixture
def attached(recording, net, optimizer):
    handle = straggler.attach(net, optimizer)
    yield handle
    handle.detach()


def batch():
    return torch.randn(2, 4)


def counts(recording):
    return {name: len(samples) for name, samples in recording.harvest().items()}


def train_step(net, optimizer):
    net(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_each_step_has_its_four_sections(recording, attached, net, optimizer):
    """One pass each, none open after it, and the kinds tell work from waiting."""
    for _ in range(3):
        train_step(net, optimizer)
    kinds = {name: (kind, len(samples)) for name, kind, _, samples in recording.reader.harvest()}
    assert kinds == {name: ("comm" if name == "comm_wait" else "compute", 3) for name in ALL}
    assert recording.stack() == []


def test_each_section_has_its_own_time(recording, attached, net, optimizer):
    """The forward's time is in fwd, the backward's in bwd, and neither in the other."""
    net.forward_s, net.backward_s = 0.1, 0.2
    train_step(net, optimizer)
    took = {name: samples[0] / 1e9 for name, samples in recording.harvest().items()}
    assert 0.1 <= took["fwd"] < 0.2
    assert 0.2 <= took["bwd"] < 0.3
    assert max(took["comm_wait"], took["optim"]) < 0.1


def test_where_a_rank_is_can_be_seen(recording, attached, net, optimizer):
    """Inside the forward and the backward their section is open, as the deadlines want to see it."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(recording.stack())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(recording.stack())
            return grad

    net.wrap = Look.apply
    with heartbeat():
        train_step(net, optimizer)
    assert seen == [["step", "fwd"], ["step", "bwd"]]


def test_micro_batches_are_passes_of_their_own(recording, attached, net, optimizer):
    """Gradient accumulation: three forwards and backwards, one optimizer step."""
    for _ in range(3):
        net(batch()).sum().backward()
    optimizer.step()
    assert counts(recording) == {"fwd": 3, "bwd": 3, "comm_wait": 3, "optim": 1}


def test_two_forwards_may_have_one_backward(recording, attached, net):
    """Siamese and contrastive models: the backward is one pass."""
    (net(batch()) - net(batch())).square().sum().backward()
    assert counts(recording) == {"fwd": 2, "bwd": 1, "comm_wait": 1}
    assert recording.stack() == []


def test_one_forward_may_have_two_backwards(recording, attached, net):
    """With retain_graph each backward is a pass."""
    output = net(batch())
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    assert counts(recording) == {"fwd": 1, "bwd": 2, "comm_wait": 2}


@dataclass
class Record:
    loss: torch.Tensor
    note: str = "none"


@pytest.mark.parametrize(
    ("wrap", "loss_of"),
    [
        (lambda out: {"loss": out.sum(), "n": 3}, lambda out: out["loss"]),
        (lambda out: (None, [out, 5]), lambda out: out[1][0].sum()),
        (lambda out: Record(out.sum()), lambda out: out.loss),
    ],
    ids=["dict", "nested", "dataclass"],
)
def test_outputs_may_be_nested(recording, attached, net, wrap, loss_of):
    """Whatever holds the tensors of the output, the backward is seen."""
    net.wrap = wrap
    loss_of(net(batch())).backward()
    assert counts(recording)["bwd"] == 1


def test_a_forward_without_gradients_is_not_timed(recording, attached, net):
    """Evaluation takes its own time, which says nothing about training; eval() alone changes nothing."""
    with torch.no_grad():
        net(batch())
    with torch.inference_mode():
        net(batch())
    assert counts(recording) == {}
    net.eval()
    net(batch())
    assert counts(recording) == {"fwd": 1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_is_a_part_of_the_backward(recording, attached, net, reentrant):
    """Activation checkpointing, inside the model and around it."""
    inner = net.layers
    net.wrap = lambda out: checkpoint(inner, out, use_reentrant=reentrant)
    net(batch()).sum().backward()
    assert counts(recording) == {"fwd": 1, "bwd": 1, "comm_wait": 1}
    net.wrap = lambda out: out
    checkpoint(net, batch().requires_grad_(), use_reentrant=reentrant).sum().backward()
    found = counts(recording)
    assert found["bwd"] == 1
    assert found.get("fwd", 0) == (0 if reentrant else 1)  # reentrant: the only forward with gradients is recomputed
    assert recording.stack() == []


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


def test_detached_it_is_as_it_was(recording, net, optimizer):
    """No hook is left, nothing is recorded; twice does no harm."""
    handle = straggler.attach(net, optimizer)
    train_step(net, optimizer)
    handle.detach()
    handle.detach()
    recording.harvest()
    train_step(net, optimizer)
    assert counts(recording) == {}
    assert not net._forward_hooks
    assert not net._forward_pre_hooks
    assert not net._forward_hooks_always_called
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("moment", ["after forward", "in backward", "in optimizer"])
def test_it_may_be_detached_in_the_middle(recording, net, optimizer, moment):
    """The step goes on, what was open is closed."""
    handle = straggler.attach(net, optimizer)
    output = net(batch())
    if moment == "after forward":
        handle.detach()
    elif moment == "in backward":
        next(net.parameters()).register_hook(lambda _: handle.detach())
    else:
        optimizer.register_step_pre_hook(lambda *_: handle.detach())
    output.sum().backward()
    optimizer.step()
    assert recording.stack() == []
    assert "optim" not in counts(recording)


def test_attached_twice_it_counts_once(recording, attached, net, optimizer):
    """The newer hooks replace the older, whose handle does nothing any more."""
    again = straggler.attach(net, optimizer)
    attached.detach()
    train_step(net, optimizer)
    assert counts(recording) == dict.fromkeys(ALL, 1)
    again.detach()


def test_copies_and_files_of_the_model_are_free_of_it(recording, net, optimizer):
    """The state is the same, and a copied or unpickled model works and records nothing."""
    model = nn.Sequential(nn.Linear(4, 4))
    before = model.state_dict()
    handle = straggler.attach(model)
    assert list(model.state_dict()) == list(before)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
        other(batch()).sum().backward()
    straggler.attach(net, optimizer).detach()
    pickle.loads(pickle.dumps(optimizer))
    copy.deepcopy(optimizer)
    assert counts(recording) == {}
    handle.detach()


def test_without_an_optimizer_every_step_counts(recording, net, optimizer):
    """Whoever steps in this process is timed, and no longer than attached."""
    handle = straggler.attach(net)
    train_step(net, optimizer)
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    other.step()
    assert counts(recording)["optim"] == 2
    handle.detach()
    optimizer.step()
    assert counts(recording) == {}


def test_names_may_have_a_prefix(recording, net):
    """For the second model of one loop."""
    handle = straggler.attach(net, prefix="critic.")
    net(batch()).sum().backward()
    handle.detach()
    assert set(counts(recording)) == {"critic.fwd", "critic.bwd", "critic.comm_wait"}


def test_a_section_of_the_users_has_precedence(recording, attached, net):
    """A `with section("fwd")` around the model is not timed twice."""
    with straggler.section("fwd"):
        output = net(batch())
    with straggler.section("bwd"):
        output.sum().backward()
    assert counts(recording) == {"fwd": 1, "bwd": 1}
    assert recording.stack() == []


def test_the_backward_may_run_on_another_thread(recording, attached, net):
    """It is recorded beside its forward, on the lane of the thread that trains."""
    output = net(batch())
    thread = threading.Thread(target=output.sum().backward)
    thread.start()
    thread.join()
    assert counts(recording) == {"fwd": 1, "bwd": 1, "comm_wait": 1}
    assert len(recording.snapshot().lanes) == 1


def test_a_thread_that_trains_by_itself_has_its_own_lane(recording, attached, net):
    """Forward and backward on a second thread do not disturb the first one's."""
    train = lambda: net(batch()).sum().backward()  # noqa: E731
    train()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert counts(recording) == {"fwd": 2, "bwd": 2, "comm_wait": 2}
    assert len(recording.snapshot().lanes) == 2


def test_the_model_can_be_freed(recording):
    """Hooks and handle keep no model alive, and the hooks on every optimizer stop when it is gone."""
    model = Net()
    kept = straggler.attach(model)
    gone = weakref.ref(model)
    model(batch()).sum().backward()
    del model
    gc.collect()
    assert gone() is None
    recording.harvest()
    torch.optim.SGD(nn.Linear(1, 1).parameters()).step()
    assert counts(recording) == {}
    kept.detach()


def test_a_hook_that_fails_ends_the_timing_and_nothing_else(recording, attached, net, optimizer, capfd, monkeypatch):
    """Training goes on, and one line says why it is not timed any more."""
    monkeypatch.setattr(console, "_said", set())

    def broken():
        raise OSError("no page")

    lanes.set_starter(broken)
    lanes.forget()
    for _ in range(3):
        train_step(net, optimizer)
    assert capfd.readouterr().err.splitlines() == [
        "resilience: attach: a hook failed, all are switched off and training goes on: OSError: no page"
    ]


def test_a_hook_that_fails_leaves_nothing_open(recording, attached, net, capfd, monkeypatch):
    """The backward is under way when it happens; what is open then would look like a hang."""
    monkeypatch.setattr(console, "_said", set())
    output = net(batch())
    attached._passes.waits.block = 5  # no block
    attached._passes.waits._has_opened = True
    next(net.parameters()).register_hook(lambda _: attached._guard(lambda: attached._passes.waits._show_end(1))())
    output.sum().backward()
    assert recording.stack() == []
    assert "AttributeError" in capfd.readouterr().err


def test_switched_off_it_does_nothing(recording, attached, net, optimizer):
    """With the SDK disabled the hooks find no section."""
    lanes.disable()
    train_step(net, optimizer)
    assert counts(recording) == {}


def test_a_fault_may_slow_the_backward_down(recording, net, optimizer, monkeypatch):
    """`slow:section=bwd` strikes inside it, as it does in a section of the user's."""
    monkeypatch.setattr(faults, "_injector", faults.Injector())
    faults.load("", 0, 0)
    faults.inject("slow", section="bwd", seconds=0.2)
    handle = straggler.attach(net, optimizer)
    train_step(net, optimizer)
    handle.detach()
    took = {name: samples[0] / 1e9 for name, samples in recording.harvest().items()}
    assert took["bwd"] >= 0.2
    assert took["fwd"] < 0.1


def test_without_engine_callbacks_the_last_gradient_ends_the_backward(recording, net, optimizer, monkeypatch):
    """The fallback: one hook on the parameter whose gradient comes last, found out in the first backward."""
    without_callbacks = types.SimpleNamespace(run_backward=torch.autograd.Variable._execution_engine.run_backward)
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", without_callbacks)
    net.backward_s = 0.1
    handle = straggler.attach(net, optimizer)
    for _ in range(3):
        train_step(net, optimizer)
    found = recording.harvest()
    assert {name: len(samples) for name, samples in found.items()} == {"fwd": 3, "bwd": 2, "optim": 3}
    assert all(0.1e9 <= took < 0.2e9 for took in found["bwd"])
    assert recording.stack() == []
    hooked = [p for p in net.parameters() if p._post_accumulate_grad_hooks]
    assert hooked == [net.layers[0].weight] or hooked == [net.layers[0].bias]
    handle.detach()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5,), "attach(5): expected the torch.nn.Module"),
        ((nn.Linear(1, 1), "adam"), "attach(model, str): expected a torch.optim.Optimizer"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    """The error names what was given and what is expected."""
    with pytest.raises(ConfigError) as error:
        straggler.attach(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("keywords", [{"prefix": 3}, {"kernels_every": 0}, {"kernels_every": "5"}])
def test_wrong_keywords_are_refused(keywords):
    """The error names the keyword and the value."""
    (name, value) = next(iter(keywords.items()))
    with pytest.raises(ConfigError, match=rf"{name}={value!r}"):
        straggler.attach(nn.Linear(1, 1), **keywords)
