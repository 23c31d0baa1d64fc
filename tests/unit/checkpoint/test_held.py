"""Generators that a model, an optimizer or a callback holds: found without a call, saved, and set as at the save."""

import functools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from resilience_sdk.checkpoint import Checkpointer, generators_below
from resilience_sdk.checkpoint.generators import find_generators
from resilience_sdk.checkpoint.generators_below import held_generators
from resilience_sdk.core import resume_limits

OF_MODULE = random.Random(9)


class Slotted:
    """A helper whose attribute is in a slot."""

    __slots__ = ("none_yet", "rng")

    def __init__(self):
        self.rng = random.Random(1)


class Noise(nn.Module):
    """Draws from a generator of each kind, each held in another way."""

    of_class = numpy.random.RandomState(2)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.random, self.legacy = random.Random(3), numpy.random.RandomState(3)
        self.newer = numpy.random.default_rng(3)
        self.torch = torch.Generator().manual_seed(3)
        self.drawn = [functools.partial(self.given, rng=random.Random(4))]
        self.slotted, self.system, self.process = Slotted(), random.SystemRandom(), torch.default_generator
        hooked = random.Random(5)
        self.layer.register_forward_hook(lambda *_: self.log.append(hooked.random()))
        self.log = []

    @staticmethod
    def given(rng):
        return rng.random()

    @property
    def forbidden(self):
        raise AssertionError("a property was called")

    def forward(self, x):
        self.layer(x)
        drawn = [self.random.gauss(0, 1), self.legacy.standard_normal(), self.newer.random(), self.of_class.rand()]
        drawn += [torch.rand((), generator=self.torch).item(), self.drawn[0](), self.slotted.rng.random()]
        drawn += [OF_MODULE.random() for _ in range(1)]
        return [*drawn, self.log.pop()]


class Net(nn.Module):
    """Has one somewhere inside, compiled or not."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.ReLU(), wrap(Noise()))])

    def forward(self, x):
        return self.blocks[0][1](x)


def test_each_way_of_holding_one_is_found():
    """Attributes of inner modules, classes, slots, partials and hooks, and what a method's comprehension names."""
    found = held_generators({"model": Net()})
    place = "model.blocks.0.1."
    names = ["random", "legacy", "newer", "torch", "of_class", "forward.OF_MODULE", "slotted.rng"]
    names += ["drawn.0.keywords.rng", "layer._forward_hooks"]
    left = [name.removeprefix(place) for name in found]
    assert {*names[:-2]} <= {*left}
    assert len(left) == len(names)


@pytest.mark.parametrize("holder", ["module", "wrapped", "optimizer", "scheduler", "own"])
def test_a_resume_sets_them(tmp_path, holder):
    """In a module, below a wrapper of torch.compile, and in what else is in the state."""

    def made():
        OF_MODULE.seed(9)
        Noise.of_class.seed(2)
        net = Net()
        model = torch.compile(net, backend="eager") if holder == "wrapped" else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        noise = net if holder == "scheduler" else None
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: float(noise is not optimizer))
        own = SimpleNamespace(state_dict=dict, load_state_dict=lambda _: None)
        if holder not in ("module", "wrapped"):
            model = nn.Linear(1, 1)
        if holder in ("optimizer", "own"):
            {"optimizer": optimizer, "own": own}[holder].noise = net.blocks[0][1]
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "own": own}
        return net, Checkpointer(state, run_dir=tmp_path, every=1000)

    x = torch.zeros(1, 1)
    net, saver = made()
    assert saver.resume() == 0
    net(x)
    saver.save(1)
    straight = [net(x) for _ in range(3)]
    net, saver = made()
    assert saver.resume() == 1
    assert [net(x) for _ in range(3)] == straight
    saver.restore_rng()
    assert [net(x) for _ in range(3)] == straight


def test_one_that_is_not_there_is_said(tmp_path, monkeypatch):
    """The program has changed, or makes it later."""
    said = []
    monkeypatch.setattr("resilience_sdk.checkpoint.held.note", lambda *words: said.append(words[1]))
    model = nn.Linear(1, 1)
    model.rng = random.Random(1)
    Checkpointer({"model": model}, run_dir=tmp_path, every=1000).save(1)
    Checkpointer({"model": nn.Linear(1, 1)}, run_dir=tmp_path, every=1000).resume()
    assert said == ["the generator model.rng"]


def test_one_that_an_object_gets_late_is_saved(tmp_path):
    """Such as in the first forward."""
    model = nn.Linear(1, 1)
    saver = Checkpointer({"model": model}, run_dir=tmp_path, every=1000)
    saver.resume()
    model.rng = random.Random(1)
    model.rng.random()
    saver.save(1)
    wanted = model.rng.random()
    model = nn.Linear(1, 1)
    model.rng = random.Random(7)
    Checkpointer({"model": model}, run_dir=tmp_path, every=1000).resume()
    assert model.rng.random() == wanted


class Jitter(nn.Module):
    """A transform that is a module, as those of torchvision are."""

    def __init__(self):
        super().__init__()
        self.rng = torch.Generator()


def augment(rows):
    """A function that a collate function calls."""
    return OF_MODULE.random()


def collate(rows):
    """Names its generator in a function that it calls."""
    return [augment(row) for row in rows]


def test_transforms_that_are_modules_and_functions_that_are_called_are_looked_through():
    """Of a loader, too."""
    data = SimpleNamespace(transform=nn.Sequential(nn.Identity(), Jitter()))
    found = find_generators(SimpleNamespace(dataset=data, collate_fn=collate))
    assert list(found) == ["dataset.transform.1.rng", "collate_fn.augment.OF_MODULE"]


@pytest.mark.parametrize("limit", [100, 10_000])
def test_a_large_model_takes_nothing_from_what_comes_behind_it(monkeypatch, limit):
    """Each has as many objects that are looked at; what was left out is said, with what to do."""
    monkeypatch.setattr(generators_below, "_MAX_OF_MODULES", limit)
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    deep = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1)) for _ in range(200)])
    deep[199][0].own = random.Random(1)
    model, callback = nn.Sequential(deep, Noise()), SimpleNamespace(own=random.Random(2))
    found = held_generators({"model": model, "callback 0": callback})
    assert found["callback 0.own"] is callback.own
    assert ("model.0.199.0.own" in found) is (limit == 10_000)
    said = [one.words() for one in resume_limits.limits()]
    assert len(said) == (limit == 100)
    assert all("a generator that lies deep in model: more than 100 objects are below it" in line for line in said)
