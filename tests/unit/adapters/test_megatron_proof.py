"""The proof of a resume with Megatron, without it: which batch belongs to a step, and whose batches are looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.adapters.megatron.proof import (
    MegatronProof,
    has_rates,
    reached_by,
    watch_iterator,
    watch_loader,
)
from resilience_sdk.rank.fingerprints import print_of_indices
from resilience_sdk.rank.pass_print import PassPrint

DATA = TensorDataset(torch.arange(12))


class Loop:
    """What is told of the steps of a loop."""

    def __init__(self):
        self.told = []

    def batch(self, _epoch, _number, batch):
        self.told.append(batch)

    def undo(self):
        self.told.append("undo")

    def drop(self):
        self.told.append("drop")

    def step(self, step):
        self.told.append(f"step {step}")

    def tell(self, check):
        self.told.append(check.text)


class Loops:
    """A loop, its proof, and the forwards that it makes."""

    def __init__(self, *, rank=0, only_in_forwards=False):
        self.begun, self.is_open, self.told = 0, False, Loop()
        self.prints = PassPrint()
        self.prints.is_checked = True
        session = SimpleNamespace(identity=SimpleNamespace(rank=rank))
        self.proof = MegatronProof(
            self.told,
            self.prints,
            session,
            forwards=lambda: (self.begun, self.is_open),
            only_in_forwards=only_in_forwards,
        )

    def forward(self, *read):
        """Make a forward that reads these."""
        self.begun, self.is_open = self.begun + 1, True
        for batch in read:
            self.proof.read(batch)
        self.is_open = False


def test_a_batch_belongs_to_a_step_that_reads_it_or_goes_on_with_it():
    """One that is read in a forward, or before it; not one that the loop reads past."""
    loop = Loops()
    loop.forward("a")
    loop.forward("b")
    loop.proof.step(0)
    for batch in ("past", "past too", "c"):
        loop.proof.read(batch)
    loop.forward()
    loop.proof.read("d")
    loop.forward()
    loop.proof.step(1)
    loop.proof.drop()
    assert loop.told.told == ["a", "b", "step 0", "past", "undo", "past too", "undo", "c", "d", "step 1", "drop"]
    reading = Loops()
    reading.proof.read("past")
    reading.forward("a")
    reading.forward("b")
    assert reading.told.told == ["past", "undo", "a", "b"]
    megatrons = Loops(only_in_forwards=True)
    megatrons.proof.read("an iteration that is skipped")
    megatrons.forward("d")
    megatrons.proof.step(2)
    assert megatrons.told.told == ["d", "step 2"]


@pytest.mark.parametrize(
    ("rank", "first", "is_known", "told"),
    [(0, 0, True, []), (0, 5, True, ["why"]), (1, 5, True, [None, "step 5", None, "step 6"]), (1, 5, False, ["why"])],
    ids=["fresh", "resumed", "from another rank", "not known"],
)
def test_without_a_batch_nothing_is_compared_which_is_said_once(rank, first, is_known, told):
    """But on ranks that have their data from others: their learning rates and generators are."""
    loop = Loops(rank=rank)
    loop.proof.why, loop.proof.is_known = "why", is_known
    for step in (first, first + 1):
        loop.forward()
        loop.proof.step(step)
    assert loop.told.told == told


def test_a_loader_is_looked_at_in_each_pass_and_stays_what_it_is():
    """By what its sampler draws, also where it is iterated in a generator; its class is given back."""
    loop = Loops()
    loader = DataLoader(DATA, 4, shuffle=True)
    restore = watch_loader(loader, loop.proof)
    loop.is_open = True
    assert type(loader) is not DataLoader
    assert isinstance(loader, DataLoader)
    seen = []
    for _ in range(2):
        batches = iter(loader)
        assert len(batches) == 3
        for [batch] in batches:
            seen.append(loop.prints.newest_order == print_of_indices(batch.tolist()))
    assert seen == [True] * 6
    assert len(loop.told.told) == 6
    rest = iter(loader)
    restore()
    assert type(loader) is DataLoader
    assert len(list(loader)) == len(list(rest)) == 3
    assert watch_loader(iter(loader), loop.proof) is None
    assert watch_loader([1, 2], loop.proof) is None


class Rerun:
    """An iterator as Megatron's, which gives a batch once more where a step is computed anew."""

    def __init__(self, batches):
        self.batches, self.replaying, self.newest = batches, False, None

    def __next__(self):
        if not self.replaying:
            self.newest = next(self.batches)
        return self.newest


def test_an_iterator_is_looked_at_and_stays_what_it_is():
    """What it gives anew is not counted twice; a generator cannot be looked at."""
    batches, taken = Rerun(iter([1, 2, 3, 4])), []
    restore = watch_iterator(batches, taken.append)
    assert isinstance(batches, Rerun)
    assert not hasattr(batches, "__iter__")
    found = [next(batches)]
    batches.replaying = True
    found.append(next(batches))
    batches.replaying = False
    found.append(next(batches))
    restore()
    assert type(batches) is Rerun
    found.append(next(batches))
    assert (found, taken) == ([1, 1, 2, 3], [1, 2])
    assert watch_iterator((one for one in [1]), taken.append) is None
    assert watch_iterator([1], taken.append) is None


class FP32Optimizer:
    """One as Megatron's, of whole parameters."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_what_a_sharded_state_is_made_of_is_what_its_function_reaches():
    """Modules, and torch's optimizers inside of Megatron's."""
    model = nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    chained = SimpleNamespace(chained_optimizers=[FP32Optimizer(inner), SimpleNamespace(optimizer=inner)])
    chunks, other = [model, model], SimpleNamespace(optimizer=inner)

    class Training:
        def __init__(self):
            self.model = model

        def sharded_state(self):
            return self.model

    def sharded_state():
        return chunks, chained, other

    expected = {"chunks 0": model, "chained 0": inner}  # each once, and not what an optimizer of another kind has
    assert reached_by(sharded_state) == expected
    assert reached_by(Training().sharded_state) == {"model": model}
    assert reached_by(print) == {}
    model.ddp_config = SimpleNamespace(overlap_param_gather=True)
    assert reached_by(sharded_state) == {}
    assert (has_rates(inner), has_rates(chained)) == (True, False)
