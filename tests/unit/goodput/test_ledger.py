"""What each second of a run was, from its events alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told_run import EVENTS

from resilience_sdk.goodput.buckets import Bucket, Trained, split_training
from resilience_sdk.goodput.ledger import Ledger, Reading, Stretch, shortened
from resilience_sdk.goodput.summary import ettr, summarize

Told = tuple[float, str, dict[str, Any]]


def ledger_of(*told: Told) -> Ledger:
    """Return the ledger of events `(t, name, fields)`."""
    ledger = Ledger()
    for at, name, fields in told:
        ledger.apply({"rank": None, "job": "job-1", "attempt": 0, "host": "a", **fields, "event": name, "t": at})
    return ledger


def buckets(ledger: Ledger, now: float | None = None) -> dict[str, float]:
    """Return the buckets that are not empty; they add up to the wall time."""
    reading = ledger.read(now)
    assert sum(reading.buckets.values()) == pytest.approx(reading.wall_s)
    assert sum(reading.phases.values()) == pytest.approx(reading.wall_s)
    return {bucket.value: round(seconds, 6) for bucket, seconds in reading.buckets.items() if seconds}


def attempt(at: float, number: int = 0, **fields: Any) -> Told:
    """An attempt of two ranks begins."""
    return at, "attempt_start", {"ranks": [0, 1], "node": 0, "attempt": number, **fields}


def beats(at: float, number: int = 0) -> list[Told]:
    """Two ranks step for the first time."""
    return [(at, "first_beat", {"rank": rank, "attempt": number}) for rank in (0, 1)]


def agree_with_buckets(reading: Reading) -> None:
    """The stretches are in order, and of each bucket as long as it is; training is one of them but for its hangs."""
    found = dict.fromkeys(Bucket, 0.0)
    for one in reading.stretches:
        assert one.seconds > 0
        found[one.bucket] += one.seconds
    raw = dict(reading.buckets)
    for part in (Bucket.DATA, Bucket.CHECKPOINT, Bucket.REPLAYED):
        raw[Bucket.PRODUCTIVE] += raw.pop(part)
    for bucket, seconds in raw.items():
        assert found[bucket] == pytest.approx(seconds, rel=1e-6, abs=1e-3), bucket
    assert all(a.ended_at <= b.began_at for a, b in itertools.pairwise(reading.stretches))
    assert all((one.account is None) == (one.bucket is Bucket.IDLE) for one in reading.stretches)


START = [(1000.0, "run_start", {}), attempt(1004.0, rendezvous_s=3.0)]
FINISH = [
    (1110.0, "rank_exit", {"rank": 0, "exit_code": 0, "step": 100, "step_is_global": True}),
    (1110.0, "attempt_end", {}), (1110.0, "decision", {"verdict": "finished", "exit_code": 0}),
    (1110.0, "finished", {}),
]  # fmt: skip


def test_a_good_run_has_a_start_a_rendezvous_and_its_training() -> None:
    """Nothing passes after its end, and its saves and waits for data are parts of the training."""
    commits = [(1050.0, "ckpt_commit", {"rank": 0, "step": 50, "stall_s": 2.0})]
    waits = [(1109.0, "step_time", {"data_s": 30.0, "saves_s": 1.5}), (1109.5, "step_time", {"data_s": 31.0})]
    ledger = ledger_of(*START, *beats(1010.0), *commits, *waits, *FINISH)
    assert buckets(ledger, now=9999.0) == {
        "startup": 7, "rendezvous": 3, "checkpoint": 2, "data": 31, "productive": 67,
    }  # fmt: skip
    summary = summarize(ledger)
    assert (summary.goodput, summary.ettr) == (pytest.approx(67 / 110), pytest.approx(98 / 110))
    assert (summary.faults, summary.mttf_s, summary.lost_steps) == (0, None, 0)


def test_the_page_of_a_job_that_is_over_takes_no_time_of_the_run() -> None:
    """A job that failed has the same account before and after its launcher has written the page."""
    failed = [
        (1110.0, "attempt_end", {"exit_codes": {"0": 1}}),
        (1110.0, "decision", {"verdict": "stop", "exit_code": 77}),
    ]
    before = ledger_of(*START, *beats(1010.0), *failed)
    after = ledger_of(*START, *beats(1010.0), *failed, (1111.0, "report", {"path": "report.html", "seconds": 0.5}))
    assert (buckets(after), after.newest_at) == (buckets(before), 1111.0)


def test_a_crash_is_a_restart_and_the_steps_that_are_done_again() -> None:
    """The lost steps are charged to the attempt that lost them, at what a step of it took."""
    ledger = ledger_of(
        *START, *beats(1010.0), (1080.0, "ckpt_commit", {"rank": 0, "step": 70, "stall_s": 0.0}),
        (1110.0, "rank_exit", {"rank": 1, "exit_code": 1, "step": 99, "step_is_global": True}),
        (1111.0, "incident", {"kind": "crash", "action": "restart", "id": "0001-crash"}),
        (1112.0, "attempt_end", {}), (1112.0, "decision", {"verdict": "restart", "exit_code": None}),
        attempt(1114.0, 1, rendezvous_s=1.5), (1115.0, "resume", {"attempt": 1, "step": 70}), *beats(1120.0, 1),
        (1120.0, "recovered", {"attempt": 1, "lost_steps": 30, "resumed_at": 70, "id": "0001-crash", "recovery_s": 9}),
    )  # fmt: skip
    assert buckets(ledger, 1220.0) == {
        "startup": 7, "rendezvous": 4.5, "restart": 8.5, "replayed": 30, "productive": 170,
    }  # fmt: skip
    summary = summarize(ledger, 1220.0)
    assert (summary.faults, summary.mttf_s, summary.mttr_s, summary.lost_steps) == (1, 220, 9, 30)
    assert [one["lost_steps"] for one in summary.attempts] == [30, 0]


def test_attempts_that_fail_one_after_the_other_lose_each_step_once() -> None:
    """Attempt 0 makes 100 steps, attempt 1 goes from 60 to 80, attempt 2 has to begin at 50: 50 and 20 are lost."""
    ledger = ledger_of(
        *START, *beats(1010.0), (1110.0, "rank_exit", {"rank": 1, "exit_code": 1, "step": 100, "step_is_global": True}),
        attempt(1110.0, 1), (1110.0, "resume", {"attempt": 1, "step": 60}), *beats(1110.0, 1),
        (1130.0, "rank_exit", {"rank": 1, "exit_code": 1, "step": 80, "step_is_global": True, "attempt": 1}),
        attempt(1130.0, 2), (1130.0, "resume", {"attempt": 2, "step": 50}), *beats(1130.0, 2),
    )  # fmt: skip
    found = summarize(ledger, 1150.0)
    assert [one["lost_steps"] for one in found.attempts] == [50, 20, 0]
    assert found.buckets[Bucket.REPLAYED] == pytest.approx(50 + 20)


def test_a_hang_counts_from_where_the_rank_stood() -> None:
    """To the end of its process; what was only reported counts until it went on by itself."""
    stall = (1160.0, "stall", {"for_s": 50.0})
    ended = [
        (1170.0, "incident", {"kind": "hang", "action": "restart", "id": "1"}),
        (1172.0, "rank_exit", {"rank": 1, "exit_code": None}), (1173.0, "attempt_end", {}),
    ]  # fmt: skip
    ledger = ledger_of(*START, *beats(1010.0), stall, *ended, attempt(1174.0, 1), *beats(1180.0, 1))
    assert buckets(ledger, 1190.0) == {"startup": 7, "rendezvous": 3, "productive": 110, "hang": 62, "restart": 8}
    stretches = [(one.bucket.value, one.began_at, one.account) for one in ledger.read(1190.0).stretches]
    assert stretches == [
        ("startup", 1000, 0), ("rendezvous", 1001, 0), ("startup", 1004, 0), ("productive", 1010, 0), ("hang", 1110, 0),
        ("hang", 1170, 0), ("restart", 1172, 0), ("restart", 1173, 0), ("restart", 1174, 1), ("productive", 1180, 1),
    ]  # fmt: skip
    told = [(1170.0, "incident", {"kind": "hang", "action": "none", "id": "1"}), (1175.0, "recovered", {"id": "1"})]
    assert buckets(ledger_of(*START, *beats(1010.0), stall, *told), 1190.0)["hang"] == 65


def test_an_attempt_has_the_steps_that_it_completed() -> None:
    """As its monitors and the exits of its ranks tell, also where nobody counts over attempts."""
    told = [
        (1020.0, "step_time", {"steps": 282, "completed": 283}),
        (1021.0, "rank_exit", {"rank": 1, "exit_code": 1, "completed": 284}),
        (1021.0, "rank_exit", {"rank": 0, "exit_code": 1, "completed": None}),
    ]
    ledger = ledger_of(*START, *beats(1010.0), *told, (1021.5, "attempt_end", {}), attempt(1022.0, 1))
    assert [(one["steps"], one["completed"]) for one in summarize(ledger).attempts] == [(None, 284), (None, None)]


def test_a_stall_that_ended_by_itself_is_hung_time_unless_it_was_a_long_wait() -> None:
    """A stopped process hangs wherever it stands, a stuck one not where it loads or saves: that has its own bucket.

    What `step_time` tells of data and saves is without the stop (`RankSteps.note_stop`), so nothing is taken from it.
    """

    def stalled(activity: str, section: str, why: str = "went on") -> dict[str, float]:
        ranks = [{"rank": 0, "activity": activity, "section": section}]
        events = [
            *START, *beats(1010.0), (1060.0, "stall", {"for_s": 10.0, "ranks": ranks}),
            (1080.0, "stall_end", {"after_s": 30.0, "why": why}),
            (1090.0, "step_time", {"data_s": 40.0, "saves_s": 5.0}),
        ]  # fmt: skip
        found = buckets(ledger_of(*events), 1110.0)
        return {name: found.get(name, 0.0) for name in ("hang", "data", "checkpoint", "productive")}

    assert stalled("stopped", "step") == {"hang": 30, "data": 40, "checkpoint": 5, "productive": 25}
    for place in (("stuck", "fwd"), ("stopped", "data"), ("stopped", "checkpoint")):
        assert stalled(*place) == stalled("stopped", "step")
    for nothing in (stalled("stuck", "data"), stalled("busy", "step"), stalled("stopped", "step", why="verdict")):
        assert nothing == {"hang": 0, "data": 40, "checkpoint": 5, "productive": 55}


def test_a_stall_that_ended_by_itself_is_a_stretch_of_its_own() -> None:
    """From where the rank stood to where it went on, in the middle of the training."""
    ranks = [{"rank": 0, "activity": "stopped", "section": "fwd"}]
    told = [(1060.0, "stall", {"for_s": 10.0, "ranks": ranks}), (1080.0, "stall_end", {"why": "went on"})]
    found = ledger_of(*START, *beats(1010.0), *told).read(1110.0).stretches
    assert [(one.bucket.value, one.began_at, one.ended_at) for one in found[-3:]] == [
        ("productive", 1010, 1050), ("hang", 1050, 1080), ("productive", 1080, 1110),
    ]  # fmt: skip


def test_a_slow_rank_or_a_warning_is_no_restart() -> None:
    """Though the action of its incident be to leave out a node."""
    for kind in ("slow", "numerics", "preemption"):
        told = (1020.0, "incident", {"kind": kind, "action": "exclude_node"})
        assert buckets(ledger_of(*START, *beats(1010.0), told), 1030.0)["productive"] == 20


def test_a_chain_of_jobs_has_idle_time_between_them() -> None:
    """A preempted job leaves, nothing runs, the next one starts up; a job that was killed ended with its last event."""
    left = [
        (1060.0, "stop_agreed", {"rank": 0, "step": 50}), (1061.0, "ckpt_commit", {"step": 50, "stall_s": 1.0}),
        (1065.0, "rank_exit", {"rank": 0, "exit_code": 75}), (1066.0, "attempt_end", {}),
        (1067.0, "decision", {"verdict": "preempted", "exit_code": 75}),
    ]  # fmt: skip
    second = [(1167.0, "run_start", {}), attempt(1168.0), *beats(1177.0), (1187.0, "health", {})]
    third = [(1287.0, "run_start", {}), attempt(1288.0), *beats(1297.0)]
    ledger = ledger_of(*START, *beats(1010.0), *left, *second, *third)
    assert buckets(ledger, 1300.0) == {
        "startup": 7 + 10 + 10, "rendezvous": 3, "productive": 50 + 10 + 3, "preempted": 7, "idle": 100 + 100,
    }  # fmt: skip
    assert len(ledger.accounts) == 3


def test_two_nodes_are_one_run() -> None:
    """It trains when the ranks of both have stepped, and is over when it is over, whoever tells it first."""
    other = {"host": "b", "node": 1, "ranks": [2, 3]}
    both = [
        (1000.0, "run_start", {}), (1001.0, "run_start", {"host": "b"}),
        attempt(1004.0), (1004.1, "attempt_start", other),
        *beats(1010.0), (1012.0, "first_beat", {"rank": 2}), (1013.0, "first_beat", {"rank": 3}),
    ]  # fmt: skip
    ends = [(1110.0, "decision", {"verdict": "finished", "exit_code": 0, "host": host}) for host in "ab"]
    ledger = ledger_of(*both, (1100.0, "attempt_end", {"host": "b"}), *ends)
    assert buckets(ledger) == {"startup": 13, "productive": 87, "restart": 10}
    assert len(ledger.accounts) == 1
    # A node that leaves alone ends nothing.
    alone = (1050.0, "decision", {"verdict": "hardware", "exit_code": 76, "others_go_on": True, "host": "b"})
    assert buckets(ledger_of(*both, alone), 1113.0)["productive"] == 100


def test_a_job_that_was_requeued_to_another_node_after_a_silent_end_is_another_job() -> None:
    """It has the same key, and a launcher of another host announces the very attempt that was announced before."""
    silent = [*START, *beats(1010.0), (1060.0, "health", {})]
    requeued = [(1160.0, "run_start", {"host": "b"}), attempt(1162.0, host="b"), *beats(1170.0)]
    ledger = ledger_of(*silent, *requeued)
    assert buckets(ledger, 1180.0) == {"startup": 7 + 10, "rendezvous": 3, "productive": 50 + 10, "idle": 100}


def test_a_killed_job_ran_up_to_the_last_renewal_of_its_lease() -> None:
    """Which the next job tells, whether it has the same key or another one; so does a reader where there is none."""
    silent = [*START, *beats(1010.0), (1060.0, "health", {})]
    for job in ("job", "next"):
        later = {"unheld_s": 15.0, "job": job}
        ledger = ledger_of(*silent, (1160.0, "run_start", later), attempt(1162.0, job=job), *beats(1170.0))
        assert buckets(ledger, 1180.0) == {"startup": 7 + 10, "rendezvous": 3, "productive": 135 + 10, "idle": 15}
    assert buckets(ledger_of(*silent), 1145.0)["productive"] == 135


def test_two_launchers_of_one_host_are_two_nodes() -> None:
    """Where a machine plays two nodes, or the scheduler puts them on one."""
    other = {"node": 1, "ranks": [2, 3]}
    both = [
        (1000.0, "run_start", {}), (1001.0, "run_start", {"unheld_s": 1.0}),
        attempt(1004.0), (1004.1, "attempt_start", other), *beats(1010.0),
        (1012.0, "first_beat", {"rank": 2}), (1013.0, "first_beat", {"rank": 3}),
    ]  # fmt: skip
    ledger = ledger_of(*both)
    assert buckets(ledger, 1100.0) == {"startup": 13, "productive": 87}
    assert len(ledger.accounts) == 1


def test_a_good_end_is_no_restart_and_a_bad_one_on_another_node_is() -> None:
    """Between the end of the ranks and the launcher's word on it pass moments, which begin nothing."""
    end = {"ended_by": "ranks", "exit_codes": {"0": 0, "1": 0}}
    finish = [(1110.0, "attempt_end", end), (1110.5, "finished", {})]
    told = buckets(ledger_of(*START, *beats(1010.0), *finish))
    assert told == {"startup": 7, "rendezvous": 3, "productive": 100, "launcher": 0.5}
    both = [*START, (1004.1, "attempt_start", {"node": 1, "ranks": [2, 3]}), *beats(1009.0)]
    both += [(1010.0, "first_beat", {"rank": rank}) for rank in (2, 3)]
    failed = [
        (1112.0, "rank_exit", {"rank": 3, "exit_code": 1}), attempt(1113.0, 1), *beats(1115.0, 1),
    ]  # fmt: skip
    told = buckets(ledger_of(*both, finish[0], *failed), 1115.0)
    assert told == {"startup": 7, "rendezvous": 3, "productive": 102, "restart": 3}
    other = {"ended_by": "hang", "exit_codes": {"0": 0, "1": 0}}  # ranks that leave well when they are told to
    told = buckets(ledger_of(*START, *beats(1010.0), (1110.0, "attempt_end", other)), 1112.0)
    assert told == {"startup": 7, "rendezvous": 3, "productive": 100, "restart": 2}


