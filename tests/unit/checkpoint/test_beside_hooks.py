"""What the program's hooks keep from step to step: said where a training changes it, and not where it is saved."""

from __future__ import annotations

import collections
import functools
import time

import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.beside_hooks import beside_hooks, hooks_of_modules
from resilience_sdk.core import resume_limits


class AutoClip:
    """Clips at a percentile of the norms so far."""

    def __init__(self, history=None):
        self.history, self.percentile, self.last = [] if history is None else history, 10, 0.0

    def __call__(self, optimizer, *_):
        weights = [one for group in optimizer.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in weights]).norm().item()
        self.history.append(norm)
        self.last = sorted(self.history)[len(self.history) * self.percentile // 100]
        nn.utils.clip_grad_norm_(weights, sorted(self.history)[0])


class Saved(AutoClip):
    """Can be put into the state."""

    def state_dict(self):
        return {"history": self.history}

    def load_state_dict(self, state):
        self.history = state["history"]


class ZClip:
    """Called by a hook; mean and variance."""

    def __init__(self):
        self.mean, self.initialized = 0.0, False

    def step(self, weights):
        norm = torch.stack([one.grad.norm() for one in weights]).norm().item()
        self.mean, self.initialized = 0.9 * self.mean + 0.1 * norm, True
        nn.utils.clip_grad_norm_(weights, self.mean)


class Program:
    """Holds the whole training, of which its hook keeps one thing."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step, self.losses, self.scale = model, optimizer, 0, [], 1.0
        self.clip = ZClip()

    def before_step(self, *_):
        self.losses.append(0.0)
        if self.step < 100:
            self.scale = 0.5 * self.scale + 0.1
            self.clip.step(list(self.model.parameters()))


def of_optimizer(hook):
    return lambda model, optimizer: optimizer.register_step_pre_hook(hook)


def by_closure(model, optimizer):
    count, norms, sizes = 0, collections.deque(maxlen=50), {}

    def hook(*_):
        nonlocal count
        count += 1
        norms.append(count)
        sizes["now"] = count  # for whoever logs it
        for one in model.parameters():
            one.grad /= len(norms)

    optimizer.register_step_pre_hook(hook)


def of_tensor(model, optimizer):
    mean = torch.zeros(1)

    def hook(grad):
        mean.mul_(0.9).add_(grad.abs().mean(), alpha=0.1)
        return grad / (1 + mean)

    model.weight.register_hook(hook)


def of_activations(model, optimizer):
    """Keeps what each call overwrites."""
    features, plain = {}, {}

    def hook(module, inputs, output):
        features["out"] = output
        plain["out"] = output.detach()

    model.register_forward_hook(hook)


def of_module(model, optimizer):
    model.register_forward_hook(functools.partial(count_calls, store={"calls": 0}))


def count_calls(module, inputs, output, store):
    store["calls"] += 1
    return output * (1 + 0.01 * store["calls"])


def of_program(model, optimizer):
    optimizer.register_step_pre_hook(Program(model, optimizer).before_step)


_norms = []


def of_script(model, optimizer):
    optimizer.register_step_post_hook(lambda *_: _norms.append(len(_norms)))


def constant(model, optimizer):
    """Changes nothing."""
    limits = {"low": 0.1}

    def hook(*_):
        nn.utils.clip_grad_norm_(model.parameters(), limits["low"])

    optimizer.register_step_pre_hook(hook)
    model.register_forward_hook(lambda module, inputs, output: output * limits["low"])


KINDS = {
    "object": (lambda m, o: o.register_step_pre_hook(AutoClip()), "AutoClip.history of the hooks on optimizer"),
    "closure": (by_closure, "hook: norms, hook: count of the hooks on optimizer"),
    "tensor": (of_tensor, "hook: mean of the hooks on model"),
    "partial": (of_module, "count_calls: store of the hooks on model"),
    "program": (
        of_program,
        "Program.losses, Program.scale, Program.clip.mean of the hooks on optimizer",
    ),
    "script": (of_script, "<lambda>: _norms of the hooks on optimizer"),
    "activations": (of_activations, None),
    "constant": (constant, None),
}


def train(path, make, steps=6, more=dict):
    torch.manual_seed(1)
    _norms.clear()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer, **more()}
    make(model, optimizer)
    saver = Checkpointer(state, run_dir=path, every=2)
    begin = saver.resume()
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        model(torch.rand(4, 2)).mean().backward()
        optimizer.step()
        saver.maybe_save(step + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_hooks_keep_is_said_at_the_start_and_at_the_resume(tmp_path, monkeypatch, kind):
    """And what they do not keep is not."""
    make, words = KINDS[kind]
    for _ in range(2):
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        train(tmp_path, make)
        found = [limit.thing for limit in resume_limits.limits()]
        assert [sorted(thing.partition(" of the hooks")[0].split(", ")) for thing in found] == (
            [] if words is None else [sorted(words.partition(" of the hooks")[0].split(", "))]
        )
        assert all(thing.endswith(str(words).partition(" of the")[2]) for thing in found)


@pytest.mark.parametrize("kind", ["deque", "object"])
def test_what_is_in_the_state_is_not_said(tmp_path, monkeypatch, kind):
    """A deque of its object, or an object with a state."""
    for _ in range(2):
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        history = collections.deque(maxlen=50)
        clip = AutoClip(history) if kind == "deque" else Saved()
        entry = history if kind == "deque" else clip
        train(tmp_path, lambda m, o, clip=clip: o.register_step_pre_hook(clip), more=lambda entry=entry: {"h": entry})
        assert not resume_limits.limits()


def test_hooks_are_looked_at_in_a_millisecond():
    """Of a model with many parts, each with a hook: it is done at saves."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1000)))
    for part in model:
        store = {"calls": 0}
        part.register_forward_hook(functools.partial(count_calls, store=store))
    beside_hooks(hooks_of_modules(model.modules()), ())
    spent = []
    for _ in range(5):
        began = time.process_time()
        beside_hooks(hooks_of_modules(model.modules()), ())
        spent.append(time.process_time() - began)
    assert min(spent) < 0.05
