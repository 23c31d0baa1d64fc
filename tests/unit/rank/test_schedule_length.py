"""A training that is made longer is known by the numbers that its schedules go by, and nothing of it is called."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from adapter_frameworks import require
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, SequentialLR

from resilience_sdk.rank import schedule_length
from resilience_sdk.rank.schedule_length import length_of

TOTAL = 100
ARGS = SimpleNamespace(total=100, name="a")


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


class Schedule:
    def __init__(self, total):
        self.total = total

    def factor(self, step):
        return 1 - step / self.total


def closed(total):
    return lambda step: 1 - step / total


def linear(step, warmup, total):
    return min(step / warmup, 1 - step / total)


MADE = {
    "of transformers": lambda total: of_transformers(total),
    "closure": lambda total: LambdaLR(optimizer(), closed(total)),
    "partial": lambda total: LambdaLR(optimizer(), functools.partial(linear, warmup=5, total=total)),
    "method": lambda total: LambdaLR(optimizer(), Schedule(total).factor),
    "one of two": lambda total: LambdaLR(optimizer(), lambda step, total=total: 1 - step / total),
    "wrapped": lambda total: SimpleNamespace(scheduler=LambdaLR(optimizer(), closed(total))),
    "behind another": lambda total: sequence(total),
}


def of_transformers(total):
    require("transformers")
    import transformers

    return transformers.get_linear_schedule_with_warmup(optimizer(), 5, total)


def sequence(total):
    own = optimizer()
    return SequentialLR(own, [ConstantLR(own), LambdaLR(own, closed(total))], milestones=[3])


@pytest.mark.parametrize("name", MADE)
def test_another_length_is_another_number(name):
    """The same length is the same one, in each process."""
    assert length_of([MADE[name](100)]) == length_of([MADE[name](100)]) != length_of([MADE[name](200)])
    assert length_of([MADE[name](100)])


def test_a_scheduler_of_a_framework_names_it_itself():
    """DeepSpeed saves its place alone."""
    require("deepspeed", "--no-build-isolation deepspeed==0.19.8")
    from deepspeed.runtime import lr_schedules as schedules

    one, same, other = (schedules.WarmupDecayLR(optimizer(), total) for total in (100, 100, 200))
    assert length_of([one]) == length_of([same]) != length_of([other])
    one.step()
    assert length_of([one]) == length_of([same])


def test_names_of_the_module_count(monkeypatch):
    """Numbers, and those that are asked for of an object."""
    for function in (lambda step: 1 - step / TOTAL, lambda step: 1 - step / ARGS.total):
        with monkeypatch.context() as patch:
            before = length_of([LambdaLR(optimizer(), function)])
            patch.setitem(globals(), "TOTAL", 200)
            patch.setattr(ARGS, "total", 200)
            assert before != length_of([LambdaLR(optimizer(), function)])


def test_where_nothing_names_a_length_nothing_is_known():
    """torch's own come back with the length that they had."""
    own = optimizer()
    assert length_of([LambdaLR(own, lambda step: 0.9**step), CosineAnnealingLR(own, 9), own, None, "a"], None) == 0
    assert length_of([], 16) != length_of([], 20)
    circle = SimpleNamespace()
    circle.scheduler = circle
    assert length_of([circle]) == 0


def test_an_object_of_the_program_is_not_asked():
    """Neither a property nor `__getattr__`."""

    class Loud:
        total = property(lambda self: pytest.fail("it was asked"))

        def __getattr__(self, name):
            pytest.fail(f"it was asked for {name}")

    loud = Loud()
    assert length_of([SimpleNamespace(lr_lambdas=[lambda step: step / loud.total])]) == 0
    assert list(schedule_length._numbers(loud, 3, ("total",))) == []
