"""What is read again of an epoch is compared with what was read before, by its samples where they have numbers."""

from __future__ import annotations

import functools
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from resilience_sdk.core.resume_proof import EXACT, NOT_COMPARED, NOT_EXACT, NOT_PROVEN
from resilience_sdk.rank.data import END, Walk, next_batch
from resilience_sdk.rank.fingerprints import EpochPrint, Tap, difference, print_of_content, print_of_indices, tap_of
from resilience_sdk.rank.pass_print import PassPrint

DATA = TensorDataset(torch.arange(24, dtype=torch.float32))


class Own(Sampler):
    """A sampler with a generator of its own, where nobody finds it."""

    def __init__(self, seed):
        self.shuffle = functools.partial(random.Random(seed).shuffle)

    def __iter__(self):
        order = list(range(24))
        self.shuffle(order)
        return iter(order)

    def __len__(self):
        return 24


class Noisy(TensorDataset):
    """Other values each time: an augmentation with numbers that nobody can repeat."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0] + random.SystemRandom().random()


class Stream(IterableDataset):
    def __iter__(self):
        return iter([random.SystemRandom().random() for _ in range(24)])


class Same(IterableDataset):
    """Shuffles by the generator of Python."""

    def __iter__(self):
        return iter(random.sample(range(24), 24))


def read(loader, batches, saved=None, epoch=0):
    """Read so many batches of an epoch, from a saved place or the start; return the place, and what was told."""
    walk, told = Walk(), []
    walk.prints.is_checked, walk.prints.told = True, told.append
    if saved is not None:
        walk.restore(saved, 1, 1)
    else:
        walk.enter_window(epoch)
    iterator = walk.start_epoch(loader, lambda: None, is_speaker=False)
    for _ in range(batches):
        assert next_batch(iterator) is not END
        walk.batches += 1
    return walk.capture(), told


LOADERS = {
    "shuffled": (lambda: DataLoader(DATA, batch_size=4, shuffle=True), EXACT),
    "one by one": (lambda: DataLoader(DATA, batch_size=None, shuffle=True), EXACT),
    "workers": (lambda: DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1), EXACT),
    "own sampler": (lambda: DataLoader(DATA, batch_size=4, sampler=Own(random.SystemRandom().random())), NOT_EXACT),
    "augmented": (lambda: DataLoader(Noisy(DATA.tensors[0]), batch_size=4, shuffle=True), EXACT),
    "stream": (lambda: DataLoader(Stream(), batch_size=4), NOT_PROVEN),
    "stream that repeats": (lambda: DataLoader(Same(), batch_size=4), EXACT),
    "any order": (
        lambda: DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1, in_order=False),
        NOT_COMPARED,
    ),
    "list": (lambda: list(torch.arange(24.0).split(4)), EXACT),
    "random list": (lambda: list(torch.rand(6, 4, generator=torch.Generator()).split(1)), EXACT),
    "other list": (lambda: [random.SystemRandom().random() for _ in range(6)], NOT_EXACT),
    "generator": (lambda: iter([torch.tensor(random.SystemRandom().random()) for _ in range(6)]), NOT_PROVEN),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_read_again_is_compared(name):
    """A wrong order is found without a repeated step; what is random on purpose is none."""
    make, result = LOADERS[name]
    saved, told = read(make(), 3)
    assert told == []
    _, told = read(make(), 1, saved)
    assert [check.result for check in told] == [result]


def test_a_wrong_order_is_named_with_its_epoch_and_the_cure():
    """And where it differs first, as near as is known."""
    saved, _ = read(DataLoader(DATA, batch_size=4, sampler=Own(1)), 5, epoch=2)
    _, [check] = read(DataLoader(DATA, batch_size=4, sampler=Own(2)), 0, saved)
    assert check.component == "the order of epoch 2"
    assert check.text == "other samples, the order of epoch 2: read again, it differs from batch 0 on"
    assert check.cure.startswith("let Own draw from torch's generators or from set_epoch(epoch)")


def test_a_stream_that_gives_other_values_is_said_with_the_cure():
    """By its content: that it was read again proves nothing, and other values are as bad as other samples."""
    saved, _ = read(DataLoader(Stream(), batch_size=4), 3, epoch=1)
    _, [check] = read(DataLoader(Stream(), batch_size=4), 0, saved)
    assert check.line.startswith(
        "resume not proven exact: other samples or other values in epoch 1: read again, it differs"
    )
    assert "batches of a stream are not repeatable; let it draw from the generators of Python" in check.line


class Buckets(Own):
    """Draws batches by itself, so that the loader's own sampler is unused."""

    def __iter__(self):
        order = list(super().__iter__())
        return iter([order[first : first + 4] for first in range(0, 24, 4)])

    def __len__(self):
        return 6


