"""The witness of one step: of one batch, or of several whose gradients are added up."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resilience_sdk.rank.pass_print import PassPrint
from resilience_sdk.rank.witness import StepInMaking, print_of_weights, rates_of
from resilience_sdk.recorder.witness_ring import (
    CONTENT,
    FIXED,
    GENERATORS,
    ORDER,
    RATES,
    UNPLACED,
    WEIGHTS,
    WitnessedStep,
)

ROWS = torch.arange(16.0)


def witness(loader, batches, *, per_step, optimizers=(), make=None):
    """Return the witnesses of the steps over so many batches."""
    prints, found = PassPrint(), []
    prints.is_checked = True
    prints.begin(loader)
    with prints.tapped(loader):
        iterator = iter(loader)
    one = make or StepInMaking(prints, optimizers)
    for number in range(batches):
        batch = next(iterator)
        prints.note(batch)
        one.add(3, number, batch)
        if number % per_step == per_step - 1:
            found.append(WitnessedStep(*one.take(number // per_step)))
    return found


def test_each_batch_of_a_step_counts():
    """Another second batch is another step, and the place is that of the first."""
    torch.manual_seed(1)
    batches = [torch.rand(2) for _ in range(4)]
    first, second = witness(batches, 4, per_step=2)
    assert (first.epoch, first.batch, second.batch, first.seen) == (3, 0, 2, CONTENT | FIXED | GENERATORS)
    other, same = witness([batches[0], batches[2], *batches[2:]], 4, per_step=2)
    assert other.content != first.content
    assert same == second


def test_each_order_of_a_step_counts():
    """By its samples, though they have the same values."""
    ones = TensorDataset(torch.ones(16))
    [one] = witness(DataLoader(ones, 4, sampler=range(16)), 2, per_step=2)
    [other] = witness(DataLoader(ones, 4, sampler=[0, 1, 2, 3, 7, 6, 5, 4]), 2, per_step=2)
    assert one.seen & ORDER
    assert (one.content, one.shapes) == (other.content, other.shapes)
    assert one.order != other.order


def test_batches_that_differ_alike_do_not_cancel_each_other():
    """As where the samples of each batch come in the reverse order: a CRC of CRCs would be the same."""
    data = TensorDataset(torch.ones(16))
    [one] = witness(DataLoader(data, 2, sampler=range(16)), 2, per_step=2)
    [other] = witness(DataLoader(data, 2, sampler=[1, 0, 3, 2]), 2, per_step=2)
    assert one.order != other.order


def test_a_step_of_a_loop_without_epochs_counts_its_batches():
    """In the place of a number of the batch, so that another accumulation is seen."""
    one = StepInMaking(PassPrint(), ())
    for _ in range(3):
        one.add(None, 0, ROWS)
    found = WitnessedStep(*one.take(7))
    assert (found.step, found.epoch, found.batch, bool(found.seen & UNPLACED)) == (7, 0, 3, True)


def test_rates_and_generators_are_those_at_the_first_batch():
    """Generators in the first two steps alone; a scheduler that goes on within a step is that of the next one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    found = witness([ROWS] * 8, 8, per_step=2, optimizers=[optimizer])
    assert [bool(one.seen & GENERATORS) for one in found] == [True, True, False, False]
    assert [(one.rate, bool(one.seen & RATES)) for one in found] == [(0.5, True)] * 4


def optimizer_of(*weights):
    return SimpleNamespace(param_groups=[{"params": [one]} for one in weights])


def test_weights_are_known_where_they_lie_here():
    """The first and the last of an optimizer; not of a device, of a class of its own, or whose memory is given back."""
    weights = [torch.nn.Parameter(torch.rand(2, 300)) for _ in range(3)]
    optimizer = optimizer_of(*weights)
    known = print_of_weights([optimizer])
    for at, is_seen in ((0, True), (1, False), (2, True)):
        before = print_of_weights([optimizer])
        weights[at].data[-1, -1] += 1
        assert (print_of_weights([optimizer]) != before) is is_seen
    assert known is not None
    freed = torch.rand(4)
    freed.untyped_storage().resize_(0)
    other = torch.rand(4).as_subclass(type("Sharded", (torch.Tensor,), {}))
    for weight in (torch.empty(4, device="meta"), torch.rand(2, 300).t(), other, freed, torch.empty(0)):
        assert print_of_weights([optimizer_of(weight)]) is None
    assert print_of_weights([SimpleNamespace(param_groups=[]), SimpleNamespace(param_groups=[{"params": []}])]) is None


def test_a_step_has_the_weights_as_they_are_when_it_is_left():
    """Whatever was made of its batches before."""
    weight = torch.nn.Parameter(torch.zeros(1))
    found = []
    for last in (1.0, 1.0, 2.0):
        weight.data.fill_(0.0)
        one = StepInMaking(PassPrint(), [torch.optim.SGD([weight], lr=0.5)])
        one.add(0, 0, ROWS)
        weight.data.fill_(last)
        found.append(WitnessedStep(*one.take(0)))
    assert [bool(one.seen & WEIGHTS) for one in found] == [True] * 3
    assert found[0] == found[1]
    assert found[0].weights != found[2].weights


def test_batches_that_make_no_step_are_dropped():
    """As those at the end of an epoch."""
    one = StepInMaking(PassPrint(), ())
    assert one.take(0) is None
    one.add(0, 0, ROWS)
    one.drop()
    assert one.take(0) is None
    with pytest.raises(ZeroDivisionError):
        one.add(0, 0, Odd())


def test_a_batch_that_nothing_is_made_of_is_left_out():
    """As those that a loop skips on its way back: the step is the one that it would have been."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    takes = []
    for skipped in (0, 2):
        one = StepInMaking(PassPrint(), [optimizer])
        for number in range(skipped):
            optimizer.param_groups[0]["lr"] = number
            one.add(0, number, ROWS[:3])
            one.undo()
        optimizer.param_groups[0]["lr"] = 0.5
        one.add(0, 5, ROWS)
        one.add(0, 6, ROWS + 1)
        one.add(0, 7, ROWS)
        one.undo()
        takes.append((one.take(0), one.looks_at_generators))
        one.undo()
        assert one.take(1) is None
    assert takes[0] == takes[1]


class Odd:
    """A batch that cannot be looked at."""

    @property
    def shape(self):
        return 1 / 0


def test_the_rates_of_very_many_groups_are_those_of_some():
    """One for each parameter: a step has not the time for all."""
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1 + index} for index in range(1000)])
    known = rates_of([optimizer])
    optimizer.param_groups[0]["lr"] = 7.0
    assert known is not None
    assert rates_of([optimizer]) != known
    optimizer.param_groups = optimizer.param_groups[:64]
    optimizer.param_groups[63]["lr"] = 9.0
    last = rates_of([optimizer])
    optimizer.param_groups[63]["lr"] = 8.0
    assert rates_of([optimizer]) != last
