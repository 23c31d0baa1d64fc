"""`adapters.pytorch.attach` in one process. What several ranks see is in tests/integration."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from calls import calls_of
from torch import nn
from torch.utils.data import DataLoader

import resilience_sdk
from resilience_sdk import heartbeat, straggler
from resilience_sdk.adapters import pytorch
from resilience_sdk.core import resume_limits
from resilience_sdk.errors import Preempted
from resilience_sdk.numerics import watch as numerics
from resilience_sdk.rank.run import Run

from .plain_loop import counts, train, train_step

BATCH = torch.randn(2, 4)
SECTIONS = dict.fromkeys(("step", "fwd", "bwd", "comm_wait", "optim"), 6)


@pytest.mark.parametrize("first_step", [None, 40])
def test_a_loop_without_a_line_of_ours_has_beats_and_sections(recording, asked, model, optimizer, loader, first_step):
    """A beat per optimizer step, sections within, the wait for data beside them; numbered as the resume knows it."""
    handle = pytorch.attach(model, optimizer, loader, first_step=first_step)
    train(model, optimizer, loader)
    first = first_step or 0
    assert handle.step == first + 6
    assert counts(recording) == {**SECTIONS, "data": 7}
    assert asked.checks == [first + count for count in range(1, 7)]
    assert recording.stack() == []
    assert recording.lane().step_is_global is (first_step is not None)
    assert first_step is None or recording.lane().step == 45


def test_a_step_takes_few_calls_more_than_its_sections(recording, model, optimizer, loader):
    """There are 13, the check for preemption and the wait for data among them."""

    def calls_of_a_step():
        batches = iter(loader)
        for _ in range(3):
            train_step(model, optimizer, next(batches)[0])
        return calls_of(lambda: train_step(model, optimizer, next(batches)[0]))

    sections = straggler.attach(model, optimizer)
    alone = calls_of_a_step()
    sections.detach()
    with pytorch.attach(model, optimizer, loader, first_step=0):
        assert calls_of_a_step() - alone <= 16


def stacks_in(recording, module):
    """What is open in each forward of a layer."""
    stacks = []
    module.register_forward_hook(lambda *_: stacks.append(recording.stack()))
    return stacks


# -- what is in no step


def test_what_comes_behind_the_last_batch_is_in_no_step(recording, asked, model, optimizer, loader):
    """Micro-batches of which no step is made, since they are too few: an evaluation or a save may come next."""
    handle = pytorch.attach(model, optimizer, loader)
    for number, (batch,) in enumerate(loader):
        model(batch).sum().backward()
        if number == 3:
            optimizer.step()
    assert recording.stack() == []
    train_step(model, optimizer, BATCH)
    assert handle.step == recording.snapshot().beats == 2


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_an_evaluation_behind_an_incomplete_step_is_in_no_step(recording, asked, model, optimizer, wants_gradients):
    """Also where no loader is watched, and where the evaluation needs gradients, as of forces."""
    pytorch.attach(model, optimizer)
    train_step(model, optimizer, BATCH)
    model(BATCH).sum().backward()
    assert recording.stack() == ["step"]
    stacks = stacks_in(recording, model[1])
    model.eval()
    with torch.set_grad_enabled(wants_gradients):
        model(BATCH)
    assert stacks == [["fwd"] if wants_gradients else ["eval_batch"]]
    assert "step" not in recording.stack()
    model.train()
    train_step(model, optimizer, BATCH)
    assert recording.snapshot().beats == 2


def test_a_step_that_was_interrupted_has_all_that_was_spent_on_it(recording, asked, model, optimizer, loader):
    """Some loops make one step of a whole pass: its deadline is not learned from what comes behind the last batch."""
    pytorch.attach(model, optimizer, loader)
    began = []
    for (batch,) in loader:
        began = began or [time.monotonic()]
        model(batch).sum().backward()
    before_s = time.monotonic() - began[0]
    optimizer.step()
    [step_ns] = recording.harvest()["step"]
    assert step_ns / 1e9 > 0.5 * before_s


def test_a_model_that_is_trained_in_evaluation_mode_has_whole_steps(recording, asked, model, optimizer):
    """Frozen statistics: from the second step on it is known that this is how it is trained."""
    model.eval()
    handle = pytorch.attach(model, optimizer)
    stacks = stacks_in(recording, model[1])
    for _ in range(3):
        train_step(model, optimizer, BATCH)
    assert stacks == [["fwd"], ["step", "fwd"], ["step", "fwd"]]
    assert handle.step == recording.snapshot().beats == 3


def test_another_thread_that_ends_a_pass_interrupts_no_step(recording, asked, model, optimizer, loader):
    """One that fetches ahead is through before the last steps are."""
    pytorch.attach(model, optimizer, loader)
    model(BATCH).sum().backward()
    ahead = threading.Thread(target=lambda: list(loader))
    ahead.start()
    ahead.join()
    assert recording.stack() == ["step"]


# -- the stop


@pytest.mark.parametrize("at", [2, 6])
def test_the_stop_is_raised_where_the_next_batch_is_asked_for(recording, asked, model, optimizer, loader, at):
    """Behind all that belongs to the step, also at the end of the epoch: not after the evaluation that may follow."""
    asked.add(at)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    handle = pytorch.attach(model, optimizer, loader)
    fetched = 0
    with pytest.raises(Preempted):
        for (batch,) in loader:
            fetched += 1
            train_step(model, optimizer, batch)
            scheduler.step()
    assert (handle.step, fetched, scheduler.last_epoch) == (at, at, at)
    assert recording.snapshot().done
    assert recording.stack() == []


def test_without_a_loader_it_is_raised_at_the_next_forward(asked, model, optimizer, loader):
    """Nothing of the next step has happened then, not even its random numbers."""
    asked.add(2)
    handle = pytorch.attach(model, optimizer)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with torch.no_grad():
        model(BATCH)
    with pytest.raises(Preempted):
        train(model, optimizer, loader)
    assert (handle.step, len(forwards)) == (2, 3)


def test_where_the_model_is_not_seen_it_is_raised_before_the_next_step(asked, model, optimizer):
    """The weights are those of the agreed step."""
    asked.add(1)
    hidden = nn.Linear(4, 1)
    pytorch.attach(hidden, optimizer)
    train_step(model, optimizer, BATCH)
    weights = copy.deepcopy(model.state_dict())
    model(BATCH).sum().backward()
    with pytest.raises(Preempted):
        optimizer.step()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


# -- loops of all kinds


def test_a_scaler_that_skips_a_step_makes_no_beat(recording, asked, model, optimizer):
    """Nothing was stepped; the next real step is the next beat."""
    handle = pytorch.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for bad in (False, True, False):
        loss = model(BATCH).sum() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert handle.step == recording.snapshot().beats == 2


def test_a_closure_is_within_its_step(recording, asked, model):
    """L-BFGS calls the model several times in one step."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    handle = pytorch.attach(model, optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert handle.step == recording.snapshot().beats == 1
    assert recording.stack() == []


