"""What the journal says of rollbacks: which checkpoints are bad, which batches are left out."""

import pytest

from resilience_sdk.checkpoint.history import find_rollbacks, skipped_steps


def left(t, step, *, attempt=0, action="rollback", skip_batches=1, is_global=True):
    what = {"what": "loss", "found": "nan", "action": action, "skip_batches": skip_batches, "is_global": is_global}
    return {"event": "numerics", "t": t, "job": "a", "attempt": attempt, "rank": 1, "step": step, **what}


def start(t, attempt, job="a", rank=0):
    return {"event": "rank_start", "t": t, "job": job, "attempt": attempt, "rank": rank}


@pytest.mark.parametrize(
    ("step", "created_at", "is_bad"),
    [(12, 9.0, False), (13, 9.0, True), (20, 9.9, True), (13, 12.0, False)],
)
def test_what_was_saved_after_the_bad_step_is_bad(step, created_at, is_bad):
    """Before it is good, and so is what the next attempt has saved under the same number."""
    (back,) = find_rollbacks([start(1.0, 0), left(10.0, 12), start(11.0, 1, rank=1), start(11.5, 1)])
    why = back.why_bad(step, created_at)
    assert (why is not None) == is_bad
    assert why is None or "step 12" in why


def test_the_next_attempt_is_known_by_its_number_where_clocks_differ():
    """Rank 0's clock may be behind the clock of the rank that saw it."""
    (back,) = find_rollbacks([start(1.0, 0), start(8.0, 1), left(10.0, 12)])
    assert back.until == 8.0


def test_a_requeued_job_ends_it_too():
    """It counts its attempts from 0 again."""
    (back,) = find_rollbacks([start(1.0, 0), left(10.0, 12), start(50.0, 0, job="b")])
    assert back.until == 50.0


def test_batches_are_left_out_from_the_bad_one_on():
    """As many as were asked for; `raise` leaves none out, and neither does a step that is no global one."""
    events = [
        left(1.0, 5, skip_batches=3),
        left(2.0, 6),
        left(3.0, 30, action="restart", skip_batches=0),
        left(4.0, 40, is_global=False),
        left(5.0, 50, action="none"),
    ]
    assert skipped_steps(find_rollbacks(events)) == [5, 6, 7]
    assert [back.step for back in find_rollbacks(events)] == [5, 6, 30]