def test_an_incident_whose_name_is_none_ends_nothing() -> None:
    """Of another version, or of somebody else."""
    assert buckets(ledger_of(*START, *beats(1010.0), (1020.0, "recovered", {"id": [], "recovery_s": 1.0})), 1030.0)


@given(st.lists(EVENTS, max_size=25), st.floats(0, 4e9) | st.none())
@settings(max_examples=60, deadline=None)
def test_whatever_a_journal_holds_every_second_is_in_one_bucket(
    events: list[dict[str, Any]], now: float | None
) -> None:
    """None is negative, and together they are the wall time."""
    ledger = Ledger()
    for event in sorted(events, key=lambda event: event["t"]):
        ledger.apply(event)
        reading = ledger.read(now)
        assert all(seconds >= 0 for seconds in reading.buckets.values())
        assert sum(reading.buckets.values()) == pytest.approx(reading.wall_s, rel=1e-6, abs=1e-3)
        assert 0 <= (ettr(reading.buckets) or 0.0) <= 1
        summarize(ledger, now).to_json()
        agree_with_buckets(reading)


@given(st.floats(0, 1e9), *[st.floats(0, 1e9)] * 3, st.floats(0, 2))
@settings(max_examples=100, deadline=None)
def test_training_is_divided_without_a_rest(
    seconds: float, hung_s: float, save_s: float, data_s: float, lost: float
) -> None:
    """However much the parts claim."""
    parts = split_training(seconds, Trained(hung_s=hung_s, checkpoint_s=save_s, data_s=data_s, lost_share=lost))
    assert sum(parts.values()) == pytest.approx(seconds)
    assert all(part >= 0 for part in parts.values())


