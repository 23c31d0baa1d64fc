"""Sections by hooks: one model in one process. What several ranks see is in tests/integration/test_attach.py."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
from calls import calls_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from resilience_sdk import heartbeat, straggler

from .attached import ALL, batch, counts, train_step


def test_each_step_has_its_four_sections(recording, attached, net, optimizer):
    """One pass each, none open after it, and the kinds tell work from waiting."""
    for _ in range(3):
        train_step(net, optimizer)
    kinds = {name: (kind, len(samples)) for name, kind, _, _, samples, *_ in recording.reader.passes()}
    assert kinds == {name: ("comm" if name == "comm_wait" else "compute", 3) for name in ALL}
    assert recording.stack() == []


def test_each_section_has_its_own_time(recording, attached, net, optimizer):
    """The forward's time is in fwd, the backward's in bwd, and neither in the other."""
    net.forward_s, net.backward_s = 0.1, 0.2
    all_s = train_step(net, optimizer)
    took = {name: samples[0] / 1e9 for name, samples in recording.harvest().items()}
    assert 0.1 <= took["fwd"] <= all_s - 0.2
    assert 0.2 <= took["bwd"] <= all_s - 0.1
    assert max(took["comm_wait"], took["optim"]) <= all_s - 0.3


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


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_no_forward(recording, optimizer, strict):
    """A model that is exported in the middle of a training is traced without our hooks, and is none of its passes."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    attached = straggler.attach(net, optimizer)
    exported = torch.export.export(net, (batch(),), strict=strict)
    assert counts(recording) == {}
    net(batch()).sum().backward()
    attached.detach()
    given = batch()
    assert torch.equal(exported.module()(given), net(given))
    assert counts(recording) == {"fwd": 1, "bwd": 1, "comm_wait": 1}


def test_a_step_takes_few_calls(recording, attached, net, optimizer):
    """Of ours, and of torch for us, there are 54; it was twice as many."""
    for _ in range(3):
        train_step(net, optimizer)
    watched = calls_of(lambda: train_step(net, optimizer))
    attached.detach()
    assert watched - calls_of(lambda: train_step(net, optimizer)) <= 70


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


def test_a_model_may_call_itself(recording, attached, net):
    """Also without gradients, and where the inner call fails: the pass is the outermost one, and whole."""
    inner = []

    def again(output):
        if not inner:
            inner.append(1)
            net(batch())
            with torch.no_grad():
                net(batch())
            net.fails = "forward"
            with pytest.raises(OSError, match="forward"):
                net(batch())
            net.fails = None
        return output

    net.forward_s, net.wrap = 0.05, again
    net(batch()).sum().backward()
    found = recording.harvest()
    assert {name: len(samples) for name, samples in found.items()} == {"fwd": 1, "bwd": 1, "comm_wait": 1}
    assert found["fwd"][0] >= 0.15e9
    assert recording.stack() == []


def test_a_forward_that_was_left_without_a_word_does_not_swallow_the_next(recording, attached, net):
    """Ctrl-C in a notebook skips the hooks at the end; the heartbeat around it closes the section."""

    def interrupt(_):
        raise KeyboardInterrupt

    net.wrap = interrupt
    with pytest.raises(KeyboardInterrupt), heartbeat():
        net(batch())
    net.wrap = lambda output: output
    for _ in range(2):
        net(batch()).sum().backward()
    assert counts(recording) == {"step": 1, "fwd": 2, "bwd": 2, "comm_wait": 2}


def test_a_forward_may_return_nothing(recording, attached, net):
    """A model that keeps its loss to itself is timed like any other."""
    losses = []
    net.wrap = lambda output: losses.append(output.sum())
    assert net(batch()) is None
    assert counts(recording) == {"fwd": 1}


def test_what_a_model_returns_of_its_own_collects_no_hooks(recording, net):
    """A parameter (CLIP's logit_scale) or an input among the outputs stays, and the backward is seen all the same."""
    scale, data = nn.Parameter(torch.ones(())), batch().requires_grad_()
    net.wrap = lambda output: (output, scale, data)
    handle = straggler.attach(net)
    for _ in range(5):
        output, _, _ = net(data)
        (output.sum() * scale).backward()
    assert not scale._backward_hooks
    assert not data._backward_hooks
    assert counts(recording)["bwd"] == 5
    handle.detach()


def test_a_tensor_that_is_kept_over_steps_has_one_hook(recording, attached, net):
    """It was computed once (a table of positions, say) and is returned each time; each backward is seen."""
    table = nn.Parameter(torch.ones(4))
    kept = table * 2
    net.wrap = lambda output: (output, kept)
    for _ in range(5):
        output, positions = net(batch())
        (output.sum() + positions.sum()).backward(retain_graph=True)
    assert len(kept._backward_hooks) == 1
    assert counts(recording)["bwd"] == 5


def test_a_tensor_that_is_kept_has_a_hook_of_each_attached_model(recording, net):
    """Whose backward begins is told to both, as where nothing is kept."""
    kept = nn.Parameter(torch.ones(4)) * 2
    other = nn.Sequential(nn.Identity())
    net.wrap = lambda output: (output, kept)
    handles = [straggler.attach(net), straggler.attach(other, prefix="other.")]
    for _ in range(3):
        net(batch())
        other(kept)
    assert len(kept._backward_hooks) == 2
    for handle in handles:
        handle.detach()
