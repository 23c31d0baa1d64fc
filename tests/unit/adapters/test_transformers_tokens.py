"""What a trainer's batches tell of the work in them: real tensors, no trainer, no Transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from resilience_sdk.adapters.transformers.training import tell_sizes
from resilience_sdk.recorder.page_layout import WORK
from resilience_sdk.straggler.windowing import ToldWork, first_pass


def told_of(recording, batches, model=None):
    """Return what the monitor reads after these batches, of which a step fetches two."""
    fetch = tell_sizes(lambda at, device: (batches[2 * at : 2 * at + 2], 7), model)
    for at in range(len(batches) // 2):
        assert fetch(at, device="cpu") == (batches[2 * at : 2 * at + 2], 7)
    told = ToldWork()
    for new in recording.reader.passes():
        assert new.kind == WORK
        told.add(new.name, new.start, new.samples_ns)
    return told.of(first_pass(0), len(batches))


def test_each_batch_tells_how_large_it_is(recording):
    """With its padding, which is computed too; wherever it lies, since nothing is read of it."""
    batches = [{"input_ids": torch.empty(2, 10 + at, device="meta"), "labels": torch.ones(1)} for at in range(20)]
    expected = tuple(2.0 * (10 + at) for at in range(first_pass(0), first_pass(1)))
    assert told_of(recording, batches) == expected


def test_a_model_says_what_its_main_input_is(recording):
    """As those for images do."""
    batches = [{"pixel_values": torch.ones(3, 4, 4)} for _ in range(20)]
    assert told_of(recording, batches, SimpleNamespace(main_input_name="pixel_values")) == (48.0,) * 8


@pytest.mark.parametrize("batch", [torch.ones(3), (torch.ones(3),), {}, {"input_ids": [1, 2]}, {"input_ids": None}])
def test_batches_of_another_kind_tell_nothing(recording, batch):
    """And hold nothing up."""
    assert told_of(recording, [batch] * 4) is None


class Odd(dict):
    """A batch of somebody's own."""

    def get(self, name):
        raise RuntimeError("not now")


@pytest.mark.parametrize(("found", "is_said"), [(([Odd()], 7), True), (None, True), ((iter([Odd()]), 7), False)])
def test_nothing_that_is_odd_about_them_reaches_the_training(recording, capsys, found, is_said):
    """It is said once, and what the trainer fetched is what it gets, to the last batch."""
    fetch = tell_sizes(lambda: found, None)
    assert [fetch(), fetch()] == [found, found]
    assert capsys.readouterr().err.count("how large batches are") == is_said
    if not is_said:
        assert len(list(found[0])) == 1