@pytest.mark.parametrize("way", ["around", "in place"])
def test_a_compiled_model_beats_too(recording, asked, model, optimizer, loader, way):
    """As torch.compile returns it, and as it compiles itself."""
    if way == "in place":
        model.compile(backend="eager")
    called = torch.compile(model, backend="eager") if way == "around" else model
    handle = pytorch.attach(called, optimizer, loader)
    train(called, optimizer, loader)
    found = counts(recording)
    assert handle.step == found["step"] == found["fwd"] == found["optim"] == 6


def test_an_exception_leaves_the_beat_to_the_next_step_or_nothing_open(recording, asked, model, optimizer):
    """A batch is skipped: the step goes on with the next one. Where the loop ends by it, the step does not count."""
    with pytest.raises(RuntimeError, match="shape"), pytorch.attach(model, optimizer) as handle:
        with pytest.raises(RuntimeError, match="shape"):
            model(torch.randn(2, 9))
        assert recording.stack() == ["step"]
        train_step(model, optimizer, BATCH)
        assert recording.stack() == []
        model(torch.randn(2, 9))
    assert recording.stack() == []
    assert handle.step == recording.snapshot().beats == 1


def test_inside_run_steps_only_the_sections_are_added(recording, asked, model, optimizer, loader):
    """The run beats, checks, and times the wait for data."""
    pytorch.attach(model, optimizer, loader)
    with Run(None, None) as run:
        for _, (batch,) in run.steps(loader):
            train_step(model, optimizer, batch)
    assert counts(recording) == {**SECTIONS, "data": 7}
    assert asked.checks == [1, 2, 3, 4, 5, 6]  # each once


@pytest.mark.parametrize("of_the_script", [pytorch.resilient, heartbeat()], ids=["resilient", "heartbeat"])
def test_a_beat_of_the_script_is_the_only_one(recording, asked, model, optimizer, loader, of_the_script):
    """One beat per step, however many know of it. `@resilient` is the same here as everywhere."""
    assert pytorch.resilient is resilience_sdk.resilient
    pytorch.attach(model, optimizer, loader)
    step = of_the_script(train_step)
    for (batch,) in loader:
        step(model, optimizer, batch)
    found = counts(recording)
    assert (found["step"], found["fwd"], found["optim"]) == (6, 6, 6)


