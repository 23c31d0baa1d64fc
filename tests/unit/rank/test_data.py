from __future__ import annotations

import random
import tempfile
import types
import warnings

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import SAMPLES, Augmented, Stateful
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.core import resume_limits
from resilience_sdk.rank.data import END, Walk, has_state, next_batch

EPOCHS = 3


class Stream(IterableDataset):
    def __iter__(self):
        for index in torch.randperm(SAMPLES).tolist():
            yield index + torch.rand(()).item()


class ByEpoch:
    """A loader whose order depends on the epoch it is told."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(SAMPLES, generator=generator).tolist())


def own_generator():
    return DataLoader(Augmented(), shuffle=True, generator=torch.Generator().manual_seed(9))


def own_sampler():
    sampler = RandomSampler(Augmented(), replacement=True, generator=torch.Generator().manual_seed(8))
    return DataLoader(Augmented(), sampler=sampler)


class Shuffled(Sampler):
    """A sampler that draws each order by itself, with Python's or numpy's generators."""

    def __init__(self, generator):
        self.own = generator

    def __iter__(self):
        order = list(range(SAMPLES))
        self.own.shuffle(order)
        return iter(order)

    def __len__(self):
        return SAMPLES


class Permuted(Shuffled):
    """One that draws each order from the generator of the process, when it is asked for an iterator."""

    def __init__(self):
        super().__init__(None)

    def __iter__(self):
        return iter(torch.randperm(SAMPLES).tolist())


class InBatches(Shuffled):
    """A batch sampler, with batches of one."""

    def __iter__(self):
        return iter([[index] for index in super().__iter__()])


class Noisy(Augmented):
    """Items to which a generator of the data set's own adds something."""

    def __init__(self):
        self.noise = torch.Generator().manual_seed(2)

    def __getitem__(self, index):
        return index + torch.rand((), generator=self.noise).item()


def torchdatas(data, **options):
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(data, **options)


LOADERS = {
    "Python's generator": lambda: DataLoader(Augmented(), sampler=Shuffled(random.Random(1))),
    "numpy's generator": lambda: DataLoader(Augmented(), sampler=Shuffled(numpy.random.default_rng(1))),
    "torchdata": lambda: torchdatas(Augmented(), shuffle=True),
    "torchdata, sampler that draws at once": lambda: torchdatas(Augmented(), sampler=Shuffled(random.Random(1))),
    "torchdata, drawing from the process": lambda: torchdatas(Augmented(), sampler=Permuted()),
    "torchdata, batch sampler": lambda: torchdatas(Augmented(), batch_sampler=InBatches(random.Random(1))),
    "torchdata, sampler of torch": lambda: torchdatas(Noisy(), sampler=RandomSampler(range(SAMPLES))),
    "shuffled": lambda: DataLoader(Augmented(), shuffle=True),
    "own generator": own_generator,
    "own sampler": own_sampler,
    "stream": lambda: DataLoader(Stream()),
    "stateful": Stateful,
    "by epoch": ByEpoch,
    "list": lambda: [torch.tensor(value) for value in range(SAMPLES)],
}


def walk_through(run_dir, make_loader, *, save_at=None, resume=False):
    """Walk all epochs, drawing a number at each step as a model would; return what was seen, from step to step."""
    torch.manual_seed(4)
    loader, walk, seen, step = make_loader(), Walk(), [], 0
    checkpointer = Checkpointer({"weight": torch.zeros(1)}, run_dir=run_dir, every=1000)
    checkpointer.position = walk
    if resume:
        step = checkpointer.resume()
        torch.rand(3)  # a program that draws before its loop must not shift anything
    while walk.epoch < EPOCHS:
        if hasattr(loader, "state_dict"):
            checkpointer.add_data("loader", loader)
        batches = walk.start_epoch(loader, checkpointer.restore_rng, is_speaker=False)
        while (batch := next_batch(batches)) is not END:
            seen.append((step, walk.epoch, float(batch), torch.rand(()).item()))
            walk.batches += 1
            step += 1
            if step == save_at:
                checkpointer.save(step)
        walk.finish_epoch()
    return seen