class Placed(Buckets):
    """Goes back to its place by itself."""

    def load_state_dict(self, state):
        """Skip."""


@pytest.mark.parametrize(
    ("kind", "cure"), [(Buckets, "let Buckets draw"), (Placed, "if Placed is in state, leave it out")]
)
def test_the_sampler_that_is_named_is_the_one_that_draws(kind, cure):
    """Not the default one of a loader that was given a sampler of batches."""
    saved, _ = read(DataLoader(DATA, batch_sampler=kind(1)), 3)
    _, [check] = read(DataLoader(DATA, batch_sampler=kind(2)), 0, saved)
    assert check.result == NOT_EXACT
    assert check.cure.startswith(cure)


def test_a_sampler_of_torchs_own_is_not_told_to_draw_from_torchs_generators():
    """It does; what it is made of is what may be other. Of an adapter, which puts back no weights."""
    weights = [torch.ones(24), torch.arange(24.0)]
    loaders = [DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler(each, 24)) for each in weights]
    saved, _ = read(loaders[0], 3)
    del saved["weights"]
    _, [check] = read(loaders[1], 0, saved)
    assert check.cure.startswith("make WeightedRandomSampler of the same weights as when that epoch began")


def test_other_batches_or_other_data_are_not_compared():
    """They are the user's choice."""
    saved, _ = read(DataLoader(DATA, batch_size=4, shuffle=True), 2)
    for loader in (DataLoader(DATA, batch_size=6, shuffle=True), DataLoader(TensorDataset(torch.ones(20)), 4)):
        _, [check] = read(loader, 0, saved)
        assert check.result == NOT_COMPARED
    _, told = read(DataLoader(DATA, batch_size=4), 0, {**saved, "print": {"value": "?"}})
    assert told == []  # what an earlier version has left, or another one


def test_an_epoch_is_resumed_twice():
    """What was read again goes on to count."""
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    saved, _ = read(loader, 2)
    again, [first] = read(loader, 2, saved)
    _, [second] = read(loader, 0, again)
    assert (first.text, second.text) == (
        "2 of 2 batches read again are the same",
        "4 of 4 batches read again are the same",
    )


def test_workers_that_persist_are_followed_through_epochs():
    """Their loader draws from the same sampler in each epoch, ahead of what it gives out."""
    loader = DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    walk, orders = Walk(), []
    walk.prints.is_checked = True
    for _ in range(2):
        batches = walk.start_epoch(loader, lambda: None, is_speaker=False)
        while (batch := next_batch(batches)) is not END:
            walk.batches += 1
            orders.append((walk.prints.newest_order, print_of_indices([int(value) for value in batch[0]])))
        walk.finish_epoch()
    assert len(orders) == 12
    assert all(one == other for one, other in orders)


