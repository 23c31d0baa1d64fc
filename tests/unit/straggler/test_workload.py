"""How long a step takes by its amount of work is learned, whatever the law and the unit."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.straggler.regression import learn, middle_amount, points_of

LAWS = {
    "by the token": lambda length: length,
    "a fixed part": lambda length: 2.0 + length,
    "attention": lambda length: length + 0.5 * length**2,
    "a power": lambda length: length**1.5,
}


def windows(law, count=12, noise=0.03, seed=1):
    """Return windows of eight steps whose lengths vary fourfold."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        lengths = [math.exp(chance.uniform(0.0, math.log(4.0))) for _ in range(8)]
        found.append(points_of(lengths, [0.1 * law(length) * chance.lognormvariate(0.0, noise) for length in lengths]))
    return found


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
def test_what_a_step_takes_by_its_length_is_learned(law):
    """Within two percent over all lengths that were seen, though steps vary by three."""
    seen = windows(law)
    curve = learn(seen, middle_amount(seen))
    assert curve is not None
    assert curve.explains
    middle = math.exp(curve.middle)
    for length in (1.1, 1.5, 2.0, 3.0, 3.8):
        told = math.exp(curve.beyond(math.log(length)))
        assert told == pytest.approx(law(length) / law(middle), rel=0.02)


def test_a_change_for_all_steps_does_not_bend_the_curve():
    """Half of the windows slower, and those the ones with the longer steps: the slope is that of the lengths."""
    seen = windows(LAWS["by the token"], noise=0.005)
    longest = sorted(seen, key=lambda points: sum(amount for amount, _ in points))[6:]
    changed = [[(x, y + 0.3) for x, y in points] if points in longest else points for points in seen]
    before, after = learn(seen, 0.5), learn(changed, 0.5)
    assert (after.slope, after.bend) == pytest.approx((before.slope, before.bend), abs=1e-9)


def test_single_steps_that_were_held_up_do_not_bend_it():
    """One of each window takes five times as long as it should."""
    seen = windows(LAWS["by the token"], noise=0.01)
    held = [[(x, y + (math.log(5.0) if at == 3 else 0.0)) for at, (x, y) in enumerate(points)] for points in seen]
    curve = learn(held, middle_amount(held))
    assert curve.slope == pytest.approx(1.0, abs=0.05)


def test_amounts_that_have_nothing_to_do_with_the_steps_explain_nothing():
    """They are random."""
    chance = random.Random(5)
    seen = [
        points_of(
            [chance.uniform(1.0, 4.0) for _ in range(8)], [0.1 * chance.lognormvariate(0.0, 0.3) for _ in range(8)]
        )
        for _ in range(20)
    ]
    curve = learn(seen, middle_amount(seen))
    assert curve is not None
    assert not curve.explains


def test_steps_that_are_all_alike_tell_nothing():
    """No curve goes through one point."""
    seen = [points_of([7.0] * 8, [0.1 + 0.001 * step for step in range(8)]) for _ in range(12)]
    assert learn(seen, middle_amount(seen)) is None


def test_two_lengths_make_a_straight_line():
    """There is no telling how it bends."""
    seen = [points_of([1.0, 2.0] * 4, [0.1, 0.25] * 4) for _ in range(12)]
    curve = learn(seen, middle_amount(seen))
    assert (curve.slope, curve.bend) == pytest.approx((math.log2(2.5), 0.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_amounts_that_are_none_are_left_out(bad):
    """And so are durations."""
    assert points_of([bad, 1.0, 2.0], [1.0, bad, 1.0]) == [(math.log(2.0), 0.0)]


@given(unit=st.floats(1e-6, 1e9), seed=st.integers(0, 1000), order=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_neither_unit_nor_order_matter(unit, seed, order):
    """Residuals are the same, whatever an amount is counted in, and in whatever order the steps come."""
    seen = windows(LAWS["attention"], seed=seed)
    scaled = [[(amount + math.log(unit), seconds) for amount, seconds in points] for points in seen]
    shuffled = [order.sample(points, len(points)) for points in order.sample(scaled, len(scaled))]
    curve, other = learn(seen, middle_amount(seen)), learn(shuffled, middle_amount(shuffled))
    assert other.residuals(scaled[0]) == pytest.approx(curve.residuals(seen[0]), abs=1e-6)
    assert other.explains == curve.explains
