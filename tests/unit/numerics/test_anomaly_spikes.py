"""A spike is told from noise, from a falling curve and from a new level."""

import math
import random
from statistics import median, median_high

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.numerics.anomaly import GRAD_NORM_FACTOR, LOSS_FACTOR, UsualValues, bound

finite = st.floats(min_value=-1e6, max_value=1e6)


def spikes_of(values, factor):
    usual, spikes = UsualValues(factor), []
    for index, value in enumerate(values):
        if not usual.takes(value):
            usual.add(value)
            spikes.append(index)
    return spikes


@given(st.lists(finite, min_size=1, max_size=60), st.floats(min_value=0.01, max_value=100))
def test_the_bound_scales_with_the_values_and_is_never_below_their_median(values, scale):
    """Another unit of the loss changes nothing, and half of the values can never be spikes."""
    middle, plain = bound(sorted(values), LOSS_FACTOR)
    scaled = bound(sorted(value * scale for value in values), LOSS_FACTOR)
    assert scaled == pytest.approx((middle * scale, plain * scale), rel=1e-6, abs=1e-6)
    assert sum(value > plain for value in values) <= len(values) / 2


@given(st.lists(finite, min_size=1, max_size=60))
def test_the_bound_goes_by_the_median_and_the_deviations_from_it(values):
    """By Python's own medians; of an even number of deviations the upper one in the middle is taken."""
    middle = median(values)
    spread = 1.4826 * median_high([abs(value - middle) for value in values])
    expected = middle + max(10.0 * spread, (LOSS_FACTOR - 1.0) * abs(middle))
    assert bound(sorted(values), LOSS_FACTOR) == pytest.approx((middle, expected))


@given(st.lists(finite, max_size=31))
def test_nothing_is_a_spike_before_there_is_anything_to_compare_with(values):
    """The first 31 values of a run are taken as they come."""
    assert spikes_of(values, LOSS_FACTOR) == []


def test_a_noisy_falling_loss_has_no_spikes_and_a_jump_is_one():
    """A real curve: 5,000 steps of exponential decay with 5 % of noise, and one value of twice the usual."""
    draw = random.Random(1)
    losses = [(1.5 + 9 * math.exp(-step / 300)) * draw.gauss(1, 0.05) for step in range(5000)]
    assert spikes_of(losses, LOSS_FACTOR) == []
    losses[3000] = 3.0
    assert spikes_of(losses, LOSS_FACTOR) == [3000]


def test_a_gradient_norm_may_double_and_not_be_ten_times_as_large():
    """Norms scatter by half; a factor of ten is seen, one of two is not."""
    draw = random.Random(2)
    norms = [draw.lognormvariate(0, 0.3) for _ in range(2000)]
    norms[1000], norms[1500] = 2.0, 10.0
    assert spikes_of(norms, GRAD_NORM_FACTOR) == [1500]


def test_a_level_that_lasts_is_the_usual_one_after_a_while():
    """After a change of the data the higher loss is a spike for some steps, and then no more."""
    seen = spikes_of([1.0] * 200 + [3.0] * 400, LOSS_FACTOR)
    assert seen[0] == 200
    assert seen[-1] < 200 + 128
