"""What stands still is noticed within a part of `stuck_after` and named after it, wherever that is.

The time is shortened here; each attempt of a job stands still in another way, beside a thread that wakes up each 100 ms
and a child that chatters.
"""

import pytest
from standing_runs import STUCK_AFTER_S, Plan, check_named, notices_before, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

SHORT = ("--stuck-after", str(STUCK_AFTER_S), "--max-restarts", "8")
PLACES = {
    ("plain", "20"): ("stop", "sleep", "lock", "empty", "gil", "worker"),
    ("plain", "500"): ("stop", "lock"),
    ("plain", "start"): ("stop", "sleep"),
    ("plain", "eval2"): ("sleep", "worker", "gil"),
    ("plain", "save1"): ("lock", "stop"),
    ("by-hand", "20"): ("lock", "stop", "sleep"),
    ("blocks", "20"): ("worker", "stop", "sleep"),
    ("blocks", "start"): ("stop", "lock"),
    ("blocks", "eval2"): ("gil", "lock"),
    ("blocks", "save1"): ("worker", "sleep"),
    ("adapter", "20"): ("lock", "gil", "stop"),
    ("adapter", "start"): ("sleep", "stop"),
    ("adapter", "eval2"): ("stop", "sleep"),
}
SLEEPS = "piped@20:22"  # longer than a pipe has, that another process feeds, in each attempt
ATTEMPTS = [(tier, where, number) for (tier, where), ways in PLACES.items() for number in range(len(ways))]


def plan(tier, where):
    """The job of a place: one way to stand still in each attempt."""
    fast = ("--steps", "520", "--pause", "0") if where == "500" else ()
    if tier == "by-hand":
        fast = ("--pause", "0.3")  # its beats are completed collectives, which are counted every two seconds
    todo = tuple(f"{what}@{where}" for what in PLACES[tier, where])
    return Plan(tier, todo, ("--attempts", "--beside", *fast), SHORT, ranks=3 if where == "20" else 2)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All jobs of this file, over now."""
    plans = {f"{tier}-{where}": plan(tier, where) for tier, where in PLACES}
    plans["sleeps"] = Plan("plain", (SLEEPS,) * 4, ("--attempts",), SHORT)
    return run_all(tmp_path_factory.mktemp("named"), plans, 150)


@pytest.mark.parametrize(("tier", "where", "number"), ATTEMPTS)
def test_what_stands_still_is_noticed_and_named(found, tier, where, number):
    """The rank, and whether it was stopped or stood still; its peers are victims, and the job goes on."""
    job = found[f"{tier}-{where}"]
    culprit = 0 if where.startswith(("eval", "save")) else 1
    check_named(job, number, PLACES[tier, where][number], culprit)


@pytest.mark.parametrize(("tier", "where"), PLACES)
def test_the_job_goes_on_after_each(found, tier, where):
    """As many incidents as there were hangs, exit 0, and nothing is left behind.

    The notice leads by two seconds here, for which a busy machine may hold a monitor up once.
    """
    job, hangs = found[f"{tier}-{where}"], len(PLACES[tier, where])
    assert job.code == 0, job.screen
    assert [incident["attempt"] for incident in job.incidents] == list(range(hangs))
    assert (job.attempts, len(job.confirmed), job.left) == (hangs + 1, hangs, []), job.screen
    assert sum(bool(notices_before(job, number)) for number in range(hangs)) >= hangs - 1, job.screen


def test_what_really_sleeps_costs_one_restart_and_never_the_job(found):
    """The place at which the job was ended gets more time from then on, and what sleeps there goes on."""
    job = found["sleeps"]
    assert job.code == 0, job.screen
    assert [incident["cause"] for incident in job.incidents] == ["hang_rank_stuck"]
    assert job.attempts == 2
    assert job.ends[-1]["why"] == "went on"
    assert "went on after" in job.screen
