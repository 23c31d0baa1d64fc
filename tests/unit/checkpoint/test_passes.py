from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from loaders import SAMPLES, Augmented, Stateful
from torch.utils.data import RandomSampler, Sampler

from resilience_sdk.checkpoint import Checkpointer
from resilience_sdk.checkpoint.generators import find_generators, set_rng, take_rng
from resilience_sdk.checkpoint.loaders import offer, withdraw
from resilience_sdk.core import resume_limits

stateful = pytest.importorskip("torchdata.stateful_dataloader")
EPOCHS = 3
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'", "ignore:Neither dataset")


def plain_order(workers=0, persistent=False):
    """Return a loader whose order is drawn from the generator of the process."""
    options = {"num_workers": workers, "persistent_workers": persistent}
    return stateful.StatefulDataLoader(Augmented(), batch_size=2, sampler=RandomSampler(range(SAMPLES)), **options)


def own_order():
    """Return a loader with torchdata's own sampler, which has a generator."""
    return stateful.StatefulDataLoader(Augmented(), batch_size=2, shuffle=True)


def seeded_order():
    """Return one with a generator of the program's own."""
    generator = torch.Generator().manual_seed(3)
    return stateful.StatefulDataLoader(
        Augmented(), batch_size=2, sampler=RandomSampler(range(SAMPLES), generator=generator)
    )


class AtOnce(Sampler):
    """Draws an order from a generator of its own and from that of the process, when it is asked for an iterator."""

    def __init__(self):
        self.own = random.Random(2)

    def __iter__(self):
        order = torch.randperm(SAMPLES).tolist()
        self.own.shuffle(order)
        return iter(order)

    def __len__(self):
        return SAMPLES


def order_at_once(workers=0):
    """Return a loader whose sampler has drawn the order before the first batch is asked for."""
    return stateful.StatefulDataLoader(Augmented(), batch_size=2, sampler=AtOnce(), num_workers=workers)


MAKERS = {
    "plain": plain_order,
    "own": own_order,
    "seeded": seeded_order,
    "at once": order_at_once,
    "a class": Stateful,
}


def begun(make):
    torch.manual_seed(1)
    return make()


def train(loader, saver=None, step=0, save_at=None, second=None):
    """Return what each step saw and drew, until a save behind so many steps, or behind so many epochs (negative)."""
    seen = []
    first = 0 if saver is None else saver.values.get("pass", 0)
    for epoch in range(first, EPOCHS):
        if saver is not None:
            saver.values["pass"] = epoch
        others = None if second is None else iter(second)
        for batch in loader:
            other = None if others is None else next(others, None)
            seen.append((repr(batch), repr(other), torch.rand(()).item()))
            step += 1
            if step == save_at:
                saver.save(step)
                return seen
        torch.rand(2)
        if saver is not None and -save_at == epoch + 1:
            saver.values["pass"] = epoch + 1
            saver.save(step)
            return seen
    return seen


@pytest.mark.parametrize("save_at", [1, 2, 3, 4, -1, -2])
@pytest.mark.parametrize("name", MAKERS)
def test_a_resume_draws_what_it_would_have_drawn(tmp_path, name, save_at):
    """Orders, augmentation and what the loop draws: within a pass, behind its last batch and between two passes."""
    whole = train(begun(MAKERS[name]))
    loader = begun(MAKERS[name])
    saver = Checkpointer({}, run_dir=tmp_path, every=1000)
    saver.add_data("loader", loader)
    assert saver.resume() == 0
    before = train(loader, saver, save_at=save_at)
    saver = Checkpointer({"loader": (loader := begun(MAKERS[name]))}, run_dir=tmp_path, every=1000)
    torch.rand(5)  # the start of another process
    step = saver.resume()
    assert step == len(before)
    assert before + train(loader, saver, step, save_at=0) == whole


def test_workers_go_on_in_an_order_that_was_drawn_at_once(tmp_path):
    """A loader with workers asks its sampler twice, and twice again when it goes back; what they read is the same."""

    def samples(seen):
        return [batch.partition(".")[0] for batch, *_ in seen]

    whole = train(begun(lambda: order_at_once(1)))
    loader = begun(lambda: order_at_once(1))
    saver = Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000)
    saver.resume()
    before = train(loader, saver, save_at=4)
    loader = begun(lambda: order_at_once(1))
    saver = Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000)
    assert samples(before + train(loader, saver, saver.resume(), save_at=0)) == samples(whole)