def test_detached_nothing_is_left(recording, asked, model, optimizer, loader):
    """No hook on model or optimizer, the loader's own class, no more beats; and a new attach is welcome."""
    handle = pytorch.attach(model, optimizer, loader)
    train(model, optimizer, loader)
    handle.detach()
    handle.detach()
    assert type(loader) is DataLoader
    assert {**model._forward_hooks, **model._forward_pre_hooks} == {}
    assert {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks} == {}
    assert recording.snapshot().done
    counts(recording)
    train(model, optimizer, loader)
    assert counts(recording) == {}
    again = pytorch.attach(model, optimizer, loader, first_step=6)
    train(model, optimizer, loader)
    assert again.step == 12
    assert not recording.snapshot().done


def test_two_models_of_one_loop(recording, asked, model, optimizer, loader):
    """The second one has sections of its own, and the steps are those of the first."""
    critic = nn.Linear(4, 1)
    judge = torch.optim.SGD(critic.parameters(), 0.1)
    handle = pytorch.attach(model, optimizer, loader)
    other = straggler.attach(critic, judge, prefix="critic.")
    for (batch,) in loader:
        train_step(critic, judge, batch)
        train_step(model, optimizer, batch)
    other.detach()
    found = counts(recording)
    assert (handle.step, found["step"], found["fwd"], found["critic.fwd"]) == (6, 6, 6, 6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_on_a_gpu_nothing_waits_for_the_device(recording, asked):
    """torch itself raises where anything synchronises."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(8, 64, device="cuda")
    handle = pytorch.attach(model, optimizer)
    train_step(model, optimizer, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            train_step(model, optimizer, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert handle.step == recording.snapshot().beats == 6


# -- losses


@pytest.fixture
def heard(monkeypatch):
    """The losses that `numerics` is given, by step."""
    found = {}
    monkeypatch.setattr(numerics, "is_on", lambda: True)
    watch = SimpleNamespace(note=lambda step, loss, _grad_norm, **_: found.update({step: loss}), is_waiting=False)
    monkeypatch.setattr(numerics, "watch_of_adapters", lambda: watch)
    return found


@pytest.mark.parametrize("backward", [torch.Tensor.backward, lambda loss: torch.autograd.backward([loss])])
def test_the_loss_of_each_step_is_heard(recording, asked, model, optimizer, heard, backward):
    """Whichever way its backward is begun; a backward from gradients is of no loss, nor is one of another thread."""
    plain = torch.autograd.backward
    with pytorch.attach(model, optimizer, first_step=5):
        for _ in range(2):
            outputs = model(BATCH)
            torch.autograd.backward(outputs, torch.zeros_like(outputs), retain_graph=True)
            other = torch.ones(1, requires_grad=True)
            thread = threading.Thread(target=other.sum().backward)
            thread.start()
            thread.join()
            backward(outputs.sum() * 0 + 3.0)
            optimizer.step()
    assert heard == {5: 3.0, 6: 3.0}
    assert torch.autograd.backward is plain


def test_a_backward_from_an_edge_of_the_graph_is_of_no_loss(recording, asked, model, optimizer, heard):
    """An edge stands for a tensor, and has no number; the hooks stay on."""
    with pytorch.attach(model, optimizer, first_step=0) as handle:
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(model(BATCH).sum()))
        optimizer.step()
        assert handle.guard.is_on
    assert heard == {}


def test_the_loss_of_a_step_takes_few_calls(recording, asked, model, optimizer, loader, monkeypatch):
    """Five: around the backward, its number, the end of the step, and whether it is a usual one, twice."""

    def calls_of_a_step():
        with pytorch.attach(model, optimizer, loader, first_step=0):
            batches = iter(loader)
            for _ in range(3):
                train_step(model, optimizer, next(batches)[0])
            return calls_of(lambda: train_step(model, optimizer, next(batches)[0]))

    alone = calls_of_a_step()
    watch = numerics.NumericsWatch(SimpleNamespace(policy="warn"))
    monkeypatch.setattr(numerics, "is_on", lambda: True)
    monkeypatch.setattr(numerics, "watch_of_adapters", lambda: watch)
    assert calls_of_a_step() - alone <= 6


def test_a_scaled_loss_is_heard_as_it_was_before(recording, asked, model, optimizer, heard):
    """A scaler changes its scale by itself: what it made of the loss would be a spike."""
    plain, scaler = torch.amp.GradScaler.scale, torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pytorch.attach(model, optimizer, first_step=0):
        scaler.scale(model(BATCH).sum() * 0 + 3.0).backward()
        scaler.step(optimizer)
    assert heard == {0: 3.0}
    assert torch.amp.GradScaler.scale is plain


def test_a_loop_that_resumes_without_a_loader_is_said_to_find_its_own_place(
    recording, asked, model, optimizer, loader, monkeypatch
):
    """What it has read ahead of a save is lost; with a loader, or where nothing is resumed, there is nothing to say."""
    for options in ({"first_step": 3}, {"loader": loader, "first_step": 3}, {}):
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        pytorch.attach(model, optimizer, **options).detach()
        said = [limit.key for limit in resume_limits.limits()]
        assert ("no loader" in said) is (options == {"first_step": 3})
