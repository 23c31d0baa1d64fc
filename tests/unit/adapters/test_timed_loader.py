"""A loader that is timed in place: the loop and everybody else go on using the same object."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk import straggler
from resilience_sdk.adapters._timed_loader import TimedLoader
from resilience_sdk.errors import ConfigError


def waits(recording):
    return len(recording.harvest().get("data", []))


class Batches:
    """A loader of the simplest kind, with two batches; `fetching` is called with the number of each."""

    def __init__(self, fetching=lambda _number: None):
        self._fetching = fetching

    def __iter__(self):
        for number in range(2):
            self._fetching(number)
            yield number


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)


def test_the_wait_for_each_batch_is_section_data(recording, loader):
    """Each epoch; the batches are the same, and so are class, name, attributes and length for all who ask."""
    plain = [batch[0].tolist() for batch in loader]
    watch = TimedLoader(loader)
    for _ in range(2):
        assert [batch[0].tolist() for batch in loader] == plain
    assert waits(recording) == 2 * (3 + 1)  # and the wait for the end
    assert isinstance(loader, DataLoader)
    assert type(loader).__name__ == "DataLoader"
    assert (len(loader), loader.batch_size, len(iter(loader))) == (3, 2, 3)
    assert iter(loader)._num_yielded == 0  # an attribute of torch's own iterator
    for _ in range(2):
        watch.restore()
        assert type(loader) is DataLoader
    assert [batch[0].tolist() for batch in loader] == plain
    assert waits(recording) == 0


def test_it_is_open_while_the_loader_is_waited_for(recording):
    """So that a loader that hangs is named."""
    seen = []
    loader = Batches(lambda _: seen.append(recording.stack()))
    TimedLoader(loader)
    assert list(loader) == [0, 1]
    assert seen == [["data"], ["data"]]
    assert recording.stack() == []


def test_the_order_of_random_numbers_is_as_without():
    """`iter(loader)` draws the seed of the epoch at once, as it does without."""
    shuffled = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True)

    def epoch():
        torch.manual_seed(3)
        batches = iter(shuffled)
        noise = torch.rand(1).item()
        return noise, [batch[0].tolist() for batch in batches]

    plain = epoch()
    TimedLoader(shuffled)
    assert epoch() == plain


def test_what_is_to_be_done_before_a_batch_is_done_before_it_is_fetched():
    """Even before the fetch that finds the end: a stop is not put off to the next epoch."""
    order = []
    loader = Batches(lambda number: order.append(f"fetch {number}"))
    watch = TimedLoader(loader)
    watch.due = lambda: order.append("before")
    list(loader)
    assert order == ["before", "fetch 0", "before", "fetch 1", "before"]


def test_an_exception_of_the_loader_passes(recording):
    """And is no wait that counts."""
    loader = Batches(lambda number: 1 / (1 - number))
    TimedLoader(loader)
    with pytest.raises(ZeroDivisionError):
        list(loader)
    assert recording.stack() == []
    assert waits(recording) == 1


def test_a_section_data_of_the_script_has_precedence(recording):
    """One wait is counted once, whoever times it."""
    loader = Batches()
    TimedLoader(loader)
    assert list(straggler.iterate(loader)) == [0, 1]
    assert waits(recording) == 3


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_is_of_the_plain_class(loader, clone):
    """It may be in another process, which knows nothing of the watch."""
    TimedLoader(loader)
    copied = clone(loader)
    assert type(copied) is DataLoader
    assert len(list(copied)) == 3


def test_an_iterator_that_was_begun_before_the_end_goes_on(recording):
    """Untimed."""
    loader = Batches()
    watch = TimedLoader(loader)
    batches = iter(loader)
    assert next(batches) == 0
    watch.restore()
    watch.due = lambda: pytest.fail("called after the end")
    assert list(batches) == [1]
    assert waits(recording) == 1


@pytest.mark.parametrize(
    "loader",
    [[1, 2], iter([1, 2]), (number for number in range(2)), itertools.count(), 7],
    ids=lambda it: type(it).__name__,
)
def test_what_cannot_be_watched_in_place_is_an_error_with_a_cure(loader):
    """Lists have no class that could be exchanged, and an iterator is no loader."""
    with pytest.raises(ConfigError, match=r"straggler\.iterate"):
        TimedLoader(loader)
