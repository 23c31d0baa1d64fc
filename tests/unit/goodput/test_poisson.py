"""Probabilities of counts, and the limits of a rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.goodput.poisson import at_least, limits
from resilience_sdk.goodput.summary import mean_time_between_s


@pytest.mark.parametrize(
    ("count", "least", "most"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (2, 0.2422, 7.225), (5, 1.623, 11.668), (20, 12.217, 30.888)],
)
def test_the_limits_of_a_count_are_those_of_the_tables(count: int, least: float, most: float) -> None:
    """Of Garwood (1936); a mean time between events has them the other way round."""
    assert limits(count) == (pytest.approx(least, abs=5e-4), pytest.approx(most, abs=5e-3))
    low_s, high_s = mean_time_between_s(1000.0, count)
    assert low_s == pytest.approx(1000.0 / most, rel=0.01)
    assert high_s is None if count == 0 else high_s == pytest.approx(1000.0 / least, rel=0.01)


@given(st.integers(1, 60), st.floats(1e-3, 60))
def test_a_tail_is_the_sum_of_its_terms(count: int, expected: float) -> None:
    """Added up from the front."""
    below = math.fsum(math.exp(-expected) * expected**n / math.factorial(n) for n in range(count))
    assert at_least(count, expected) == pytest.approx(1.0 - below, abs=1e-12)


def test_what_is_very_improbable_keeps_its_digits() -> None:
    """Five failures where a thousandth is expected."""
    assert at_least(5, 1e-3) == pytest.approx(1e-15 / 120, rel=2e-3)
    assert (at_least(0, 1.0), at_least(3, 0.0)) == (1.0, 0.0)
