"""A rise of a series is found where it is, and nowhere else."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.regression import LEAST_NOISE, find_rise, noise_of, trimmed_mean


def noisy(level: float, count: int, random_: random.Random, deviation: float = 0.01) -> list[float]:
    return [random_.gauss(level, deviation) for _ in range(count)]


def test_a_rise_of_five_deviations_is_found_where_it_is():
    """Index, height and significance."""
    source = random.Random(1)
    rise = find_rise(noisy(1.0, 30, source) + noisy(1.05, 10, source))
    assert rise is not None
    assert abs(rise.length - 10) <= 1
    assert rise.rise == pytest.approx(0.05, abs=0.01)
    assert rise.z > 8


def test_noise_alone_is_seldom_significant():
    """Of 300 windows at the end of noise, none is 5.5 deviations away."""
    source = random.Random(2)
    series = noisy(0.0, 400, source)
    found = [find_rise(series[max(0, end - 64) : end]) for end in range(100, 400)]
    assert max(rise.z for rise in found if rise is not None) < 5.5


def test_a_fall_is_no_rise():
    """Warm-up is slower than what follows."""
    source = random.Random(3)
    rise = find_rise(noisy(2.0, 20, source) + noisy(1.0, 20, source))
    assert rise is None or rise.z < 5.0


def test_one_extreme_window_is_no_change():
    """Whether it was the last or one of the last."""
    source = random.Random(4)
    flat = noisy(0.0, 40, source)
    for at in (-1, -2, -3):
        series = list(flat)
        series[at] = 5.0
        rise = find_rise(series)
        assert rise is None or rise.z < 5.0


def test_a_short_series_has_no_baseline():
    """Eight windows before and three after are the least."""
    assert find_rise([0.0] * 8 + [1.0] * 2) is None
    assert find_rise([]) is None
    assert find_rise([0.0] * 8 + [1.0] * 3) is not None


def test_the_noise_does_not_see_a_shift():
    """One step of a series is left out."""
    source = random.Random(5)
    flat = noisy(0.0, 20, source)
    shifted = flat[:10] + [value + 3.0 for value in flat[10:]]
    assert noise_of([shifted]) == pytest.approx(noise_of([flat]), rel=0.3)


def test_the_noise_of_nothing_is_beyond_all_bounds_and_of_a_constant_the_least():
    """So that nothing is significant without data, and rounding is not taken for silence."""
    assert noise_of([[]]) == noise_of([[1.0]]) == math.inf
    assert noise_of([[1.0] * 9]) == LEAST_NOISE


def test_the_noise_is_that_of_the_normal_distribution_it_comes_from():
    """Within ten percent for many short series."""
    source = random.Random(6)
    assert noise_of([noisy(0.0, 8, source, 0.02) for _ in range(200)]) == pytest.approx(0.02, rel=0.1)


@given(st.lists(st.floats(-10, 10), min_size=11, max_size=64), st.floats(-5, 5))
def test_what_the_level_is_does_not_matter(values: list[float], offset: float):
    """Durations in other units have another logarithm, and the same changes."""
    a, b = find_rise(values), find_rise([value + offset for value in values])
    if a is not None and b is not None and a.length == b.length:
        assert b.rise == pytest.approx(a.rise, abs=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40))
def test_the_trimmed_mean_lies_within_the_values(values: list[float]):
    """And does without the extremes where there are eight or more."""
    assert min(values) - 1e-9 <= trimmed_mean(values) <= max(values) + 1e-9
    assert trimmed_mean([0.0] * 7 + [1e9]) == 0.0
