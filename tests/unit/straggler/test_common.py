"""Everybody slower is told from everybody having more to do, where the amounts of work are known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.straggler.regression import Common, level_of, steps_of, work_of
from resilience_sdk.straggler.verdicts import Rules

Z = Rules().regression_z


def lengths(chance):
    return [math.exp(chance.uniform(0.0, math.log(4.0))) for _ in range(8)]


def points_in(rows, amounts, few):
    return work_of(steps_of(list(rows.values()), few), rows, amounts, few)


def rises(windows, slower=lambda window: 1.0, amounts=lambda chance, window: lengths(chance), told=lambda a, w: a):
    """Return in which windows a rise of three percent is seen; `amounts` is the truth, `told` what is told of it."""
    chance, common, found = random.Random(3), Common(), []
    for window in range(windows):
        work = amounts(chance, window)
        row = [0.1 * a**1.2 * slower(window) * chance.lognormvariate(0.0, 0.02) for a in work]
        rows = dict.fromkeys(range(8), row)
        said = told(work, window)
        points = [] if said is None else points_in(rows, dict.fromkeys(range(8), said), few=5)
        common.add(level_of(row), points)
        rise = common.rise()
        if rise is not None and rise.z >= Z and rise.rise >= math.log1p(0.03):
            found.append(window)
    return found


def slower_from_20(window):
    return 1.08 if window >= 20 else 1.0


def test_eight_percent_are_seen_among_lengths_that_vary_fourfold():
    """Within eight windows, if the lengths are told; else not at all."""
    found = rises(40, slower_from_20)
    assert 20 < found[0] < 28
    assert rises(40, slower_from_20, told=lambda work, window: None) == []


@pytest.mark.parametrize(
    "told",
    [
        lambda work, window: [math.nan] * 8,
        lambda work, window: [0.0] * 8,
        lambda work, window: [5.0] * 8,
        lambda work, window: work[1:] + work[:1],  # those of another step
        lambda work, window: [window + 1.0] * 8,
        lambda work, window: work if window % 2 else None,
        lambda work, window: [a if at < 3 else math.nan for at, a in enumerate(work)],
    ],
    ids=["NaN", "zero", "constant", "shifted", "a counter", "now and then", "of few steps"],
)
def test_what_tells_nothing_raises_no_alarm(told):
    """In a healthy run of any lengths."""
    assert rises(64, told=told) == []


@pytest.mark.parametrize(
    "told", [lambda work, window: None, lambda work, window: [5.0] * 8, lambda work, window: [0.0] * 8]
)
def test_and_hides_none(told):
    """Steps that are alike are compared as they are."""
    found = rises(40, slower_from_20, amounts=lambda chance, window: [2.0] * 8, told=told)
    assert 20 < found[0] < 28


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_longer_sequences_are_no_regression(spread):
    """A curriculum: from some step on all sequences are four times as long. Untold, all steps are slower."""

    def curriculum(chance, window):
        return [(4.0 if window >= 20 else 1.0) * math.exp(chance.uniform(0.0, spread)) for _ in range(8)]

    assert rises(60, amounts=curriculum) == []
    assert rises(60, amounts=curriculum, told=lambda work, window: None)[0] < 28
    later = rises(70, lambda window: 1.1 if window >= 45 else 1.0, amounts=curriculum)
    assert 45 < later[0] < 56


@given(unit=st.floats(1e-3, 1e6), constant=st.floats(1e-3, 1e6), seed=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_the_unit_does_not_matter_and_a_constant_changes_nothing(unit, constant, seed):
    """The levels of the windows are what they were."""
    chance = random.Random(seed)
    plain, scaled, alike, untold = Common(), Common(), Common(), Common()
    for _ in range(16):
        work = lengths(chance)
        row = [0.1 * a * chance.lognormvariate(0.0, 0.02) for a in work]
        rows, level = {0: row}, level_of(row)
        plain.add(level, points_in(rows, {0: work}, 5))
        scaled.add(level, points_in(rows, {0: [unit * a for a in work]}, 5))
        alike.add(level, points_in(rows, {0: [constant] * 8}, 5))
        untold.add(level)
    assert scaled.newest == pytest.approx(plain.newest, abs=1e-6)
    assert (alike.newest, alike.rise()) == (untold.newest, untold.rise())


def test_ranks_of_different_amounts_are_taken_by_their_middle_and_few_by_the_fastest():
    """The median rank has the median amount; of few, the amount counts that the fastest had."""
    rows = {rank: [0.1 * (rank + 1)] * 8 for rank in range(5)}
    amounts = {rank: [10.0 * (rank + 1)] * 8 for rank in range(5)}
    assert points_in(rows, amounts, few=5) == [(math.log(30.0), math.log(rows[2][0]))] * 8
    assert points_in(rows, amounts, few=6) == [(math.log(10.0), math.log(0.1))] * 8
    assert points_in(rows, {3: amounts[3]}, few=6) == []  # nothing is known of the fastest
    assert points_in(rows, {}, few=5) == []
    assert points_in(rows, {0: [1.0]}, few=5) == []


@given(st.permutations(list(range(6))))
def test_the_order_of_the_ranks_does_not_matter(order):
    """Neither do those that tell nothing."""
    rows = {rank: [0.1 * (rank + 1) + 0.01 * at for at in range(8)] for rank in range(6)}
    amounts = {rank: [float(rank + 1 + at) for at in range(8)] for rank in range(6) if rank != 2}
    for few in (5, 7):
        assert points_in({rank: rows[rank] for rank in order}, amounts, few) == points_in(rows, amounts, few)
