"""A sampler that a loop makes anew for each pass of what it knows by then: a resume within the pass draws its order."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from resilience_sdk.checkpoint import Checkpointer, pass_weights
from resilience_sdk.checkpoint.pass_weights import PassWeights
from resilience_sdk.core import resume_limits
from resilience_sdk.core.resume_proof import EXACT, NOT_EXACT
from resilience_sdk.rank.data import END, Walk, next_batch

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'", "ignore:Neither dataset")
SAMPLES = 32
DATA = TensorDataset(torch.arange(SAMPLES))
KINDS = {"plain": DataLoader, "stateful": stateful.StatefulDataLoader}


def weighted(kind, losses):
    return KINDS[kind](DATA, 4, sampler=WeightedRandomSampler(losses.clone(), SAMPLES))


def batched(kind, losses):
    sampler = BatchSampler(WeightedRandomSampler(losses, SAMPLES), 4, drop_last=False)
    return KINDS[kind](DATA, batch_sampler=sampler)


def walked(make, kind, batches=SAMPLES, saved=None, state=None):
    """Read so many batches; each makes its samples less likely in the next pass. Return ids, place, what is told."""
    walk, told, seen = Walk(), [], []
    walk.prints.is_checked, walk.prints.told = True, told.append
    losses = torch.ones(SAMPLES)
    if saved is not None:
        walk.restore(json.loads(json.dumps(saved)), 1, 1)
        losses = state["losses"].clone()
    loader = make(kind, losses)
    if saved is not None and "loader" in state:
        loader.load_state_dict(state["loader"])
    iterator = walk.start_epoch(loader, lambda: None, is_speaker=False)
    while len(seen) < batches and (batch := next_batch(iterator)) is not END:
        walk.batches += 1
        seen.append(batch[0].tolist())
        losses[batch[0]] *= 0.25
    held = {"losses": losses}
    if hasattr(loader, "state_dict"):
        held["loader"] = loader.state_dict()
    return seen, walk.capture(), told, held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [weighted, batched])
def test_a_pass_goes_on_in_the_order_of_its_own_weights(make, kind):
    """Though the losses are others by then, and were changed in place; also behind a second resume."""
    torch.manual_seed(4)
    whole, *_ = walked(make, kind)
    torch.manual_seed(4)
    first, place, _, state = walked(make, kind, 3)
    torch.manual_seed(9)
    second, place, told, state = walked(make, kind, 2, place, state)
    third, _, more, _ = walked(make, kind, SAMPLES, place, state)
    assert first + second + third == whole
    results = [check.result for check in told + more]
    assert results == ([EXACT, EXACT] if kind == "plain" else [])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_to_be_saved_is_named(kind, monkeypatch):
    """With a cure that works for both kinds of loader: the sampler itself draws as it should."""
    monkeypatch.setattr(pass_weights, "MAX_BYTES", 8)
    torch.manual_seed(4)
    _, place, _, state = walked(weighted, kind, 3)
    _, _, told, _ = walked(weighted, kind, 3, place, state)
    [check] = told
    assert (check.result, check.component) == (NOT_EXACT, "the order of epoch 0")
    assert "WeightedRandomSampler is made of something else" in check.line
    assert check.line.endswith(pass_weights.CURE)


def test_the_samplers_own_weights_are_back_for_the_next_pass():
    """Which the program may have changed on purpose."""
    loader = weighted("plain", torch.ones(SAMPLES))
    before = PassWeights()
    before.begins(loader)
    saved = json.loads(json.dumps(before.to_json()))
    loader.sampler.weights = own = torch.arange(SAMPLES, dtype=torch.double)
    now = PassWeights()
    now.resume(saved)
    assert now.to_json() == saved
    assert now.lend(loader) == []
    assert torch.equal(loader.sampler.weights, torch.ones(SAMPLES, dtype=torch.double))
    now.give_back()
    assert loader.sampler.weights is own


def test_other_indices_are_named_and_equal_ones_are_not():
    """A subset that grows is another one."""
    made = [DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(count))) for count in (12, 12, 16)]
    before = PassWeights()
    before.begins(made[0])
    for loader, others in ((made[1], []), (made[2], ["SubsetRandomSampler"])):
        now = PassWeights()
        now.resume(before.to_json())
        assert now.lend(loader) == others


def test_beside_a_checkpointer_too(tmp_path, monkeypatch):
    """A loader with a state, in a loop of one's own, with the sampler made of the losses of the save."""

    def train(saver, losses, first, count):
        loader = weighted("stateful", losses)
        saver.add_data("data", loader)
        seen = []
        for (batch,) in loader:
            seen.append(batch.tolist())
            losses[batch] *= 0.25
            if len(seen) == count:
                saver.save(first + count)
                break
        return seen

    def begun(name, steps):
        losses = torch.ones(SAMPLES)
        saver = Checkpointer({"losses": losses}, run_dir=tmp_path / name)
        first = saver.resume()
        return train(saver, losses, first, steps)

    monkeypatch.setattr(resume_limits, "_noted", resume_limits._Noted())
    torch.manual_seed(4)
    whole = begun("whole", None)
    torch.manual_seed(4)
    assert begun("run", 3) + begun("run", None) == whole
    assert resume_limits.limits() == ()
