"""Who waits for something that will come is left alone, who waits for what never comes is named: waits x tiers.

`stuck_after` is shortened to 3 s: a lock has 3 s then, a thread that works outside 15 s, and an end that the kernel
knows counts for 30 s after the last work. `test_wait_matrix.py` has all cells by the rules alone.
"""

import datetime
import re

import pytest
from standing_runs import STUCK_AFTER_S, Plan, check_never_ended, run_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = ("--stuck-after", str(STUCK_AFTER_S))
TIERS = ("plain", "blocks", "adapter")
HEALTHY_S = 2 * STUCK_AFTER_S
# Each wait once, in one of the tiers.
WAITS = {
    "plain": ("event", "barrier", "timer", "sleep"),
    "blocks": ("condition", "queued", "looped", "lock"),
    "adapter": ("joined", "native", "pooled", "piped"),
}
LONG_S = 6 * STUCK_AFTER_S  # than a thread that works has
LONG = {"plain": ("sleep",), "blocks": ("slept_in_a_loop",), "adapter": ("timer",)}
# What never comes: for how long it stands before it is named, in seconds, and in what.
STUCK = {
    "plain": {"housed": (3.0, "a lock"), "event": (15.0, "a worker thread"), "sleep": (3.0, "sleep")},
    "blocks": {"housed": (3.0, "a lock"), "timer": (3.0, "a lock"), "queued": (15.0, "a worker thread")},
    "adapter": {"housed": (3.0, "a lock"), "native": (15.0, "a worker thread"), "piped": (15.0, "a pipe")},
}
LATE_S = 25.0  # for a machine that is busy with all these jobs


def healthy(tier):
    """The job in which rank 1 waits in each of these ways, and goes on."""
    waits = [f"{what}@{12 + 2 * n}:{HEALTHY_S}" for n, what in enumerate(WAITS[tier])]
    return Plan(tier, (*waits, *(f"{what}@30:{LONG_S}" for what in LONG[tier])), run=SHORT)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All jobs of this file, over now."""
    plans = {f"healthy-{tier}": healthy(tier) for tier in TIERS}
    for tier, waits in STUCK.items():
        todo = tuple(f"{what}@20" for what in waits)
        plans[f"stuck-{tier}"] = Plan(tier, todo, ("--attempts",), (*SHORT, "--max-restarts", "5"))
    plans["save"] = Plan("plain", ("unread@save1",), ("--attempts",), SHORT)
    return run_all(tmp_path_factory.mktemp("waits"), plans, 200)


@pytest.mark.parametrize("tier", TIERS)
def test_who_waits_for_what_will_come_is_left_alone(found, tier):
    """Threads that were started before the loop, sleeps and locks with a time, longer than `stuck_after`."""
    job = found[f"healthy-{tier}"]
    check_never_ended(job)
    assert len(job.notes) == len(WAITS[tier]) + 1
    assert "went on" in {end["why"] for end in job.ends}


@pytest.mark.parametrize("tier", ["plain", "blocks"])
def test_a_wait_with_an_end_is_told_with_it(found, tier):
    """When that is, by the clock of this place, in the line and in the event."""
    words = "sleeps" if tier == "plain" else "waits in its event loop"
    job = found[f"healthy-{tier}"]
    ends = [times[1] for name, times in job.notes.items() if name.partition("@")[2].startswith("30-")]
    told = [
        datetime.datetime.fromtimestamp(one["wait_ends"]).strftime("%H:%M:%S")
        for stall in job.stalls
        for one in stall["ranks"]
        if one.get("wait_ends") is not None and abs(one["wait_ends"] - ends[0]) < 3.0
    ]
    assert told, job.stalls
    assert set(told) & set(re.findall(rf"rank 1 {words} until ([\d:]+), in \d+ s, at standing", job.screen))


@pytest.mark.parametrize(("tier", "what"), [(tier, what) for tier, waits in STUCK.items() for what in waits])
def test_who_waits_for_what_never_comes_is_named(found, tier, what):
    """After the time of what it waits in: a lock beside housekeeping has no more than one beside nobody."""
    job, number = found[f"stuck-{tier}"], list(STUCK[tier]).index(what)
    incident = next(each for each in job.incidents if each["attempt"] == number)
    assert ([culprit["rank"] for culprit in incident["culprits"]], incident["cause"]) == ([1], "hang_rank_stuck")
    least_s, on = STUCK[tier][what]
    assert least_s - 0.5 <= incident["detected_at"] - job.began(number) <= least_s + LATE_S
    (seen,) = [each["text"] for each in incident["evidence"] if each["source"] == "activity"]
    assert seen.endswith(f"waiting on {on}")


@pytest.mark.parametrize("tier", STUCK)
def test_the_job_goes_on_after_each(found, tier):
    """As many incidents as there were hangs, and exit 0."""
    job = found[f"stuck-{tier}"]
    assert (job.code, len(job.incidents), job.left) == (0, len(STUCK[tier]), []), job.screen


def test_a_save_that_stalls_is_called_so(found):
    """From the first notice on, with its file and what answers; the time is that of a file."""
    job = found["save"]
    (incident,) = job.incidents
    assert (incident["category"], incident["cause"]) == ("storage", "checkpoint_stall")
    assert [culprit["rank"] for culprit in incident["culprits"]] == [0]
    assert 14.5 <= incident["detected_at"] - job.began(0) <= 15.0 + LATE_S
    # Before it was watched for that long nobody knows whether it stands: by default the first notice comes later.
    told = [stall for stall in job.stalls if stall["attempt"] == 0 and stall["for_s"] > STUCK_AFTER_S]
    assert {one["cause"] for stall in told for one in stall["ranks"]} == {"checkpoint_stall"}
    assert all("rank 0 stuck in a save (checkpoint_stall) at standing_waits.py:" in stall["text"] for stall in told)
    place = r"model\.pt \(a FIFO, which nobody reads or feeds, \S+ on \S+\), beside which a small write takes [\d.]+ s"
    assert re.search(place, told[-1]["text"])
    (where,) = [evidence["text"] for evidence in incident["evidence"] if evidence["source"] == "storage"]
    assert re.search(place, where)
    assert (job.code, job.attempts, job.left) == (0, 2, []), job.screen