@pytest.mark.parametrize(("size", "more", "said"), [(2, 0, set()), (3, 0, {"other batch"}), (2, 2, {"other length"})])
def test_another_batch_or_length_within_a_pass_is_said(tmp_path, monkeypatch, size, more, said):
    """The place is a number of batches in an order that is another one for it."""
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())

    def made(size, length):
        return stateful.StatefulDataLoader(range(length), batch_size=size, sampler=RandomSampler(range(length)))

    loader = made(2, SAMPLES)
    saver = Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000)
    saver.resume()
    next(iter(loader))
    saver.save(1)
    loader = made(size, SAMPLES + more)
    assert Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000).resume() == 1
    next(iter(loader))
    assert {one.key for one in resume_limits.limits()} == said


@pytest.mark.parametrize(
    ("values", "said"),
    [({}, True), ({"best": 3}, True), ({"epoch": 0}, False), ({"run": {"start_epoch": 0}}, False)],
    ids=["nothing", "another number", "the epoch", "the epoch further down"],
)
def test_a_pass_without_batches_is_said_to_a_loop_that_does_not_save_its_epoch(tmp_path, monkeypatch, values, said):
    """One that saves it knows that the pass is the end of that epoch."""
    saver = Checkpointer({"loader": (loader := own_order())}, run_dir=tmp_path, every=1000)
    saver.resume()
    saver.values.update(values)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    saver.save(len(loader))
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    saver = Checkpointer({"loader": (loader := own_order())}, run_dir=tmp_path, every=1000)
    saver.resume()
    assert list(loader) == []
    assert [limit.key for limit in resume_limits.limits()] == ["empty pass"] * said


@pytest.mark.parametrize("save_at", [2, 4])
def test_two_loaders(tmp_path, save_at):
    """The generators of the process are set once, and by the first batch of all."""
    whole = train(begun(plain_order), second=own_order())
    torch.manual_seed(1)
    loader, second = plain_order(), own_order()
    saver = Checkpointer({"loader": loader, "second": second}, run_dir=tmp_path, every=1000)
    saver.resume()
    before = train(loader, saver, save_at=save_at, second=second)
    torch.manual_seed(1)
    loader, second = plain_order(), own_order()
    saver = Checkpointer({"loader": loader, "second": second}, run_dir=tmp_path, every=1000)
    step = saver.resume()
    assert before + train(loader, saver, step, save_at=0, second=second) == whole


def test_a_loader_given_to_attach_travels_along(tmp_path):
    """Whether the checkpointer is made before or after it."""
    whole = train(begun(plain_order))
    loader = begun(plain_order)
    offer(loader)
    saver = Checkpointer({}, run_dir=tmp_path, every=1000)
    saver.resume()
    before = train(loader, saver, save_at=2)
    withdraw(loader)
    loader = begun(plain_order)
    saver = Checkpointer({}, run_dir=tmp_path, every=1000)
    step = saver.resume()
    offer(loader)
    assert before + train(loader, saver, step, save_at=0) == whole
    withdraw(loader)


def test_a_checkpoint_of_an_older_version_is_resumed(tmp_path, monkeypatch):
    """It does not say how a pass began; the generators are set before its first batch all the same."""
    from resilience_sdk.checkpoint.passes import PassWatch

    whole = train(begun(own_order))
    loader = begun(own_order)
    saver = Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000)
    saver.resume()
    with monkeypatch.context() as patched:
        patched.setattr(PassWatch, "capture", lambda _: None)
        before = train(loader, saver, save_at=2)
    loader = begun(own_order)
    saver = Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000)
    assert before + train(loader, saver, saver.resume(), save_at=0) == whole


