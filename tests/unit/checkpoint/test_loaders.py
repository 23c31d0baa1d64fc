from __future__ import annotations

import itertools
import random
import weakref
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from resilience_sdk.checkpoint import Checkpointer, loaders
from resilience_sdk.checkpoint.loaders import note_workers, offer, withdraw
from resilience_sdk.core import resume_limits

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

# torchdata 0.11 calls what torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def noted(monkeypatch):
    """Return the keys of the limits that this test has noted."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    return lambda: [limit.key for limit in resume_limits.limits()]


def loader(workers):
    torch.manual_seed(5)
    return stateful.StatefulDataLoader(list(range(40)), batch_size=3, shuffle=True, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_behind_its_last_batch(tmp_path, workers):
    """Shuffled order and position come back, also with worker processes; no batch is read again or left out."""
    data = loader(workers)
    batches = iter(data)
    seen = [next(batches).tolist() for _ in range(5)]
    assert Checkpointer({"data": data}, run_dir=tmp_path).save(5)
    rest = [batch.tolist() for batch in batches]
    data = loader(workers)
    torch.manual_seed(99)  # the order comes from the checkpoint, not from here
    assert Checkpointer({"data": data}, run_dir=tmp_path).resume() == 5
    assert [batch.tolist() for batch in data] == rest
    assert sorted(itertools.chain(*seen, *rest)) == list(range(40))


def test_an_order_of_workers_that_nothing_repeats_is_said(noted):
    """They give their batches as they come."""
    note_workers(DataLoader(list(range(4)), num_workers=1, in_order=False))
    assert noted() == ["order of workers"]


def drawn_by(kind):
    return {"python": random.random, "numpy": numpy.random.random, "torch": lambda: torch.rand(()).item()}[kind]()


class Samples(torch.utils.data.Dataset):
    """Eight samples; `what` is drawn for each, from this number on."""

    def __init__(self, what, first=0):
        self.what, self.first = what, first

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + (drawn_by(self.what) if self.what and index >= self.first else 0)


class Shuffled(torch.utils.data.IterableDataset):
    """Draws its order alone, before the first sample."""

    def __iter__(self):
        order = list(range(8))
        random.shuffle(order)
        return iter(order)


class Holding(Samples):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__(None)
        self.own = random.Random(2)


def seeded(_worker):
    random.seed(5)
    numpy.random.seed(5)


PERSISTENT = {"persistent_workers": True}
STATEFUL = {"kind": stateful.StatefulDataLoader}
DRAWS = {
    "none": (Samples(None), PERSISTENT, 0),
    "none, seeded": (Samples(None), {**PERSISTENT, "worker_init_fn": seeded}, 0),
    "none, with a state": (Samples(None), STATEFUL, 0),
    "none, spawned": (list(range(8)), {**PERSISTENT, "multiprocessing_context": "spawn"}, 0),
    "read again": (Samples("numpy"), {}, 0),
    "in this process": (Samples("numpy"), {**STATEFUL, "num_workers": 0}, 0),
    "python": (Samples("python"), PERSISTENT, 1),
    "numpy": (Samples("numpy"), STATEFUL, 1),
    "torch": (Samples("torch"), STATEFUL, 1),
    "a late one": (Samples("torch", 7), STATEFUL, 1),
    "one batch of each worker": (Samples("numpy"), {**STATEFUL, "num_workers": 2, "batch_size": 4}, 1),
    "an order": (Shuffled(), PERSISTENT, 1),
    "seeded": (Samples("python"), {**PERSISTENT, "worker_init_fn": seeded}, 1),
    "a generator of its own": (Holding(), STATEFUL, 2),
}


def worked(data, kind=DataLoader, **options):
    return kind(data, **{"num_workers": 1, "batch_size": 2, **options})


@pytest.mark.parametrize("name", DRAWS)
def test_workers_are_said_that_draw_what_nothing_repeats(tmp_path, noted, monkeypatch, name):
    """At a save, and at the resume; not where nothing is drawn. Of generators of the data nobody knows whether."""
    data, options, said = DRAWS[name]
    limits = [] if not said else ["augmentation in workers"]
    for attempt in (1, 2):
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        loader = worked(data, **options)
        saver = Checkpointer({"data": loader} if "kind" in options else {}, run_dir=tmp_path)
        if "kind" not in options:
            saver.position = SimpleNamespace(capture=dict, restore=lambda *_: None)
        saver.resume()
        if "kind" not in options:
            saver.note_walked(loader)
        assert noted() == (limits if attempt == 2 or said == 2 else [])
        list(loader)
        saver.save(attempt)
        assert noted() == limits


def test_a_second_loader_of_the_same_loop_is_looked_into(tmp_path, noted):
    """As one that is made for each stage of a training."""
    saver = Checkpointer({}, run_dir=tmp_path)
    saver.position = SimpleNamespace(capture=dict)
    saver.resume()
    for step, (what, limits) in enumerate([(None, []), ("numpy", ["augmentation in workers"])], 1):
        saver.note_walked(loader := worked(Samples(what), **PERSISTENT))
        list(loader)
        saver.save(step)
        assert noted() == limits


def plain():
    return DataLoader(list(range(4)))


def walked(tmp_path, state, loader):
    """Have somebody else count the batches of `loader`, as `run.steps` does."""
    saver = Checkpointer(state, run_dir=tmp_path)
    saver.position = SimpleNamespace(capture=dict)
    saver.resume()
    saver.note_walked(loader)


class Skipping(Sampler):
    """Goes on from its place by itself."""

    done = 0

    def __iter__(self):
        for index in range(self.done, 8):
            self.done = index + 1
            yield index

    def __len__(self):
        return 8

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


@pytest.mark.parametrize("kind", ["plain", "batches", "stateful", "another's"])
def test_a_sampler_that_is_brought_back_beside_what_is_read_again_is_said(tmp_path, noted, kind):
    """By both it would leave out twice as many batches; a loader with a state does it once."""
    sampler = Skipping()
    made = {
        "plain": lambda: DataLoader(range(8), 2, sampler=sampler),
        "batches": lambda: DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
        "stateful": lambda: stateful.StatefulDataLoader(range(8), 2, sampler=sampler),
        "another's": lambda: DataLoader(range(8), 2),
    }
    Checkpointer({"order": sampler}, run_dir=tmp_path).note_walked(made[kind]())
    assert noted() == (["sampler:order"] if kind in ("plain", "batches") else [])
    if noted():
        assert resume_limits.limits()[0].cure.startswith("leave 'order' out of state")


def test_several_loaders_that_are_counted_as_one_are_said(tmp_path, noted):
    """What `zip` and `cycle` keep is not saved; and `cycle` gives out what it has read before."""
    walked(tmp_path, {}, zip(plain(), itertools.cycle(plain()), strict=False))
    assert noted() == ["steps iterator"]


def test_a_second_loader_whose_place_nobody_counts_is_said(tmp_path, noted):
    """The first one's is counted, and one with a state is saved."""
    first, second = plain(), plain()
    walked(tmp_path, {"first": first, "second": second, "third": loader(0)}, first)
    assert noted() == ["state:second"]


