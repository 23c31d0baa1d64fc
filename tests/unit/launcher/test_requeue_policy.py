"""The rules of the job-level loop, as rules."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.launcher.requeue_policy import (
    FREE_RUNS,
    IDLE_BELOW_S,
    IDLE_STOPS,
    RunEnd,
    decide_next,
    failures_since_progress,
)
from resilience_sdk.postmortem.exit_codes import JobVerdict

FAILED = RunEnd(1)
SAVED_AND_FAILED = RunEnd(1, progressed=True)
PREEMPTED = RunEnd(75)
SAVED_AND_PREEMPTED = RunEnd(75, progressed=True)

ends = st.builds(
    RunEnd,
    code=st.sampled_from([0, 1, 2, 3, 75, 76, 77, 127, 130, 255, -2, -9, -15, -63]),
    lasted_s=st.sampled_from([0.0, 1.0, 59.0, 61.0, 1e6]),
    finished=st.booleans(),
    stop_agreed=st.booleans(),
    asked_to_leave=st.booleans(),
    interrupted=st.booleans(),
    progressed=st.booleans(),
    began=st.booleans(),
    refused_by=st.none() | st.just("job-a"),
    stood=st.none() | st.just("rank 1 made no progress"),
    free=st.booleans(),
)


@given(st.lists(ends, min_size=1, max_size=8), st.integers(0, 4), st.floats(0, 100))
def test_every_history_has_a_decision_whose_parts_agree(history, budget, delay):
    """The exit code is one of the contract and belongs to the verdict; pauses are bounded."""
    step = decide_next(history, budget, delay)
    codes = {
        JobVerdict.FINISHED: {0},
        JobVerdict.PREEMPTED: {75},
        JobVerdict.HARDWARE: {76},
        JobVerdict.STOP: {77, 2},
        JobVerdict.INTERRUPTED: {130},
        JobVerdict.GIVE_UP: {1},
        JobVerdict.RESTART: {1, 75},
    }
    assert step.exit_code in codes[step.verdict]
    assert 0 <= step.delay_s <= 60
    assert 0 <= step.restarts_left <= budget
    assert step.reason
    assert "\n" not in step.reason
    if history[-1].finished:
        assert step.verdict is JobVerdict.FINISHED


@given(st.lists(ends, min_size=1, max_size=200), st.integers(0, 3))
def test_a_loop_without_progress_ends(history, budget):
    """Whatever the command does, runs that save nothing and are short are bounded in number."""
    barren = [attrs.evolve(end, progressed=False, lasted_s=min(end.lasted_s, 59.0)) for end in history]
    runs = next(
        (n for n in range(1, len(barren) + 1) if not decide_next(barren[:n], budget, 0.0).restarts), len(barren) + 1
    )
    assert runs <= (budget + 1 + FREE_RUNS) * IDLE_STOPS + 1


@given(st.lists(st.sampled_from([FAILED, SAVED_AND_FAILED, SAVED_AND_PREEMPTED]), max_size=20))
def test_the_budget_is_new_after_each_checkpoint(history):
    """Failures count from the newest checkpoint on; the run that made it and failed is the first of them."""
    since = history
    for at, end in enumerate(history):
        if end.progressed:
            since = history[at:]
    assert failures_since_progress(history) == sum(end.failed for end in since)


def test_a_failed_command_is_run_again_until_the_budget_is_spent():
    """Two retries, each after a longer pause, then 1; none where none is allowed."""
    steps = [decide_next([FAILED] * count, 2, 5.0) for count in (1, 2, 3)]
    assert [(step.restarts, step.delay_s, step.restarts_left) for step in steps] == [
        (True, 5.0, 1),
        (True, 10.0, 0),
        (False, 0.0, 0),
    ]
    assert (steps[-1].verdict, steps[-1].exit_code) == (JobVerdict.GIVE_UP, 1)
    assert "--max-job-retries 0" in decide_next([FAILED], 0, 5.0).reason
    assert "its 1 job retry is spent" in decide_next([FAILED] * 2, 1, 5.0).reason
    assert "all 2 job retries are spent" in steps[-1].reason


def test_a_hang_that_costs_nothing_of_a_budget_is_no_failure_three_times():
    """It is run again all the same, with a pause; a user who allows no retry gets none."""
    free = attrs.evolve(FAILED, free=True)
    steps = [decide_next([free] * count, 2, 5.0) for count in range(1, 7)]
    assert [step.restarts_left for step in steps] == [2, 2, 2, 1, 0, 0]
    assert [step.restarts for step in steps] == [True] * 5 + [False]
    assert steps[0].delay_s == 5.0
    assert "not counted" in steps[0].reason
    assert not decide_next([free], 0, 5.0).restarts


def test_a_job_that_stood_still_when_the_supervisor_was_to_leave_is_a_failure_for_whoever_starts_it_again():
    """1 and not 75, which would be requeued for nothing; without the signal to us it is one of our retries."""
    stood = attrs.evolve(FAILED, stood="rank 1 made no progress")
    step = decide_next([attrs.evolve(stood, asked_to_leave=True)], 2, 5.0)
    assert (step.verdict, step.exit_code) == (JobVerdict.GIVE_UP, 1)
    assert step.reason.startswith("rank 1 made no progress; then")
    assert decide_next([stood], 2, 5.0).restarts_left == 1
    assert decide_next([attrs.evolve(stood, asked_to_leave=True, finished=True)], 2, 5.0).exit_code == 0


def test_a_preemption_is_no_failure_and_does_not_spin():
    """With progress it is run again at once, for ever; without it pauses grow, and it ends with 75."""
    assert decide_next([SAVED_AND_PREEMPTED] * 50, 0, 5.0).delay_s == 0.0
    assert decide_next([SAVED_AND_PREEMPTED] * 50, 0, 5.0).restarts
    assert decide_next([attrs.evolve(PREEMPTED, lasted_s=IDLE_BELOW_S)] * 50, 0, 5.0).restarts
    steps = [decide_next([PREEMPTED] * count, 0, 5.0) for count in range(1, IDLE_STOPS + 1)]
    assert [(step.restarts, step.delay_s) for step in steps] == [(True, 5.0), (True, 10.0), (False, 0.0)]
    assert (steps[-1].verdict, steps[-1].exit_code) == (JobVerdict.PREEMPTED, 75)


@pytest.mark.parametrize(
    ("end", "verdict", "code"),
    [
        (RunEnd(0), JobVerdict.FINISHED, 0),
        (RunEnd(0, stop_agreed=True), JobVerdict.RESTART, 75),
        (RunEnd(-9, finished=True), JobVerdict.FINISHED, 0),
        (RunEnd(77), JobVerdict.STOP, 77),
        (RunEnd(76), JobVerdict.HARDWARE, 76),
        (RunEnd(130), JobVerdict.INTERRUPTED, 130),
        (RunEnd(-2), JobVerdict.INTERRUPTED, 130),
        (RunEnd(1, interrupted=True), JobVerdict.INTERRUPTED, 130),
        (RunEnd(-15, asked_to_leave=True), JobVerdict.PREEMPTED, 75),
        (RunEnd(0, asked_to_leave=True), JobVerdict.PREEMPTED, 75),
        (RunEnd(0, asked_to_leave=True, finished=True), JobVerdict.FINISHED, 0),
        (RunEnd(77, asked_to_leave=True), JobVerdict.STOP, 77),
        (RunEnd(-15), JobVerdict.RESTART, 1),
        (RunEnd(2, began=False), JobVerdict.STOP, 2),
        (RunEnd(127, began=False), JobVerdict.STOP, 2),
        (RunEnd(2), JobVerdict.RESTART, 1),
        (RunEnd(2, refused_by="job-a"), JobVerdict.STOP, 2),
        (RunEnd(2, refused_by="job-a", asked_to_leave=True), JobVerdict.PREEMPTED, 75),
    ],
)
def test_what_one_end_means(end, verdict, code):
    """The flag beats everything, then what was asked for, then what another run cannot change."""
    step = decide_next([end], 2, 0.0)
    assert (step.verdict, step.exit_code) == (verdict, code)
