"""`adapters.pytorch.attach` in one process. What several ranks see is in tests/integration."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from calls import calls_of
from torch import nn
from torch.utils.data import DataLoader

import resilience_sdk
from resilience_sdk import heartbeat, straggler
from resilience_sdk.adapters import pytorch
from resilience_sdk.errors import Preempted
from resilience_sdk.session.run import Run

from .plain_loop import counts, train, train_step


def test_a_loop_without_a_line_of_ours_has_beats_and_sections(recording, asked, model, optimizer, loader):
    """A beat per optimizer step, sections within, the wait for data beside them."""
    handle = pytorch.attach(model, optimizer, loader)
    train(model, optimizer, loader)
    assert handle.step == 6
    assert counts(recording) == {"step": 6, "fwd": 6, "bwd": 6, "comm_wait": 6, "optim": 6, "data": 7}
    assert asked.checks == [1, 2, 3, 4, 5, 6]
    assert recording.stack() == []


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


def test_a_beat_holds_all_micro_batches(recording, asked, model, optimizer, loader):
    """Gradient accumulation: real steps are progress, and the step lasts from its first forward."""
    pytorch.attach(model, optimizer, loader)
    stacks = []
    model[1].register_forward_hook(lambda *_: stacks.append(recording.stack()))
    train(model, optimizer, loader, micro_batches=3)
    assert stacks == [["step", "fwd"]] * 18
    found = counts(recording)
    assert (found["step"], found["fwd"], found["optim"]) == (6, 18, 6)
    assert len(asked.checks) == 6


def test_steps_have_the_numbers_that_the_resume_gives_them(recording, asked, model, optimizer, loader):
    """So that a step means the same in all attempts; else beats are counted."""
    handle = pytorch.attach(model, optimizer, loader, first_step=40)
    train(model, optimizer, loader)
    assert handle.step == 46
    assert (recording.lane().step, recording.lane().step_is_global) == (45, True)
    assert asked.checks[0] == 41


def test_an_evaluation_is_outside_of_the_steps(recording, asked, model, optimizer, loader):
    """It has no beat that would look like a step that does not end."""
    pytorch.attach(model, optimizer)
    train(model, optimizer, loader)
    stacks = []
    model[1].register_forward_hook(lambda *_: stacks.append(recording.stack()))
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert stacks == [[]]


def spent(recording):
    """How long each of the steps was, in seconds."""
    return [nanoseconds / 1e9 for nanoseconds in recording.harvest()["step"]]


def stacks_in(recording, module):
    """What is open in each forward of a layer."""
    stacks = []
    module.register_forward_hook(lambda *_: stacks.append(recording.stack()))
    return stacks


def test_what_comes_behind_the_last_batch_is_in_no_step(recording, asked, model, optimizer, loader):
    """Micro-batches of which no step is made, since they are too few: an evaluation or a save may come next."""
    handle = pytorch.attach(model, optimizer, loader)
    for number, (batch,) in enumerate(loader):
        model(batch).sum().backward()
        if number == 3:
            optimizer.step()
    assert recording.stack() == []
    train_step(model, optimizer, torch.randn(2, 4))
    assert handle.step == recording.snapshot().beats == 2


@pytest.mark.parametrize("wants_gradients", [False, True])
def test_an_evaluation_behind_an_incomplete_step_is_in_no_step(recording, asked, model, optimizer, wants_gradients):
    """Also where no loader is watched, and where the evaluation needs gradients, as of forces."""
    pytorch.attach(model, optimizer)
    train_step(model, optimizer, torch.randn(2, 4))
    model(torch.randn(2, 4)).sum().backward()
    assert recording.stack() == ["step"]
    stacks = stacks_in(recording, model[1])
    model.eval()
    with torch.set_grad_enabled(wants_gradients):
        model(torch.randn(2, 4))
    assert [stack[:1] for stack in stacks] == [["fwd"] if wants_gradients else []]
    assert "step" not in recording.stack()
    model.train()
    train_step(model, optimizer, torch.randn(2, 4))
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
    [step_s] = spent(recording)
    assert step_s > 0.5 * before_s


def test_a_model_that_is_trained_in_evaluation_mode_has_whole_steps(recording, asked, model, optimizer):
    """Frozen statistics: from the second step on it is known that this is how it is trained."""
    model.eval()
    handle = pytorch.attach(model, optimizer)
    stacks = stacks_in(recording, model[1])
    for _ in range(3):
        train_step(model, optimizer, torch.randn(2, 4))
    assert stacks == [["fwd"], ["step", "fwd"], ["step", "fwd"]]
    assert handle.step == recording.snapshot().beats == 3


def test_another_thread_that_ends_a_pass_interrupts_no_step(recording, asked, model, optimizer, loader):
    """One that fetches ahead is through before the last steps are."""
    pytorch.attach(model, optimizer, loader)
    model(torch.randn(2, 4)).sum().backward()
    ahead = threading.Thread(target=lambda: list(loader))
    ahead.start()
    ahead.join()
    assert recording.stack() == ["step"]


def test_the_stop_is_raised_where_the_next_batch_is_asked_for(recording, asked, model, optimizer, loader):
    """Behind all that belongs to the step: its scheduler has stepped too."""
    asked.add(2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    handle = pytorch.attach(model, optimizer, loader)
    fetched = 0
    with pytest.raises(Preempted):
        for (batch,) in loader:
            fetched += 1
            train_step(model, optimizer, batch)
            scheduler.step()
    assert (handle.step, fetched, scheduler.last_epoch) == (2, 2, 2)
    assert recording.snapshot().done
    assert recording.stack() == []


def test_the_stop_comes_before_the_end_of_the_epoch(asked, model, optimizer, loader):
    """Not after the evaluation that may follow."""
    asked.add(6)
    pytorch.attach(model, optimizer, loader)
    with pytest.raises(Preempted):
        train(model, optimizer, loader)


def test_without_a_loader_it_is_raised_at_the_next_forward(asked, model, optimizer, loader):
    """Nothing of the next step has happened then, not even its random numbers."""
    asked.add(2)
    handle = pytorch.attach(model, optimizer)
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with torch.no_grad():
        model(torch.randn(2, 4))
    with pytest.raises(Preempted):
        train(model, optimizer, loader)
    assert (handle.step, len(forwards)) == (2, 3)


def test_where_the_model_is_not_seen_it_is_raised_before_the_next_step(asked, model, optimizer):
    """The weights are those of the agreed step."""
    asked.add(1)
    hidden = nn.Linear(4, 1)
    pytorch.attach(hidden, optimizer)
    train_step(model, optimizer, torch.randn(2, 4))
    weights = copy.deepcopy(model.state_dict())
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(Preempted):
        optimizer.step()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_scaler_that_skips_a_step_makes_no_beat(recording, asked, model, optimizer):
    """Nothing was stepped; the next real step is the next beat."""
    handle = pytorch.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for bad in (False, True, False):
        loss = model(torch.randn(2, 4)).sum() * (float("inf") if bad else 1.0)
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
    if way == "around":
        called = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
        called = model
    handle = pytorch.attach(called, optimizer, loader)
    train(called, optimizer, loader)
    found = counts(recording)
    assert handle.step == found["step"] == found["fwd"] == found["optim"] == 6


def test_an_exception_that_is_caught_leaves_the_beat_to_the_next_step(recording, asked, model, optimizer):
    """A batch that is skipped: the sections are closed, the step goes on with the next batch."""
    handle = pytorch.attach(model, optimizer)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(2, 9))
    assert recording.stack() == ["step"]
    train_step(model, optimizer, torch.randn(2, 4))
    assert recording.stack() == []
    assert handle.step == recording.snapshot().beats == 1


def test_as_a_context_manager_it_leaves_nothing_open_behind_an_exception(recording, asked, model, optimizer):
    """Not the step that was begun either, and it does not count."""
    with pytest.raises(RuntimeError, match="shape"), pytorch.attach(model, optimizer):
        model(torch.randn(2, 9))
    assert recording.stack() == []
    assert recording.snapshot().beats == 0


def test_inside_run_steps_only_the_sections_are_added(recording, asked, model, optimizer, loader):
    """The run beats, checks, and times the wait for data."""
    pytorch.attach(model, optimizer, loader)
    with Run(None, None) as run:
        for _, (batch,) in run.steps(loader):
            train_step(model, optimizer, batch)
    assert counts(recording) == {"step": 6, "fwd": 6, "bwd": 6, "comm_wait": 6, "optim": 6, "data": 7}
    assert asked.checks == [1, 2, 3, 4, 5, 6]  # each once


def test_inside_resilient_the_beat_is_that_of_the_call(recording, asked, model, optimizer, loader):
    """`@resilient` is the same here as everywhere."""
    assert pytorch.resilient is resilience_sdk.resilient
    pytorch.attach(model, optimizer, loader)
    step = pytorch.resilient(train_step)
    for (batch,) in loader:
        step(model, optimizer, batch)
    found = counts(recording)
    assert (found["step"], found["fwd"], found["optim"]) == (6, 6, 6)


def test_inside_a_heartbeat_of_the_script_the_beat_is_the_scripts(recording, asked, model, optimizer, loader):
    """One beat per step, however many know of it."""
    pytorch.attach(model, optimizer, loader)
    for (batch,) in loader:
        with heartbeat():
            train_step(model, optimizer, batch)
    assert recording.snapshot().beats == 6


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