def test_the_loader_is_as_it_was_and_draws_when_it_did():
    """The tap stands in while an iterator is made, and asks the sampler at the same moments."""
    moments = []

    class Eager(Own):
        def __iter__(self):
            moments.append("iter")
            return super().__iter__()

    loader = DataLoader(DATA, batch_size=4, sampler=Eager(1))
    plain = loader.batch_sampler
    walk = Walk()
    walk.prints.is_checked = True
    batches = walk.start_epoch(loader, lambda: None, is_speaker=False)
    assert loader.batch_sampler is plain
    next_batch(batches)
    tap = Tap(Eager(2))
    assert (len(tap), tap.shuffle is not None, len(moments)) == (24, True, 1)
    iter(tap)
    assert len(moments) == 2  # as that of a sampler which draws in its __iter__


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, to torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_loader_with_a_state_are_known_where_no_other_process_draws_them(workers):
    """Its iterator draws as ever, and goes on behind its place; what workers draw ahead nobody sees."""
    orders, drawn = [], []
    for is_on in (False, True):
        torch.manual_seed(3)
        loader = StatefulDataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)
        prints = PassPrint()
        prints.is_checked = is_on
        batches = prints.make(loader, lambda loader=loader: iter(loader))
        for number, batch in enumerate(batches):
            prints.note(batch)
            drawn.append([int(value) for value in batch[0]])
            if is_on:
                orders.append(prints.newest_order)
            if number == 2:
                state = loader.state_dict()
    assert drawn[:6] == drawn[6:]
    assert orders == ([None] * 6 if workers else [print_of_indices(one) for one in drawn[:6]])
    again = StatefulDataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)
    again.load_state_dict(state)
    batches = prints.make(again, lambda: iter(again))
    rest = next(batches)
    prints.note(rest)
    assert [int(value) for value in rest[0]] == drawn[3]
    assert prints.newest_order == orders[3]


def test_what_is_left_out_counts_by_what_was_drawn():
    """An iterator that skips the first batches draws their samples all the same."""
    prints, whole = PassPrint(), PassPrint()
    loader = DataLoader(DATA, batch_size=4)
    for one, left_out in ((whole, 0), (prints, 3)):
        one.is_checked = True
        one.begin(loader)
        with one.tapped(loader):
            batches = iter(loader)
        for number, batch in enumerate(batches):
            if number == left_out:
                one.leave_out(left_out)
            if number >= left_out:
                one.note(batch)
    assert prints.to_json(6) == whole.to_json(6)
    prints.leave_out(1)  # of what was not drawn
    assert not prints.is_known


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_that_was_begun_before_is_known_where_it_draws_here(workers):
    """A worker has drawn ahead: that there are other batches is seen all the same."""
    loader = DataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)
    whole, prints = PassPrint(), PassPrint()
    whole.is_checked = prints.is_checked = True
    whole.begin(loader)
    batches = iter(loader)
    prints.begun_before(loader, batches)
    assert prints.facts == whole.facts != 0
    for batch in batches:
        prints.note(batch)
        expected = None if workers else print_of_indices([int(value) for value in batch[0]])
        assert prints.newest_order == expected
    assert prints.is_known is not bool(workers)
    prints.leave()
    assert prints.facts == 0


def test_a_batch_of_any_kind_ends_no_pass():
    """It is not known any more from there on."""

    class Odd:
        shape = property(lambda self: 1 / 0)

    prints = PassPrint()
    prints.is_checked = True
    prints.begin([1, 2])
    prints.note(1)
    assert prints.is_known
    prints.note([Odd()])
    assert not prints.is_known


@pytest.mark.parametrize("loader", [[1, 2], DataLoader(Stream()), "text"])
def test_nothing_stands_for_what_has_no_sampler(loader):
    assert tap_of(loader) is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 39))
