"""What is put into a loader to see whether its workers draw is taken out again; nobody looks where nothing is saved."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters._draws import Generators
from resilience_sdk.adapters.accelerate.position import Position
from resilience_sdk.adapters.transformers.place import LoaderPlace
from resilience_sdk.checkpoint.worker_draws import DrawnInWorkers

DATA = TensorDataset(torch.arange(8))


@pytest.mark.parametrize("kind", ["accelerate", "transformers"])
def test_a_loader_is_as_it_was_behind_the_training(kind):
    """Also where two have looked into it, and where somebody else has put another collate function around it."""
    loader = DataLoader(DATA, 2, num_workers=1)
    plain = loader.collate_fn

    def watch():
        return Position(loader, 1) if kind == "accelerate" else LoaderPlace(loader, 0)

    one, other = watch(), watch()
    assert isinstance(loader.collate_fn, DrawnInWorkers)
    one.leave()
    one.leave()
    assert isinstance(loader.collate_fn, DrawnInWorkers)
    other.leave()
    assert loader.collate_fn is plain
    assert loader.worker_init_fn is None
    third = watch()
    between = loader.collate_fn
    loader.collate_fn = around = lambda samples: between(samples)
    third.leave()
    assert loader.collate_fn is around


def test_where_nothing_is_saved_nobody_looks_at_generators(monkeypatch):
    """With the SDK switched off a loop is given the loader's own batches."""
    monkeypatch.setattr(Generators, "capture", lambda self: pytest.fail("it has looked"))
    loader = DataLoader(DATA, 2)
    position = Position(loader, 1, is_watched=False)
    assert len(list(position.walk(iter(loader)))) == 4
