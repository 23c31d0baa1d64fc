from __future__ import annotations

import itertools

import pytest
import torch

from resilience_sdk.checkpoint import Checkpointer

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

# torchdata 0.11 calls what torch 2.13 calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


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
