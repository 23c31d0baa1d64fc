"""What the time of a run went into, from its events alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from told_run import EVENTS

from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.ledger import RunPhase
from resilience_sdk.goodput.summary import summarize
from resilience_sdk.telemetry.tally import GoodputMetrics


def account(*told: tuple[float, str, dict[str, Any]]) -> GoodputMetrics:
    """Return the account of events `(t, name, fields)`."""
    goodput = GoodputMetrics()
    for at, name, fields in told:
        goodput.ledger.apply({"rank": None, "job": "job-1", "attempt": 0, **fields, "event": name, "t": at})
    return goodput


def values(goodput: GoodputMetrics, now: float | None = None) -> dict[str, float]:
    """Return the seconds of each state, what was lost, and the ratio."""
    found = {}
    for sample in goodput.samples(now):
        assert isinstance(sample.value, float)
        if sample.family.name not in ("run.bucket", "run.goodput"):
            found[sample.labels[0] if sample.labels else sample.family.name] = sample.value
    return found


def beats(at: float, attempt: int = 0) -> list[tuple[float, str, dict[str, Any]]]:
    """Two ranks step for the first time, the second one at `at`."""
    return [
        (at - 1, "first_beat", {"rank": 0, "attempt": attempt}),
        (at, "first_beat", {"rank": 1, "attempt": attempt}),
    ]


START = [(1000.0, "run_start", {}), (1001.0, "attempt_start", {"ranks": [0, 1]})]


def test_a_run_that_goes_well_starts_trains_and_has_finished() -> None:
    """It trains from the moment at which all ranks of the node step; after its end no time passes."""
    goodput = account(
        *START, *beats(1010.0),
        (1110.0, "rank_exit", {"rank": 0, "exit_code": 0}), (1110.0, "attempt_end", {}),
        (1110.0, "decision", {"verdict": "finished", "exit_code": 0}), (1110.0, "finished", {}),
    )  # fmt: skip
    found = values(goodput, now=9999.0)
    assert found == {
        "starting": 10, "training": 100, "recovering": 0, "waiting": 0,
        "run.lost_time": 0, "run.ettr": pytest.approx(100 / 110),
    }  # fmt: skip


def test_time_passes_without_events_while_the_job_runs() -> None:
    """And not where it is unknown whether it does."""
    goodput = account(*START, *beats(1010.0))
    assert values(goodput)["training"] == 0
    assert values(goodput, now=1060.0)["training"] == 50
    assert values(goodput, now=1110.0)["training"] == 100


@pytest.mark.parametrize("set_by", [3600.0, -3600.0, 0.0])
def test_a_wall_clock_that_is_set_is_no_time_that_has_passed(set_by: float) -> None:
    """Neither between two events of a boot, nor since the last one."""
    goodput = GoodputMetrics()
    for at, name, fields in [*START, *beats(1010.0), (1110.0, "rank_exit", {"rank": 0, "exit_code": 1})]:
        told = {"rank": None, "job": "job-1", "attempt": 0, "boot_id": "b", "mono_ns": int(at * 1e9) - 10**12, **fields}
        goodput.ledger.apply({**told, "event": name, "t": at + set_by * (at >= 1010.0)})
    found = values(goodput, now=goodput.ledger.when(1140.0 + set_by, 140 * 10**9, "b"))
    assert (found["starting"], found["training"], found["recovering"]) == (10, 100, 30)
    assert goodput.ledger.newest_at == max(1009.0, 1110.0 + set_by)  # what was written down


def test_between_two_boots_the_wall_clock_counts() -> None:
    """The monotonic one begins anew."""
    goodput = GoodputMetrics()
    for t, mono_s, boot, name in [
        (1000.0, 500, "a", "run_start"), (1040.0, 540, "a", "degraded"), (2000.0, 3, "b", "run_start"),
    ]:  # fmt: skip
        goodput.ledger.apply(
            {"event": name, "t": t, "mono_ns": mono_s * 10**9, "boot_id": boot, "job": "j", "attempt": 0}
        )
    found = values(goodput, now=goodput.ledger.when(2010.0, 13 * 10**9, "b"))
    assert (found["starting"], found["waiting"]) == (50, 960)


def test_a_crash_costs_its_recovery_and_the_steps_since_the_checkpoint() -> None:
    """100 steps in 100 s, of which the last 30 are done again."""
    goodput = account(
        *START, *beats(1010.0), (1080.0, "ckpt_commit", {"rank": 0, "step": 70, "stall_s": 2.0}),
        (1110.0, "rank_exit", {"rank": 1, "exit_code": 1}),
        (1111.0, "incident", {"kind": "crash", "action": "restart"}),
        (1112.0, "attempt_end", {}), (1112.0, "decision", {"verdict": "restart", "exit_code": None}),
        (1113.0, "attempt_start", {"attempt": 1, "ranks": [0, 1]}), (1115.0, "resume", {"attempt": 1, "step": 70}),
        *beats(1120.0, 1), (1120.0, "recovered", {"attempt": 1, "lost_steps": 30, "resumed_at": 70}),
    )  # fmt: skip
    found = values(goodput, now=1220.0)
    assert (found["training"], found["recovering"]) == (200, 10)
    assert found["run.lost_time"] == pytest.approx(30 * 0.98)  # a step took 0.98 s, beside what a save took
    assert found["run.ettr"] == pytest.approx((200 - 30 * 0.98 - 2) / 220)


def test_the_buckets_are_those_of_the_command() -> None:
    """By one computation, and so is the share of steps that count."""
    goodput = account(
        *START, *beats(1010.0), (1110.0, "rank_exit", {"rank": 1, "exit_code": 1}), (1112.0, "attempt_end", {}),
        (1113.0, "attempt_start", {"attempt": 1, "ranks": [0, 1]}), (1115.0, "resume", {"attempt": 1, "step": 70}),
        *beats(1120.0, 1), (1120.0, "recovered", {"attempt": 1, "lost_steps": 30, "resumed_at": 70}),
    )  # fmt: skip
    told = list(goodput.samples(1220.0))
    summary = summarize(goodput.ledger, 1220.0)
    assert summary.buckets[Bucket.REPLAYED] == pytest.approx(30)
    assert {s.labels[0]: s.value for s in told if s.family.name == "run.bucket"} == {
        bucket.value: seconds for bucket, seconds in summary.buckets.items()
    }
    assert [s.value for s in told if s.family.name == "run.goodput"] == [summary.goodput]
    assert [s.value for s in told if s.family.name == "run.ettr"] == [summary.ettr]


def test_a_hang_is_no_training() -> None:
    """From the last sign of life of the rank that hangs; its steps took what the others took."""
    goodput = account(
        *START, *beats(1010.0),
        (1310.0, "suspect", {"suspects": [{"rank": 1, "elapsed_s": 100.0}]}),
        (1311.0, "incident", {"kind": "hang", "action": "restart"}), (1312.0, "attempt_end", {}),
        (1313.0, "attempt_start", {"attempt": 1, "ranks": [0, 1]}),
        *beats(1321.0, 1), (1321.0, "recovered", {"attempt": 1, "lost_steps": 50, "resumed_at": 150}),
    )  # fmt: skip
    found = values(goodput, now=1321.0)
    assert (found["training"], found["recovering"]) == (301, 10)
    assert found["run.lost_time"] == pytest.approx(101 + 50 * 1.0)


def test_what_ends_no_attempt_costs_nothing() -> None:
    """A warning is an incident, too."""
    found = values(
        account(*START, *beats(1010.0), (1020.0, "incident", {"kind": "numerics", "action": "none"})), 1030.0
    )
    assert (found["training"], found["run.lost_time"]) == (20, 0)


def test_between_two_jobs_the_run_waits() -> None:
    """Preempted and requeued: it begins again as a recovery, and the wait counts into the ratio once it is over."""
    told = [
        *START, *beats(1010.0), (1110.0, "attempt_end", {}),
        (1111.0, "decision", {"verdict": "preempted", "exit_code": 75}),
    ]  # fmt: skip
    assert values(account(*told), now=None)["waiting"] == 0
    found = values(account(*told, (1711.0, "run_start", {}), (1712.0, "attempt_start", {"ranks": [0]})), now=1721.0)
    assert (found["waiting"], found["recovering"], found["starting"]) == (600, 1 + 10, 10)


def test_a_job_whose_launcher_was_killed_ended_with_its_last_event() -> None:
    """Nobody trained from then on."""
    found = values(account(*START, *beats(1010.0), (1050.0, "health", {}), (2000.0, "run_start", {})), now=2000.0)
    assert (found["training"], found["waiting"]) == (40, 950)


def test_under_a_foreign_launcher_the_ranks_tell() -> None:
    """That they started, and that all is complete: it is over with the last of them, not with its first fit."""
    ranks = [(1000.0, "rank_start", {"rank": rank}) for rank in (0, 1)]
    ends = [(1109.0 + rank, "rank_exit", {"rank": rank, "exit_code": 0}) for rank in (0, 1)]
    told = [*ranks, (1005.0, "finished", {"rank": 0}), *beats(1010.0), (1100.0, "finished", {"rank": 0}), *ends]
    found = values(account(*told), now=1200.0)
    assert (found["starting"], found["training"]) == (10, 100)
    # A new start of the same name is another job; so is one of another name, though the first one told no end.
    again = [*told, *[(1300.0, name, fields) for _, name, fields in ranks], *beats(1310.0)]
    assert values(account(*again), now=1320.0)["training"] == 110
    other = [*ranks, *beats(1010.0), (1050.0, "health", {}), (1090.0, "rank_start", {"rank": 0, "job": "job-2"})]
    found = values(account(*other), now=1100.0)
    assert (found["training"], found["waiting"], found["recovering"]) == (40, 40, 10)


def test_an_event_that_comes_late_takes_no_second_back() -> None:
    """Counters were shown up to now when the end of a moment ago is read."""
    goodput = account(*START, *beats(1010.0))
    assert values(goodput, now=1110.0)["training"] == 100
    goodput.ledger.apply({"event": "attempt_end", "t": 1109.0, "rank": None, "attempt": 0})
    assert values(goodput, now=1111.0)["training"] == 100


@given(st.lists(EVENTS, max_size=15), st.floats(0, 4e9))
@settings(max_examples=20, deadline=None)
def test_whatever_a_journal_holds_counters_grow_and_shares_are_shares(events: list[dict[str, Any]], now: float) -> None:
    """No event breaks it; the ratio is between 0 and 1, and what was lost is a part of the training."""
    goodput, before = GoodputMetrics(), dict[str, float]()
    for event in events:
        goodput.ledger.apply(event)
        found = values(goodput, now)
        ratio = found.pop("run.ettr", 0.0)
        assert 0 <= ratio <= 1
        assert all(found[name] >= seconds for name, seconds in before.items())
        assert found["run.lost_time"] <= found[RunPhase.TRAINING.value]
        before = found


def test_steps_that_nobody_counted_are_no_metric() -> None:
    """A gauge of 0 s would say that nothing was done again, and it is not known."""

    def has_replayed(goodput: GoodputMetrics) -> bool:
        return any(sample.labels == (Bucket.REPLAYED.value,) for sample in goodput.samples(1200.0))

    crash = (1110.0, "incident", {"kind": "crash", "action": "restart", "id": "0001-crash"})
    assert has_replayed(account(*START, *beats(1010.0)))
    assert not has_replayed(account(*START, *beats(1010.0), crash))
    assert has_replayed(account(*START, *beats(1010.0), crash, (1120.0, "resume", {"attempt": 1, "step": 7})))