@given(st.lists(st.floats(0.001, 1e4), min_size=1, max_size=60), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_of_too_many_stretches_the_shortest_become_part_of_others(lengths: list[float], most: int) -> None:
    """The time stays whole, and what lasted longest keeps its bucket."""
    ends = [0.0, *itertools.accumulate(lengths)]
    buckets_of = itertools.cycle(Bucket)
    made = [Stretch(next(buckets_of), begin, end, 0) for begin, end in itertools.pairwise(ends)]
    kept = shortened(made, most)
    assert len(kept) == min(most, len(made))
    assert (kept[0].began_at, kept[-1].ended_at) == (0.0, ends[-1])
    assert all(a.ended_at == b.began_at for a, b in itertools.pairwise(kept))


def test_a_run_of_thousands_of_attempts_keeps_its_time_in_bounds() -> None:
    """However often it fails."""
    ledger = ledger_of((0.0, "run_start", {}))
    for number in range(3000):
        ledger.apply({"t": 10.0 * number, "event": "attempt_start", "job": "job-1", "attempt": number, "ranks": [0]})
        ledger.apply({"t": 10.0 * number + 5, "event": "first_beat", "job": "job-1", "attempt": number, "rank": 0})
    stretches = ledger.read(40_000.0).stretches
    assert len(stretches) <= 2001
    assert sum(one.seconds for one in stretches) == pytest.approx(40_000.0)