def test_a_loader_whose_place_a_checkpointer_cannot_keep_is_said(tmp_path, noted):
    """Whether it is in `state` or was given to `attach`: nobody counts the batches of a loop of one's own."""
    offered, kept = plain(), loader(0)
    for one in (offered, kept):
        offer(one)
    Checkpointer({"data": plain()}, run_dir=tmp_path).resume()
    for one in (offered, kept):
        withdraw(one)
    assert sorted(noted()) == ["attached loader", "state:data"]


@pytest.fixture
def attempt(tmp_path, noted, monkeypatch):
    """Return what makes a new process's `Checkpointer` and loader, which is attached behind the resume or before it."""
    attached = []

    def begin(options, *, is_early):
        for one in attached:
            withdraw(one)
        monkeypatch.setattr(loaders, "_takers", weakref.WeakSet())  # those of attempts before would take it, too
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        data, saver = DataLoader(list(range(8)), **options), Checkpointer({}, run_dir=tmp_path)
        attached.append(data)
        if is_early:
            offer(data)
        saver.resume()
        if not is_early:
            offer(data)
        return saver, data

    yield begin
    for one in attached:
        withdraw(one)


@pytest.mark.parametrize("is_early", [True, False], ids=["attached early", "attached behind the resume"])
@pytest.mark.parametrize(
    ("batches", "options", "limits"),
    [
        (8, {"shuffle": True}, []),
        (8, {"sampler": torch.utils.data.DistributedSampler(range(8), 1, 0)}, []),
        (3, {"shuffle": True}, ["attached loader"]),
        (8, {"shuffle": True, "generator": torch.Generator()}, ["attached loader"]),
        (8, {"num_workers": 1, "persistent_workers": True}, ["attached loader"]),
    ],
)
def test_a_save_between_two_passes_loses_no_place(attempt, noted, batches, options, limits, is_early):
    """Unless its next pass depends on more than `set_epoch` and the generators of the process. The start says it."""
    saver, data = attempt(options, is_early=is_early)
    assert noted() == ["attached loader"]
    assert len([batch for batch, _ in zip(data, range(batches + 1), strict=False)]) >= batches
    if batches < 8:
        given = iter(data)
        next(given)
    assert saver.save(1)
    attempt(options, is_early=is_early)
    assert noted() == limits


def test_the_same_holds_for_a_plain_loader_in_the_state(tmp_path, noted, monkeypatch):
    """Nothing of it is saved, and nothing has to be."""
    for expected in (["state:data"], []):
        monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
        data = DataLoader(list(range(8)), shuffle=True)
        saver = Checkpointer({"data": data}, run_dir=tmp_path)
        saver.resume()
        assert noted() == expected
        assert len(list(data)) == 8
        saver.save(1)
