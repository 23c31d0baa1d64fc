from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.checkpoint.history import (
    PRIOR_MTTF_S,
    SOON_S,
    CheckpointId,
    find_quarantined,
    find_setbacks,
    mean_time_to_failure_s,
)
from resilience_sdk.incidents import Incident, event_fields

BAD = CheckpointId("step-00000120", 5.0)


def event(t, name, attempt=0, **fields):
    return {"t": float(t), "event": name, "job": "j", "attempt": attempt, **fields}


def resumed(t, attempt, identity=BAD):
    return event(t, "resume", attempt, checkpoint=identity.name, created_at=identity.created_at)


def failed(t, attempt, kind="crash", **fields):
    return event(t, "incident", attempt, kind=kind, id=f"{attempt:04d}-{kind}", **fields)


def test_nothing_seen_is_the_prior():
    """An empty journal gives the assumed time to a failure."""
    assert mean_time_to_failure_s([]) == PRIOR_MTTF_S


def test_time_and_failures_are_counted_exactly():
    """(prior + 1000 s + 2000 s running) over (1 + 2 failures); the pause between two attempts is no running."""
    events = [
        event(0, "attempt_start", 0),
        failed(1000, 0),
        event(5000, "attempt_start", 1),
        event(6000, "ckpt_commit", 1),
        failed(7000, 1, "hang"),
    ]
    assert mean_time_to_failure_s(events, prior_s=600.0) == (600 + 1000 + 2000) / 3


def test_a_preemption_is_no_failure():
    """A stop with a notice loses nothing, so it does not make saves more frequent."""
    events = [event(0, "attempt_start"), failed(1000, 0, "preemption")]
    assert mean_time_to_failure_s(events, prior_s=600.0) == 1600


def test_a_requeued_job_counts_its_attempts_anew():
    """Attempt 0 of the next job under the same key is another attempt: the queue time is not running time."""
    events = [event(0, "run_start"), failed(100, 0), event(9000, "run_start"), failed(9100, 0)]
    assert mean_time_to_failure_s(events, prior_s=300.0) == 500 / 3


@given(st.lists(st.tuples(st.floats(0, 1e6), st.sampled_from(["crash", "hang", "preemption", None])), max_size=20))
def test_the_estimate_is_finite_and_falls_with_failures(items):
    """Always above 0; one failure more never makes it longer."""
    items = sorted(items, key=lambda item: item[0])
    events = [event(t, "ckpt_commit", n) if kind is None else failed(t, n, kind) for n, (t, kind) in enumerate(items)]
    before = mean_time_to_failure_s(events)
    assert before > 0
    assert mean_time_to_failure_s([*events, failed(1e6, 99)]) <= before


def test_two_failures_soon_after_a_resume_are_a_quarantine():
    """One is bad luck; the second, in another attempt, counts the checkpoint out, with the incident named."""
    once = [resumed(0, 1), failed(10, 1)]
    assert find_quarantined(once) == {}
    twice = [*once, resumed(20, 2), failed(25, 2, "hang")]
    assert find_quarantined(twice) == {
        BAD: "the run failed soon after it was resumed from it, 2 times (last: 0002-hang)"
    }


@pytest.mark.parametrize(
    "events",
    [
        [resumed(0, 1), failed(SOON_S + 1, 1)],
        [resumed(0, 1), event(5, "ckpt_commit", 1), failed(10, 1)],
        [resumed(0, 1), failed(10, 1, "preemption")],
        [resumed(0, 1), failed(10, 1, category="hardware")],
        [resumed(0, 1), failed(10, 1, category="process", cause="rank_killed_sigkill")],
        [resumed(0, 1), event(5, "run_start"), failed(10, 1)],
        [event(0, "resume", 1, checkpoint="step-00000120"), failed(10, 1)],
        [failed(10, 1)],
    ],
    ids=["late", "after a save", "preempted", "hardware", "killed", "another job", "no identity", "not resumed"],
)
def test_what_does_not_count_against_a_checkpoint(events):
    """Late failures, those after the next save, those from outside, and other jobs' leave a checkpoint in peace."""
    assert find_setbacks(events) == {}


@pytest.mark.parametrize(("category", "counts"), [("network", False), ("user", False), ("process", True)])
def test_what_is_journalled_of_an_incident_is_enough_to_judge_it(category, counts):
    """Hangs and crashes are journalled with the category that decides here, whoever writes them."""
    hang = Incident(id="0001-hang", kind="hang", category=category, cause="hang_rank_late", attempt=0, detected_at=20.0)
    events = []
    for attempt in (1, 2):
        events += [
            resumed(100 * attempt, attempt),
            event(100 * attempt + 20, "incident", attempt, **event_fields(hang)),
        ]
    assert (BAD in find_quarantined(events)) is counts


def test_one_attempt_counts_once():
    """A hang and the crash that ended it are one failure."""
    events = [resumed(0, 1), failed(10, 1, "hang"), failed(11, 1)]
    assert find_setbacks(events)[BAD].count == 1


def test_a_step_that_was_saved_anew_starts_clean():
    """The failures of a checkpoint are not those of a later one under the same name."""
    events = [resumed(0, 1), failed(1, 1), resumed(2, 2, CheckpointId(BAD.name, 6.0)), failed(3, 2)]
    assert find_quarantined(events) == {}
