"""When the scheduler ends the job."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.preemption.context import SLURM_END, end_time, is_time


def test_slurm_tells_the_end_and_others_do_not(monkeypatch):
    """Unix seconds from the job's environment; the process's own without another."""
    assert end_time({SLURM_END: "1700000600"}, 1_700_000_000.0) == 1_700_000_600.0
    assert end_time({}, 0.0) is None
    monkeypatch.setenv(SLURM_END, "99999999999")
    assert end_time() == 99_999_999_999.0


def test_an_end_that_has_passed_is_unknown():
    """The job still runs, so it was given more time, and its environment does not tell how much."""
    assert end_time({SLURM_END: "1700000000"}, 1_700_000_000.0) is None


@given(st.text(max_size=12) | st.sampled_from(["inf", "nan", "-1", "1e400", "UNLIMITED", " 12 "]))
def test_any_text_gives_a_future_time_or_none(text):
    """Nothing that stands there can end a job at once or raise."""
    end = end_time({SLURM_END: text}, 10.0)
    assert end is None or (math.isfinite(end) and end > 10.0)


@pytest.mark.parametrize(
    ("begun_s", "left_s", "save_s", "expected"),
    [
        (1000, 70, 0, False),
        (1000, 50, 0, True),
        (1000, 70, 20, False),
        (1000, 70, 50, True),  # a save of 75 s, and 10 s to leave
        (1000, 100, 50, False),
        (10, 30, 0, False),  # less than half of the time is gone
        (40, 30, 0, True),
        (1000, -5, 0, False),  # it got more time, nobody knows how much
    ],
)
def test_the_end_is_near_when_a_save_just_fits_but_not_in_the_first_half(begun_s, left_s, save_s, expected):
    """With the real clock, and `preempt_time` of 60 s."""
    now = time.time()
    assert is_time(now - begun_s, 60.0, save_s, {SLURM_END: str(now + left_s)}) is expected


def test_without_an_end_it_is_never_time():
    """No scheduler, or one that does not tell."""
    assert not is_time(0.0, 60.0, 1e9, {})