@pytest.mark.parametrize("name", LOADERS)
@settings(max_examples=6, deadline=None)
@given(save_at=st.integers(1, SAMPLES * EPOCHS))
def test_what_follows_a_save_is_the_same_after_a_resume(name, save_at):
    """For any loader and any step of any epoch, its last one too, batches and draws go on as if nothing happened."""
    with tempfile.TemporaryDirectory() as run_dir:
        seen = walk_through(run_dir, LOADERS[name], save_at=save_at)
        assert len(seen) == SAMPLES * EPOCHS
        assert walk_through(run_dir, LOADERS[name], resume=True) == seen[save_at:]


def test_a_complete_epoch_is_not_read_again():
    """A position at the end of an epoch is saved as the start of the next, where the length tells."""
    walk = Walk()
    loader = LOADERS["shuffled"]()
    batches = walk.start_epoch(loader, lambda: None, is_speaker=False)
    for _ in range(SAMPLES):
        next_batch(batches)
        walk.batches += 1
    saved = walk.capture()
    assert (saved["epoch"], saved["batches"]) == (1, 0)


@pytest.mark.parametrize(("saved_ranks", "ranks", "batches"), [(2, 4, 5), (4, 2, 20), (3, 2, 15)])
def test_another_number_of_ranks_skips_no_sample(saved_ranks, ranks, batches):
    """With twice the ranks, half the batches per rank are done; never more than were."""
    walk = Walk()
    walk.restore({"epoch": 2, "batches": 10, "rng": None}, saved_ranks, ranks)
    assert (walk.epoch, walk.batches) == (2, batches)


def test_a_loader_that_became_shorter_ends_its_epoch(capsys):
    """Data that shrank between two attempts is said, and the epoch is over."""
    walk = Walk()
    walk.restore({"epoch": 0, "batches": 4, "rng": None}, 1, 1)
    batches = walk.start_epoch([1, 2], lambda: None, is_speaker=True)
    assert next_batch(batches) is END
    assert "only 2 batches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "told", "advised"),
    [
        (lambda: range(4), False, False),
        (lambda: [1, 2, 3], False, False),
        (ByEpoch, True, False),
        (lambda: DataLoader(Augmented()), True, True),
    ],
)
def test_only_what_takes_time_is_told_and_only_what_helps_is_advised(make, told, advised, capsys):
    """A list is read again in no time; another loader than torch's has no use for one that stands in for torch's."""
    walk = Walk()
    walk.restore({"epoch": 0, "batches": 2, "rng": None}, 1, 1)
    batches = walk.start_epoch(make(), lambda: None, is_speaker=True)
    assert next_batch(batches) is not END
    said = capsys.readouterr().err
    assert ("reading its first 2 batches" in said) is told
    assert ("StatefulDataLoader" in said) is advised


@pytest.mark.parametrize("is_stateful", [None, False, True])
def test_a_loader_of_accelerate_that_has_no_state_is_read_again(is_stateful):
    """It has `state_dict` in any case, and says apart whether that works."""
    loader = types.SimpleNamespace(state_dict=dict)
    if is_stateful is not None:
        loader.use_stateful_dataloader = is_stateful
    assert has_state(loader) is (is_stateful is not False)


@pytest.mark.parametrize(("size", "first"), [(1, 6), (3, 6), (4, 4), (2, 6)])
def test_another_batch_size_skips_no_sample(size, first, monkeypatch):
    """The place is counted in samples then, and goes to the nearest batch before it."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    walk = Walk()
    walk.restore({"epoch": 0, "batches": 3, "rng": None, "sizes": {"batch": 2, "samples": 12}}, 1, 1)
    batches = walk.start_epoch(DataLoader(range(12), size), lambda: None, is_speaker=False)
    assert next_batch(batches)[0] == first
    assert ("other batch" in {one.key for one in resume_limits.limits()}) is (size != 2)


def test_data_of_another_length_are_said(monkeypatch):
    """Their order is another one, so that some samples come twice."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    walk = Walk()
    walk.restore({"epoch": 0, "batches": 3, "rng": None, "sizes": {"batch": 2, "samples": 12}}, 1, 1)
    walk.start_epoch(DataLoader(range(14), 2), lambda: None, is_speaker=False)
    assert "other length" in {one.key for one in resume_limits.limits()}
