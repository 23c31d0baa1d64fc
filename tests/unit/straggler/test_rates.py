"""How often a section is passed in a step: as it is now, not as it was over the whole run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.windowing import PassRate, passes_per_step


@pytest.mark.parametrize(
    ("passes", "steps", "often"),
    [
        (17, 17, 1),
        (18, 17, 1),
        (68, 17, 4),
        (71, 17, 4),
        (9, 17, 0.5),
        (4, 40, 0.1),
        (25, 10, 2.5),
        (0, 5, 1),
        (5, 0, 1),
    ],
)
def test_how_often_a_section_is_passed_in_a_step(passes, steps, often):
    """Micro-batches, and what is done every few steps; counts within a step may be off by one."""
    assert passes_per_step(passes, steps) == pytest.approx(often)


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 20))
def test_what_was_counted_before_says_nothing(passes, steps, often, every):
    """Whatever the counts are when a section begins, and however often somebody looks."""
    rate = PassRate(passes, steps)
    for step in range(every, 200, every):
        rate.note(passes + often * step, steps + step)
    assert rate.often == often
    assert rate.step_of(passes + often * (step - 3)) == pytest.approx(steps + step - 3, abs=2)


def test_more_micro_batches_from_now_on_show_within_a_few_measurements():
    """1 per step for 8,000 steps, then 4; and one pause, in which only the steps go on, moves nothing."""
    rate = PassRate(0, 0)
    for step in range(2, 8000, 2):
        rate.note(step, step)
    passes = step
    for later in range(2, 130, 2):
        rate.note(passes + 4 * later, step + later)
    assert rate.often == 4
    rate.note(passes + 4 * later, step + later + 1000)
    for more in range(2, 100, 2):
        rate.note(passes + 4 * (later + more), step + later + 1000 + more)
        assert rate.often == 4


def test_another_heartbeat_counts_from_its_own_beginning():
    """Counts that fall are another's."""
    rate = PassRate(0, 5000)
    rate.note(40, 5400)
    rate.note(48, 8)
    rate.note(96, 56)
    assert rate.often == 1