def test_the_place_of_a_difference_is_narrowed_down(numbers, at):
    """The first batch that differs is among those that are named, and a run that goes on is like one that did not."""
    saved, again, same = EpochPrint("indices"), EpochPrint("indices"), EpochPrint("indices")
    at %= len(numbers)
    for place, number in enumerate(numbers):
        saved.add(number)
        again.add(number + (place == at))
        same.add(number)
    first, last = difference(saved, again)
    assert first <= at <= last
    assert difference(saved, same) is None
    kept = EpochPrint.resumed(saved.to_json(len(numbers)), len(numbers))
    assert kept.to_json(len(numbers)) == saved.to_json(len(numbers))
    assert saved.to_json(len(numbers) - 1)["value"] == saved.before
    assert saved.to_json(len(numbers) - 2) is None or len(numbers) < 2


def test_content_is_looked_at_in_the_usual_kinds_of_batches():
    """A value that changes in a small batch is seen; what cannot be looked at is left out."""
    image = torch.zeros(2, 3, 8, 8)
    batches = [image, [image, 1], {"a": image, "b": "text"}, (image.numpy(), [image]), {"odd": object(), "a": image}]
    before = [print_of_content(batch) for batch in batches]
    image[0, 0, 0, 0] = 1
    assert all(one[0] == other[0] and one[1] != other[1]
               for one, other in zip(before, map(print_of_content, batches), strict=True))  # fmt: skip
    assert print_of_content(torch.zeros(3, 2)) != print_of_content(torch.zeros(2, 3))
    assert print_of_content(torch.zeros(3, 2, device="meta"))[1] == 1
    assert print_of_content(torch.zeros(2, 3).t())[1] == 1
    assert print_of_content(list(range(1_000_000))) == print_of_content(list(range(8)))


def test_a_step_costs_some_microseconds():
    """Fingerprints of the indices and of the content of a usual batch, in the best of some tries."""
    batch = {"image": torch.rand(64, 3, 64, 64), "label": torch.arange(64)}
    indices = list(range(64))
    spent = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            print_of_indices(indices)
            print_of_content(batch)
        spent.append((time.perf_counter() - began) / 100)
    print(f"{min(spent) * 1e6:.1f} us")
    assert min(spent) < 40e-6


def test_a_length_that_cannot_be_asked_for_is_none():
    """torch does not ask for it where a sampler gives the order."""

    class Endless(list):
        def __len__(self):
            raise NotImplementedError

    loader = DataLoader(Endless([1, 2]), batch_sampler=[[0], [1]])
    prints = PassPrint()
    prints.is_checked = True
    assert list(prints.make(loader, lambda: iter(loader))) != []


def taken(prints, loader, noted):
    """Return the taps of a pass over a loader, whose first batches are noted; nothing is left in them."""
    with prints.tapped(loader):
        batches = iter(loader)
    for number, batch in enumerate(batches):
        if number < noted:
            prints.note(batch)
    return prints._tap


@pytest.mark.parametrize("kind", ["in any order", "too many left out", "nobody notes"])
def test_what_nobody_takes_out_does_not_pile_up(kind, monkeypatch):
    """An epoch may have millions of batches."""
    monkeypatch.setattr("resilience_sdk.rank.fingerprints._MAX_DRAWN", 4)
    is_unordered = kind == "in any order"
    loader = DataLoader(DATA, batch_size=2, num_workers=2 if is_unordered else 0, in_order=not is_unordered)
    prints = PassPrint()
    prints.is_checked = True
    prints.begin(loader)
    if kind == "too many left out":
        prints.leave_out(5)
    assert not taken(prints, loader, 0 if kind == "nobody notes" else 12).drawn
    if kind == "nobody notes":
        prints.note([0])
        assert not prints.is_known  # it would be compared with others


class Hostile:
    """A batch, a loader or an iterator of somebody's that refuses to be looked at."""

    shape = property(lambda self: 1 / 0)
    state_dict = _batches = in_order = batch_sampler = dataset = shape

    def __iter__(self):
        return iter([self])