class Holder:
    """A sampler with generators of its own."""

    def __init__(self):
        self.random, self.legacy = random.Random(3), numpy.random.RandomState(3)
        self.generators = [numpy.random.Generator(kind(3)) for kind in (numpy.random.PCG64, numpy.random.Philox)]
        self.newer, self.counting = self.generators
        self.torch = torch.Generator().manual_seed(3)
        self.process = torch.default_generator

    def draw(self):
        numbers = [self.random.random(), self.random.gauss(0, 1), self.legacy.standard_normal(), self.newer.random()]
        return [*numbers, self.counting.random(), torch.rand((), generator=self.torch).item()]


def test_generators_that_a_sampler_holds_are_restored():
    """Those of Python and numpy, as well as torch's, and no others."""

    class Loader:
        sampler = Holder()

    found = find_generators(Loader())
    assert sorted(found) == ["sampler.counting", "sampler.legacy", "sampler.newer", "sampler.random", "sampler.torch"]
    Loader.sampler.draw()
    saved = take_rng(found)
    first = [Loader.sampler.draw() for _ in range(2)]
    set_rng(found, saved)
    assert [Loader.sampler.draw() for _ in range(2)] == first


def mixing(rows, rng=None):
    """A collate function of a module."""
    return OF_MODULE if rng is None else rng.random()


OF_MODULE = random.Random(6)


def test_generators_of_transforms_and_of_collate_functions_are_found():
    """A step of a pipeline below the data set; an attribute, a partial's argument, a closure, a method, a name."""
    own, other = random.Random(1), torch.Generator()
    step, data = SimpleNamespace(rng=own), SimpleNamespace(transform=SimpleNamespace(steps=[lambda x: x]))
    data.transform.steps.append(step)

    def found(collate):
        loader = SimpleNamespace(dataset=data, collate_fn=collate)
        return {name: generator for name, generator in find_generators(loader).items() if generator is not own}

    assert find_generators(SimpleNamespace(dataset=data)) == {"dataset.transform.steps.1.rng": own}
    holder = Holder()
    for collate in (
        SimpleNamespace(deep=SimpleNamespace(generator=other)),
        functools.partial(mixing, rng=other),
        lambda rows: other.initial_seed() + len(rows),
    ):
        assert other in found(collate).values()
    assert found(mixing) == {"collate_fn.OF_MODULE": OF_MODULE}
    assert set(found(holder.draw).values()) == {*holder.generators, holder.random, holder.legacy, holder.torch}
    assert found(None) == {}


def test_what_is_large_or_goes_round_is_looked_at_for_a_moment():
    """Samples are not looked through, and an object may hold itself."""
    data = SimpleNamespace(samples=[random.Random(number) for number in range(1000)], tensor=torch.ones(9))
    data.data = data
    assert len(find_generators(SimpleNamespace(dataset=data))) == 16


@pytest.mark.parametrize(("save_at", "counts"), [(2, 0), (3, 1), (4, 0), (-1, 0)])
def test_a_first_pass_without_a_batch_is_said(tmp_path, monkeypatch, save_at, counts):
    """Of a save behind the last batch: who takes the epoch from the number of steps trains one too few."""
    said = []
    monkeypatch.setattr("resilience_sdk.checkpoint.passes.note", lambda *words: said.append(words[0]))
    loader = begun(plain_order)
    saver = Checkpointer({"loader": loader}, run_dir=tmp_path, every=1000)
    saver.resume()
    train(loader, saver, save_at=save_at)
    saver = Checkpointer({"loader": (loader := begun(plain_order))}, run_dir=tmp_path, every=1000)
    train(loader, saver, saver.resume(), save_at=0)
    assert len(said) == counts


@pytest.mark.parametrize("goes_on", [False, True])
def test_an_iterator_from_before_the_resume_is_said_if_the_program_goes_on_with_it(tmp_path, monkeypatch, goes_on):
    """One that was made to look at a batch is not."""

    def make():
        loader = own_order()
        return loader, Checkpointer({"loader": loader}, run_dir=tmp_path, every=100)

    loader, saver = make()
    saver.resume()
    next(iter(loader))
    saver.save(1)
    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    again, saver = make()
    batches = iter(again)
    next(batches)
    assert saver.resume() == 1
    if goes_on:
        next(batches)
    else:
        next(iter(again))
    saver.save(2)
    assert ("old iterator" in {one.key for one in resume_limits.limits()}) is goes_on
