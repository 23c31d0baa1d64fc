"""Scales take whatever a job measured: positions stay inside, ticks are round and cover, words are short."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.report import scales

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.floats()


@given(NUMBERS, NUMBERS, st.integers(2, 10))
def test_ticks_cover_their_range_in_order(one, other, most):
    """The first tick is at or below the least value, the last at or above the largest, and they grow."""
    low, high = min(one, other), max(one, other)
    found = scales.ticks(low, high, most)
    assert found[0] <= max(low, -1e300)
    assert found[-1] >= min(high, 1e300)
    assert len(found) >= 2
    assert all(math.isfinite(tick) for tick in found)
    assert all(before < after for before, after in pairwise(found))


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6))
def test_ticks_are_few(one, other):
    """An axis has about as many ticks as it was given."""
    assert len(scales.ticks(min(one, other), max(one, other), 5)) <= 7


@given(st.floats(1e-3, 1e9))
def test_ticks_of_time_begin_at_zero_and_stay_inside(seconds):
    """An axis of elapsed time has some ticks, none beyond its end."""
    found = scales.time_ticks(seconds)
    assert found[0] == 0
    assert found[-1] <= seconds * (1 + 1e-6)
    assert len(found) <= 9


@given(ANYTHING, ANYTHING, ANYTHING)
def test_a_position_is_a_share(value, low, high):
    """Whatever comes in, a position is a number from 0 to 1."""
    assert 0.0 <= scales.share_of(value, low, high) <= 1.0


def test_positions_are_in_proportion():
    """A value stands between the ends as it should."""
    assert scales.share_of(15.0, 10.0, 20.0) == 0.5
    assert scales.share_of(5.0, 10.0, 20.0) == 0.0
    assert scales.share_of(1.7e308, -1.7e308, 1.7e308) == 1.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0"), (0.0532, "53.2ms"), (0.9999, "1s"), (5, "5s"), (59.99, "1m"), (60, "1m"), (90, "1m 30s")),
        *((3600, "1h"), (4500, "1h 15m"), (86400, "1d"), (216000, "2d 12h"), (-90, "-1m 30s"), (math.inf, "?")),
    ],
)
def test_elapsed_time_has_its_two_largest_units(seconds, words):
    """Labels of an axis of time are short."""
    assert scales.elapsed(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "-"), (0.0, "0"), (1234.0, "1234"), (12345.0, "12.3k"), (1.5e6, "1.5M"), (math.nan, "nan")],
)
def test_numbers_have_three_digits(value, words):
    """A label is as wide as its place."""
    assert scales.number(value) == words


@given(ANYTHING)
def test_words_never_fail(value):
    """Any float has words."""
    for words in (scales.elapsed, scales.number, scales.percent, scales.size, scales.spoken, scales.clock, scales.zone):
        assert isinstance(words(value), str)


def test_a_single_spike_does_not_press_a_curve_flat():
    """The axis ends near what is usual, and at the largest value where there are few or all are large."""
    assert scales.upper_end([0.2] * 99 + [60.0]) == pytest.approx(0.3)
    assert scales.upper_end([0.2] * 10 + [60.0]) == 60.0
    assert scales.upper_end([0.2] * 50 + [60.0] * 50) == 60.0


def test_a_small_share_is_told_from_none():
    """A bucket that took a moment is not 0.0%."""
    assert scales.percent(0.0001) == "< 0.1%"
    assert scales.percent(0.0) == "0.0%"
    assert scales.percent(None) == "-"
    assert scales.size(5_345_678_901) == "5.35 GB"
    assert scales.spoken(0.0574) == "57.4 ms"
    assert scales.spoken(40.0) == "40.0 s"
