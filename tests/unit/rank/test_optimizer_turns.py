"""Steps of the user's loop by the steps of its optimizers: real loops, whose code is read as that of any script."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.rank.optimizer_turns import OptimizerTurns, call_place, range_loops


class Counted:
    """Counts as a rank does."""

    def __init__(self):
        self.turns = OptimizerTurns()
        self.steps = 0

    def step(self, optimizer):
        """Make a step of an optimizer."""
        self.steps += self.turns.counts(hash(optimizer), call_place)
        self.steps -= self.turns.surplus
        self.turns.surplus = 0


def alone(count, n, k):
    """One optimizer, over epochs."""
    for _ in range(2):
        for _ in range(n):
            count.step("w")
    return 2 * n


def in_turn(count, n, k):
    """A GAN's."""
    for _ in range(n):
        count.step("d")
        count.step("g")
    return n


def critic_inside(count, n, k):
    """Several of the critic, one of the generator."""
    for _ in range(n):
        for _ in range(k):
            count.step("d")
        count.step("g")
    return n


def critic_inside_after(count, n, k):
    """The other way round."""
    for _ in range(n):
        count.step("g")
        for _ in range(k):
            count.step("d")
    return n


def critic_in_functions(count, n, k):
    """Each in a function of its own, and the data of a loader."""

    def train_critic():
        for _ in range(k):
            count.step("d")

    def train_generator():
        count.step("g")

    for _batch in iter([None] * n):
        train_critic()
        train_generator()
    return n


def generator_now_and_then(count, n, k):
    """The generator in every k-th iteration, as in many examples."""
    for i in range(n):
        count.step("d")
        if i % k == k - 1:
            count.step("g")
    return n


def generator_first_now_and_then(count, n, k):
    """The same with the generator before."""
    for i in range(n):
        if i % k == 0:
            count.step("g")
        count.step("d")
    return n


def skipped(count, n, k):
    """A GradScaler leaves the step of one out now and then."""
    for i in range(n):
        if i % (k + 1):
            count.step("d")
        count.step("g")
    return n


def from_one_place(count, n, k):
    """Optimizers in a list, or in backward: one for each group."""
    for _ in range(n):
        for name in [f"w{number}" for number in range(k)]:
            count.step(name)
    return n


def both_inside(count, n, k):
    """Each several times."""
    for _ in range(n):
        for _ in range(k):
            count.step("d")
        for _ in range(2):
            count.step("g")
    return n


def two_critics_inside(count, n, k):
    """Two take turns inside."""
    for _ in range(n):
        for _ in range(k):
            count.step("d1")
            count.step("d2")
        count.step("g")
    return n


def once_per_epoch(count, n, k):
    """The second steps at the end of an epoch: steps are batches."""
    for _ in range(2):
        for _batch in iter([None] * n):
            count.step("w")
        count.step("architecture")
    return 2 * n


LOOPS = (
    alone,
    in_turn,
    critic_inside,
    critic_inside_after,
    critic_in_functions,
    generator_now_and_then,
    generator_first_now_and_then,
    skipped,
    from_one_place,
    both_inside,
    two_critics_inside,
    once_per_epoch,
)


@pytest.mark.parametrize("loop", LOOPS)
@settings(max_examples=20)
@given(n=st.integers(3, 25), k=st.integers(1, 20))
def test_steps_are_those_of_the_loop(loop, n, k):
    """In every iteration one, from the second on, whatever the turns."""
    count = Counted()
    iterations = loop(count, n, k)
    assert iterations - (loop in (skipped, once_per_epoch)) <= count.steps <= iterations


def test_what_cannot_be_told_is_the_first_ones():
    """A phase of its own for each, and more turns than an iteration has: as if there were one optimizer."""
    count = Counted()
    for _ in range(3):
        for _ in range(40):
            count.step("w")
        count.step("late")
    assert 119 <= count.steps <= 120
    count = Counted()
    for _ in range(10):
        count.step("first")
    for _ in range(10):
        count.step("second")
    assert 19 <= count.steps <= 20


def test_optimizers_that_are_made_anew_are_not_kept():
    """One for each iteration: no memory grows."""
    count = Counted()
    for number in range(1000):
        count.step(f"w{number}")
    assert len(count.turns._places) <= 64


def test_the_code_of_a_function_is_read_once():
    """It takes milliseconds: a program that makes optimizers all the time would stand still for it."""
    code = critic_inside.__code__
    assert range_loops(code) is range_loops(code)
    assert sorted(range_loops(code).values()) == [True, True]
