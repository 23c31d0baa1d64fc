"""The settings as they are: who stands still is noticed within 25 s and named within 75 s, who works is not.

All jobs of this file run side by side, so that it takes little longer than the longest of them.
"""

import pytest
from standing_runs import Plan, check_named, check_never_ended, notices_before, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

NOTICE_S, VERDICT_S = 25.0, 75.0
LATE_S = 30.0  # for a machine that is busy with all these jobs
LONG_S = 75.0  # longer than `stuck_after`
STILL = {
    "stopped": Plan("plain", ("stop@20",), ("--attempts", "--beside")),
    "asleep": Plan("plain", ("sleep@20",), ("--attempts", "--beside"), ranks=3),
    "stopped-start": Plan("plain", ("stop@start",), ("--attempts",)),
    "lock-evaluation": Plan("blocks", ("lock@eval2",), ("--attempts",)),
    "gil-save": Plan("blocks", ("gil@save1",), ("--attempts",)),
    "worker": Plan("adapter", ("worker@20",), ("--attempts", "--beside")),
}
WORKS = {
    "evaluation": Plan("plain", (f"compute@eval2:{LONG_S}",)),
    "save": Plan("blocks", (f"write@save1:{LONG_S}",)),
    "loader": Plan("adapter", (f"loader@20:{LONG_S}",)),
    "retry-after": Plan("plain", (f"sleep@20:{LONG_S}",)),
    "lock-with-a-time": Plan("blocks", (f"lock@20:{LONG_S}",)),
    "event": Plan("adapter", (f"event@20:{LONG_S}",)),
    "timer": Plan("plain", (f"timer@20:{LONG_S}",)),
}
# More that needs a processor for so long.
COMPUTES = {
    "eleventh": Plan("blocks", (f"compute@eval11:{LONG_S}",), ("--steps", "60")),
    "held": Plan("adapter", (f"held@20:{LONG_S}",)),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All jobs of this file, over now."""
    return run_all(tmp_path_factory.mktemp("defaults"), {**STILL, **WORKS}, 360)


@pytest.mark.parametrize("name", STILL)
def test_what_stands_still_is_noticed_and_named(found, name):
    """One notice in time, one verdict in time, one restart."""
    job, plan = found[name], STILL[name]
    culprit = 0 if name in ("lock-evaluation", "gil-save") else 1
    check_named(job, 0, plan.todo[0], culprit)
    assert notices_before(job, 0), job.screen
    began = job.began(0)
    assert job.stalls[0]["t"] - began <= NOTICE_S + LATE_S
    assert job.incidents[0]["detected_at"] - began <= VERDICT_S + LATE_S
    assert (job.code, job.attempts, job.left) == (0, 2, []), job.screen


@pytest.mark.parametrize("name", WORKS)
def test_what_works_or_waits_for_what_will_come_is_never_ended(found, name):
    """It takes longer than `stuck_after`; one attempt, no incident, and it is told when it went on."""
    check_never_ended(found[name])
    assert "went on" in {end["why"] for end in found[name].ends}


@pytest.mark.release
def test_what_computes_at_an_awkward_place_is_never_ended(tmp_path):
    """The eleventh evaluation, and a call in C that holds the GIL."""
    for job in run_all(tmp_path, COMPUTES, 360).values():
        check_never_ended(job)
        assert "went on" in {end["why"] for end in job.ends}
