"""A sampler that counts its own passes is said wherever a pass begins: no state holds its number."""

from __future__ import annotations

import random

import pytest
import torch
from adapter_frameworks import require
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.adapters.accelerate.position import Position
from resilience_sdk.adapters.lightning.loaders import LoaderWatch
from resilience_sdk.adapters.transformers.place import LoaderPlace
from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.core import resume_limits
from resilience_sdk.rank.data import END, Walk, next_batch

DATA = TensorDataset(torch.arange(8.0))
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


class Counting:
    """Another order in each pass, by a number of its own."""

    def __init__(self):
        self.passes = 0

    def __len__(self):
        return 8

    def __iter__(self):
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(8), 8))


class Late(Counting):
    """Counts when its order is through."""

    def __iter__(self):
        yield from random.Random(self.passes).sample(range(8), 8)
        self.passes += 1


class Told(Counting):
    def set_epoch(self, epoch):
        self.passes = epoch


class Saved(Counting):
    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes = state["passes"]


@pytest.fixture
def noted(monkeypatch):
    """Return the limits that this test has noted."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    return lambda: [limit.thing for limit in resume_limits.limits() if limit.key == "counted passes"]


def by_steps(loader):
    walk = Walk()
    for _ in range(2):
        batches = walk.start_epoch(loader, lambda: None, is_speaker=False)
        while next_batch(batches) is not END:
            walk.batches += 1
        walk.finish_epoch()


def by_checkpointer(loader, place):
    saver = Checkpointer({"loader": loader}, run_dir=place, every=100)
    saver.resume()
    for _ in range(2):
        list(loader)


def by_lightning(loader):
    watch = LoaderWatch(loader, bool)
    for _ in range(2):
        list(loader)
    watch.restore()


def by_accelerate(loader):
    require("accelerate")
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(loader)
    position = Position(loader, 1)
    for _ in range(2):
        list(position.walk(iter(loader)))


def by_trainer(loader):
    place = LoaderPlace(loader, 0)
    samples = place.counted(lambda batches: list(batches))
    for _ in range(2):
        place.epoch_begins()
        samples(iter(loader))


WAYS = {"steps": by_steps, "lightning": by_lightning, "accelerate": by_accelerate, "trainer": by_trainer}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Counting, Late])
def test_one_that_counts_is_said(noted, way, kind):
    """In its second pass at the latest."""
    WAYS[way](DataLoader(DATA, 2, sampler=kind()))
    assert noted() == [f"the order that {kind.__name__} gives by its `passes`"]


@pytest.mark.parametrize("kind", [Counting, Late, Told, Saved])
def test_under_a_loader_with_a_state_too(noted, kind, tmp_path):
    """One that is told its pass, or saves it, is no limit."""
    by_checkpointer(StatefulDataLoader(DATA, 2, sampler=kind()), tmp_path)
    assert len(noted()) == (kind in (Counting, Late))


@pytest.mark.parametrize("sampler", [RandomSampler(DATA), DistributedSampler(DATA, 2, 0), None])
def test_those_of_torch_are_none(noted, sampler, tmp_path):
    """Nor a loader without one."""
    for way in WAYS.values():
        way(DataLoader(DATA, 2, sampler=sampler))
    by_checkpointer(StatefulDataLoader(DATA, 2, sampler=sampler), tmp_path)
    assert noted() == []
