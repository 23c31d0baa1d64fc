"""`adapters.deepspeed` without DeepSpeed: what it refuses, and what it makes of an engine's calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from resilience_sdk.adapters import deepspeed as resilience
from resilience_sdk.errors import ConfigError, Preempted
from resilience_sdk.numerics import watch as numerics

MICRO_BATCHES = 2


class DeepSpeedEngine(nn.Module):
    """The shape of DeepSpeed's engine, by its name: some micro-batches make a step."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.module, self.optimizer = model, optimizer
        self.global_steps = self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.checkpoint_engine = SimpleNamespace(save=lambda state_dict, path: None, is_decoupled=lambda: False)

    def forward(self, inputs):
        return self.module(inputs)

    def backward(self, loss):
        (loss / MICRO_BATCHES * 1024).backward()  # scaled, as with fp16
        self.allreduce_gradients()

    def allreduce_gradients(self):
        pass

    def is_gradient_accumulation_boundary(self):
        return (self.micro_steps + 1) % MICRO_BATCHES == 0

    def step(self):
        if self.is_gradient_accumulation_boundary():
            for _ in range(2):  # once per partition
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_steps += 1
        self.micro_steps += 1

    def gradient_accumulation_steps(self):
        return MICRO_BATCHES

    def train_batch_size(self):
        return MICRO_BATCHES

    def save_checkpoint(self, place, tag=None):
        pass

    def load_checkpoint(self, place, tag=None):
        self.global_steps = 40


class PipelineEngine(DeepSpeedEngine):
    """That of a pipeline."""


@pytest.fixture
def engine(model, optimizer):
    return DeepSpeedEngine(model, optimizer)


def attached(engine, loader):
    """What `attach` makes in a session, which no test here begins."""
    settings = SimpleNamespace(resume_check="off")
    session = SimpleNamespace(may_resume=False, identity=SimpleNamespace(rank=0), settings=settings)
    return resilience.Attached(engine, loader, session, saves=False, resumes=False)


def train(engine, loader):
    """Train for one pass."""
    for (inputs,) in loader:
        engine.backward(engine(inputs).square().mean())
        engine.step()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda engine: nn.Linear(2, 2), r"Linear.*deepspeed\.initialize"),
        (lambda engine: PipelineEngine(engine.module, engine.optimizer), r"PipelineEngine.*with heartbeat\("),
        (lambda engine: DeepSpeedEngine(engine.module, None), "no optimizer"),
        (lambda engine: changed(engine, checkpoint_engine=SimpleNamespace(is_decoupled=lambda: True)), "writes on"),
        (lambda engine: changed(engine, use_node_local_storage=lambda: True), "use_node_local_storage.*save=False"),
        (lambda engine: changed(engine, "checkpoint_engine"), r"no DeepSpeedEngine\.checkpoint_engine.*pip install"),
    ],
    ids=["model", "pipeline", "optimizer", "decoupled", "node-local", "version"],
)
def test_a_wrong_use_is_an_error_with_a_cure(engine, change, told):
    """Before the first step."""
    with pytest.raises(ConfigError, match=told):
        resilience.attach(change(engine))


def changed(engine, *without, **other):
    """An engine with other attributes, or without one."""
    for name in without:
        delattr(engine, name)
    for name, value in other.items():
        setattr(engine, name, value)
    return engine


def test_steps_are_those_of_the_engine(recording, asked, engine, loader):
    """Not those of its optimizer, which steps once per partition, nor micro-batches; also behind a load."""
    own = dict(vars(engine))
    handle = attached(engine, loader)
    with pytest.raises(ConfigError, match=r"detach\(\)"):
        resilience.attach(engine, save=False)
    train(engine, loader)
    assert (handle.step, handle.epoch, asked.checks) == (3, 1, [1, 2, 3])
    engine.load_checkpoint("somewhere")
    assert handle.step == 40
    train(engine, loader)
    assert asked.checks[3:] == [41, 42, 43]
    handle.detach()
    assert {name: vars(engine)[name] for name in own} == own | {
        "global_steps": 43, "micro_steps": 12, "_parameters": own["_parameters"],
    }  # fmt: skip
    assert set(vars(engine)) == set(own)


def test_a_loss_is_looked_at_as_the_script_has_it(recording, asked, engine, loader, monkeypatch):
    """Not as the engine scales it, nor twice, where it comes to autograd; `loss.backward()` counts as well."""
    found = {}
    monkeypatch.setattr(numerics, "is_on", lambda: True)
    watch = SimpleNamespace(note=lambda step, loss, _grad_norm, **_: found.update({step: loss}), is_waiting=False)
    monkeypatch.setattr(numerics, "watch_of_adapters", lambda: watch)
    handle = attached(engine, loader)
    told = []
    for backward in (engine.backward, torch.Tensor.backward):
        for _ in range(MICRO_BATCHES):
            loss = engine(torch.ones(2, 4)).square().mean()
            backward(loss)
            engine.step()
        told.append(MICRO_BATCHES * float(loss.detach()))
    handle.detach()
    assert found == {0: pytest.approx(told[0]), 1: pytest.approx(told[1])}


def test_a_stop_waits_for_all_that_is_made_of_a_batch(recording, asked, engine, loader):
    """Of a second engine, which calls the first one again behind its step."""
    asked.add(2)
    handle, second = attached(engine, loader), 0
    with pytest.raises(Preempted):
        for (inputs,) in loader:
            for _ in range(MICRO_BATCHES):
                engine.backward(engine(inputs).square().mean())
                engine.step()
            engine(inputs).detach()
            second += 1
    assert handle.step == second == 2
    handle.detach()


def test_a_pass_that_was_left_is_over_when_the_next_begins(recording, asked, engine, loader):
    """Epochs count passes; a step that is left out counts for the engine as one that overflows."""
    handle = attached(engine, loader)
    for _ in loader:
        break
    assert handle.epoch == 0
    for _ in loader:
        break
    assert handle.epoch == 1
    handle.leave_out_step()
    assert (handle.step, engine.global_steps, engine.skipped_steps, engine.micro_steps) == (1, 1, 1, MICRO_BATCHES)
    handle.detach()