def test_what_cannot_be_looked_at_ends_no_training():
    """It has no fingerprint, and is given out as ever; a difference is said though the cure is not known."""
    prints, told = PassPrint(), []
    prints.is_checked, prints.told = True, told.append
    hostile = Hostile()
    assert list(prints.make(hostile, lambda: iter([hostile]))) == [hostile]
    prints.begin([hostile])
    prints.note(hostile)
    assert told == []
    prints.resume({"kind": "content", "facts": {}, "value": 3, "marks": []}, 1)
    prints.begin([1])
    prints.note(1)
    prints.compare(0, hostile)
    assert prints.make(hostile, lambda: hostile) is hostile
    assert [(check.result, check.cure.partition(",")[0]) for check in told] == [
        (NOT_EXACT, "give out the same batches in each pass")
    ]


class OfNoIndices:
    """A loader of somebody's that nobody sees the samples of."""

    def __iter__(self):
        return iter([1, 2])


UNKNOWN = {
    "stream": (lambda: DataLoader(Stream(), 4), "batches of a stream are not repeatable"),
    "any order": (
        lambda: DataLoader(DATA, 4, num_workers=1, in_order=False),
        "batches in any order (in_order=False) are not repeatable",
    ),
    "own loader": (OfNoIndices, "the indices that OfNoIndices makes its batches of are not seen"),
    "state": (
        lambda: StatefulDataLoader(DATA, 4, num_workers=1),
        "the indices that StatefulDataLoader makes its batches of are not seen",
    ),
    "raises": (Hostile, "the loader could not be looked at: ZeroDivisionError: division by zero"),
    "odd batch": (lambda: [Hostile()], "a batch could not be looked at: ZeroDivisionError: division by zero"),
    "other sampler": (lambda: Aside(DATA, 4), "the loader gives more batches than were drawn of its sampler"),
}


class Aside(DataLoader):
    """Draws from something else than its sampler."""

    def _get_iterator(self):
        return iter([torch.ones(4)])


def test_content_is_looked_at_once():
    """Here and for the witness of the step; another batch is looked at by itself."""
    prints = PassPrint()
    prints.is_checked = True
    prints.begin([1, 2])
    batch, other = torch.rand(3), torch.rand(3)
    prints.note(batch)
    assert prints.content_of(other) == print_of_content(other)
    prints.note(batch)
    assert prints.content_of(batch) == print_of_content(batch)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, to torchdata
@pytest.mark.parametrize("name", UNKNOWN)
def test_why_samples_are_not_known_is_said_in_its_own_words(name):
    """An error by its type and text, never as a stream."""
    make, why = UNKNOWN[name]
    prints, told = PassPrint(), []
    prints.is_checked, prints.told = True, told.append
    loader = make()
    batches = prints.make(loader, lambda: iter(loader))
    prints.note(next(batches))
    assert (prints.is_known, prints.why) == (False, why)
    prints.resume({"kind": "indices", "facts": {}, "value": 3, "marks": []}, 1)
    prints.compare(0, loader)
    assert [(check.result, check.text) for check in told] == [(NOT_COMPARED, why)]


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(DATA, 4, num_workers=1), "the iterator of this pass was made before it could be seen what"),
        (DataLoader(Stream(), 4), "batches of a stream are not repeatable"),
        (Hostile(), "the loader could not be looked at: ZeroDivisionError"),
    ],
)
def test_why_a_pass_that_was_begun_before_is_not_known_is_said(loader, why):
    """Of a loader that raises, too."""
    prints = PassPrint()
    prints.is_checked = True
    prints.begun_before(loader, None)
    assert not prints.is_known
    assert prints.why.startswith(why)


def test_fewer_batches_than_are_left_out_are_said_as_such():
    """As of a pass that begins behind the place."""
    loader = DataLoader(DATA, batch_size=4)
    prints = PassPrint()
    prints.is_checked = True
    prints.begin(loader)
    with prints.tapped(loader):
        next(iter(loader))
    prints.leave_out(5)
    assert prints.why == "1 of the 5 batches before the place were drawn again"
