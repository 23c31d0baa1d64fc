"""What a window says about its ranks."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.straggler.section_history import levels_of, upper_centres
from resilience_sdk.straggler.windowing import SectionWindow, Window, centres, step_time, typical_s

rows = st.lists(st.lists(st.floats(1e-4, 1e3), min_size=8, max_size=8), min_size=5, max_size=12)


def test_missing_durations_are_left_out_of_the_median_of_a_step():
    """Single ones, and a whole step."""
    nan = math.nan
    found = centres([[1.0, nan, nan], [3.0, 2.0, nan], [8.0, 4.0, nan]])
    assert found[:2] == [3.0, 3.0]
    assert math.isnan(found[2])


def test_what_all_ranks_have_in_common_is_taken_out():
    """Steps of 1 to 8 s, and one rank at 1.5 times of each."""
    of_ranks = {rank: [float(step) for step in range(1, 9)] for rank in range(5)}
    of_ranks[3] = [1.5 * value for value in of_ranks[3]]
    leveled = levels_of(of_ranks, few=5)
    assert leveled.levels == pytest.approx({0: 0, 1: 0, 2: 0, 3: math.log(1.5), 4: 0})
    assert leveled.error == pytest.approx(0.0)


def test_a_rank_needs_half_of_the_steps():
    """Three of eight say too little."""
    of_ranks = {rank: [1.0] * 8 for rank in range(5)}
    of_ranks[0] = [1.0] * 3 + [math.nan] * 5
    of_ranks[1] = [1.0] * 4 + [math.nan] * 4
    levels = levels_of(of_ranks, few=5).levels
    assert math.isnan(levels[0])
    assert levels[1] == 0.0


def test_among_few_a_rank_is_compared_with_the_others():
    """Of two, the median of both would halve the difference; of three, a fast one makes nobody slow."""
    assert levels_of({0: [1.0] * 8, 1: [1.1] * 8}, few=5).levels[1] == pytest.approx(math.log(1.1))
    levels = levels_of({0: [0.2] * 8, 1: [1.0] * 8, 2: [1.0] * 8}, few=5).levels
    assert (levels[1], levels[2]) == (0.0, 0.0)
    assert upper_centres([[1.0], [2.0], [math.nan], [3.0], [4.0]]) == [3.0]
    assert levels_of({7: [1.0] * 8}, few=5).levels == {7: 0.0}


def test_the_error_is_what_a_median_of_eight_varies_by():
    """1.25 sigma / sqrt(8), within a fifth."""
    source = random.Random(1)
    fleet = {rank: [source.lognormvariate(0.0, 0.03) for _ in range(8)] for rank in range(64)}
    assert levels_of(fleet, few=5).error == pytest.approx(1.2533 * 0.03 / math.sqrt(8), rel=0.25)


def test_the_time_of_a_step_is_that_of_the_heartbeat_or_the_sum_of_its_parts():
    """Or what the caller says; and 0 when nothing tells it."""
    fwd = SectionWindow("fwd", "compute", {rank: [0.2, 0.2] for rank in range(3)})
    wait = SectionWindow("comm_wait", "comm", {rank: [0.1, 0.1] for rank in range(3)})
    step = SectionWindow("step", "heartbeat", {rank: [0.35, 0.35] for rank in range(3)})
    assert step_time(Window(0, (fwd, wait, step))) == 0.35
    assert step_time(Window(0, (fwd, wait))) == pytest.approx(0.3)
    assert step_time(Window(0, (fwd,), step_time_s=1.0)) == 1.0
    assert step_time(Window(0, ())) == typical_s(SectionWindow("fwd", "compute", {})) == 0.0
    assert Window(16, ()).last_step == 23


@settings(max_examples=40)
@given(rows, st.floats(0.01, 100.0))
def test_levels_do_not_depend_on_the_unit(of_ranks: list[list[float]], scale: float):
    """Nor on what a step has in common."""
    plain = levels_of(dict(enumerate(of_ranks)), few=5)
    scaled = levels_of({rank: [scale * value for value in row] for rank, row in enumerate(of_ranks)}, few=5)
    assert scaled.levels == pytest.approx(plain.levels, abs=1e-9)


@settings(max_examples=40)
@given(rows, st.floats(1.0, 10.0))
def test_a_slower_rank_never_has_a_lower_level(of_ranks: list[list[float]], by: float):
    """Whatever the others do."""
    before = levels_of(dict(enumerate(of_ranks)), few=5).levels[0]
    slower = [[by * value for value in of_ranks[0]], *of_ranks[1:]]
    assert levels_of(dict(enumerate(slower)), few=5).levels[0] >= before - 1e-9
