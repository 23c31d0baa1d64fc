"""What each second of a run was, from what its monitors tell of its ranks' time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_rank import NS, Act, SimulatedRank

from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.ledger import Ledger
from resilience_sdk.goodput.rank_time import Doing, RankTime
from resilience_sdk.goodput.summary import Summary, summarize
from resilience_sdk.report.digest import read_digest
from resilience_sdk.report.run_state import goodput_of

BEGAN = 1000.0
FIRST = BEGAN + 10.0
"""When the first step of the first attempt is complete."""
STEP = Act("step", 0.2)
Told = dict[str, Any]


def told(name: str, at: float, attempt: int = 0, **fields: Any) -> Told:
    """Return an event."""
    return {"event": name, "t": at, "job": "j", "attempt": attempt, "host": "a", "rank": None, **fields}


def started(attempt: int = 0, at: float = BEGAN, first: float = FIRST, **more: Any) -> list[Told]:
    """Return the beginning of an attempt."""
    begun = [told("run_start", at)] if attempt == 0 else []
    return [
        *begun, told("attempt_start", at + 1.0, attempt, ranks=[0], node=0),
        told("first_beat", first + 0.7, attempt, rank=0, ago_s=0.7, **more),
    ]  # fmt: skip


def monitored(
    acts: list[Act], *, attempt: int = 0, first: float = FIRST, is_global: bool = False, begins_at: int = 0,
    is_over: bool = True, until: float | None = None,
) -> list[Told]:  # fmt: skip
    """Return what the monitor of a rank tells, that looks each half second and tells each second."""
    rank, account, events = SimulatedRank.of(acts), RankTime(), []
    end = rank.ends if until is None else until

    def tell(at: float, *, over: bool) -> None:
        step = begins_at + account.completed if is_global else None
        spent = {name: round(seconds, 3) for name, seconds in attrs.asdict(account.spent).items()}
        facts = {"since_s": account.wall_s, "completed": account.completed, "brackets_steps": account.brackets_steps}
        seen = sorted(part.value for part in account.parts_seen)
        facts["is_late"] = not over and account.is_long(rank.page(at), round(at * NS))
        event = told("time_spent", first - 1.0 + at, attempt, step=step, age_s=0.0, is_over=over, seen=seen)
        events.append(event | facts | spent)

    at, number = 0.5, 0
    while at < end:
        rank.look(account, at)
        number += 1
        if number % 2 == 0 and account.began_ns is not None:
            tell(at, over=False)
        at += 0.5
    rank.look(account, end, is_alive=not is_over)
    tell(end, over=is_over)
    return events


def summary_of(*events: list[Told], now: float | None = None) -> Summary:
    """Return the figures of a run."""
    ledger = Ledger()
    for event in (one for group in events for one in group):
        ledger.apply(event)
    found = summarize(ledger, now)
    assert sum(found.buckets.values()) == pytest.approx(found.wall_s)
    assert sum(found.buckets.values()) == pytest.approx(sum(one.seconds for one in found.stretches), abs=1e-3)
    return found


def of(summary: Summary, *names: str) -> list[float]:
    """Return some buckets."""
    return [round(summary.buckets[Bucket(name)], 2) for name in names]


FAILED = [
    told("rank_exit", FIRST + 40.2, rank=0, exit_code=1),
    told("incident", FIRST + 40.2, kind="crash", action="restart", id="1"),
    told("attempt_end", FIRST + 40.5, exit_codes={"0": 1}),
]


def test_a_steady_job_is_the_same_at_any_moment() -> None:
    """G2: waits for data of a running job count as they do at its end, at whatever moment somebody asks."""
    acts = [Act("data", 0.3), STEP] * 60
    events = [*started(), *monitored(acts, is_over=False)]
    end = summary_of(events)
    steady = end.buckets[Bucket.PRODUCTIVE] / (end.buckets[Bucket.PRODUCTIVE] + end.buckets[Bucket.DATA])
    assert steady == pytest.approx(0.4, abs=0.01)
    for asked in range(3, 30):
        at = FIRST + asked
        now = summary_of([event for event in events if event["t"] <= at], now=at)
        assert now.buckets[Bucket.PRODUCTIVE] / asked == pytest.approx(0.4, abs=0.05), asked
        assert now.buckets[Bucket.DATA] / asked == pytest.approx(0.6, abs=0.05), asked


def test_work_behind_the_loop_is_outside_of_it() -> None:
    """G3: so is what lies before the next step; the launcher's own time has its bucket, too."""
    acts = [*[STEP] * 50, Act("gap", 12.0)]
    ends = [
        told("attempt_end", FIRST + 22.5, ended_by="ranks", exit_codes={"0": 0}),
        told("finished", FIRST + 23.0),
    ]
    found = summary_of(started(), monitored(acts), ends)
    assert of(found, "startup", "productive", "outside", "launcher") == [10.0, 10.0, 12.5, 0.5]
    assert found.goodput == pytest.approx(10 / 33)


def test_an_evaluation_has_a_bucket() -> None:
    """G7: what it takes is no time of steps."""
    found = summary_of(started(), monitored([*[STEP] * 30, Act("eval", 6.0), *[STEP] * 30], is_over=False))
    assert of(found, "productive", "evaluation", "outside") == [12.0, 6.0, 0.0]


def test_lost_steps_are_lost_with_their_data_and_evaluation() -> None:
    """G5: 40 of 80 steps are done again; half of all that the attempt took is lost."""
    acts = [*[Act("data", 0.3), STEP] * 40, *[Act("data", 0.3), STEP] * 38, Act("eval", 1.0)]
    went_on = [*started(1, FIRST + 41.0, FIRST + 50.0), told("resume", FIRST + 45.0, 1, step=41)]
    events = [*started(), *monitored(acts, is_global=True), *FAILED, *sorted(went_on, key=lambda one: one["t"])]
    found = summary_of(events)
    assert of(found, "productive", "data", "evaluation") == [8.7, 12.0, 0.0]  # 0.7 of the next attempt
    assert found.buckets[Bucket.REPLAYED] == pytest.approx(20.2, abs=0.3)
    assert found.lost_steps == 38
    assert found.attempts[0]["steps"] == found.attempts[0]["completed"] == 79


def test_steps_behind_the_newest_checkpoint_are_lost_when_nobody_goes_on() -> None:
    """G9: after giving up, and while the next attempt is awaited."""
    acts = [*[STEP] * 100, Act("checkpoint", 1.0), *[STEP] * 95]
    saved = [told("ckpt_commit", FIRST + 21.0, rank=0, step=101, stall_s=1.0)]
    events = sorted([*started(), *monitored(acts, is_global=True), *saved, *FAILED], key=lambda one: one["t"])
    gave_up = [told("decision", FIRST + 40.6, verdict="give_up", exit_code=1)]
    for found in (summary_of(events), summary_of(events, gave_up)):
        assert found.buckets[Bucket.PRODUCTIVE] == pytest.approx(20.0, abs=0.3)
        assert found.buckets[Bucket.REPLAYED] == pytest.approx(19.2, abs=0.4)
        assert of(found, "checkpoint") == [1.0]
        assert found.lost_steps == 95


def test_the_death_of_a_launcher_is_a_fault_and_ends_its_work() -> None:
    """G4: with the last sign of life, though somebody starts it again much later."""
    again = [told("run_start", FIRST + 200.0, unheld_s=158.0), told("attempt_start", FIRST + 201.0, ranks=[0], node=0)]
    found = summary_of(started(), monitored([STEP] * 200, is_over=False), again)
    assert of(found, "idle") == [158.0]
    assert found.buckets[Bucket.PRODUCTIVE] == pytest.approx(42.0)
    assert (found.faults, found.mttf_s) == (1, pytest.approx(10.0 + 42.0 + 1.0))
    events = [*started(), *monitored([STEP] * 200, is_over=False)]
    assert [goodput_of(events, is_running=runs, renewed_after_s=2.0).faults for runs in (True, False)] == [0, 1]


def test_the_queue_is_no_part_of_a_recovery() -> None:
    """G10: a job that waited an hour for its place has not been repaired for an hour."""
    again = [
        told("decision", FIRST + 41.0, verdict="give_up", exit_code=1),
        told("run_start", FIRST + 3641.0), told("attempt_start", FIRST + 3642.0, ranks=[0], node=0),
        told("first_beat", FIRST + 3650.0, rank=0), told("recovered", FIRST + 3650.5, id="1", recovery_s=3610.3),
    ]  # fmt: skip
    found = summary_of(started(), monitored([STEP] * 200), FAILED, again)
    assert found.mttr_s == pytest.approx(10.3)


def test_who_does_not_tell_where_steps_begin_has_a_bound() -> None:
    """G6: saves, data and evaluations of an unchanged script are unknown, and no 0 s."""
    pulses = [{**event, "brackets_steps": False, "seen": []} for event in monitored([STEP] * 50)]
    found = summary_of(started(), pulses)
    assert found.at_most == "at most "
    assert [found.told_buckets()[name] for name in ("data", "checkpoint", "evaluation")] == [None] * 3
    exact = summary_of(started(), monitored([STEP] * 50))
    assert (exact.at_most, exact.told_buckets()["data"]) == ("", 0.0)


def test_a_standstill_is_no_progress_once_it_is_over() -> None:
    """G1: of four stops of 8 s, below any notice, the productive time is that of the steps."""
    stop = Act("step", 8.2, inner=(Act("stop", 8.0, Doing.STOPPED),))
    found = summary_of(started(), monitored([*[STEP] * 10, stop] * 4))
    assert found.buckets[Bucket.PRODUCTIVE] == pytest.approx(4 * 11 * 0.2, abs=0.5)
    assert found.buckets[Bucket.STANDING] == pytest.approx(32.0, abs=0.5)
    events = [*started(), *monitored([*[STEP] * 10, stop], is_over=False)]
    for asked in (5.0, 7.0, 9.5):
        now = summary_of([event for event in events if event["t"] <= FIRST + asked], now=FIRST + asked)
        assert now.buckets[Bucket.PRODUCTIVE] == pytest.approx(2.2, abs=0.5), asked


def test_a_long_attempt_is_read_from_some_of_its_points(tmp_path: Path) -> None:
    """The newest is among them, and the account is that of all."""
    events = [*started(), *monitored([*[Act("data", 0.1), STEP] * 1500], is_over=False)]
    (tmp_path / "a-monitor-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    digest = read_digest(tmp_path)
    kept = [event for event in digest.events if event["event"] == "time_spent"]
    assert (len(kept) <= 128, kept[-1]["t"], digest.count) == (True, events[-1]["t"], len(events))
    whole, some = summary_of(events), summary_of(list(digest.events))
    assert of(some, "productive", "data") == pytest.approx(of(whole, "productive", "data"), abs=0.1)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "gap", "data", "eval", "checkpoint"]), st.floats(0.05, 3.0),
        st.sampled_from(list(Doing)),
    ).map(lambda told: Act(*told)),
    min_size=3, max_size=25,
)  # fmt: skip


@given(ACTS, st.floats(0.0, 1.0), st.floats(0.0, 500.0))
@settings(max_examples=25, deadline=None)
def test_a_journal_that_goes_no_further_says_what_it_said_meanwhile(
    acts: list[Act], share: float, silent_s: float
) -> None:
    """A prefix, read at its end, is what a reader of that moment saw; silence behind it is no progress."""
    events = [*started(), *monitored(acts, is_over=False)]
    until = FIRST + share * (events[-1]["t"] - FIRST)
    prefix = [event for event in events if event["t"] <= until]
    last = max(event["t"] for event in prefix)
    then, whole = summary_of(prefix, now=last), summary_of(events)
    assert then.buckets[Bucket.PRODUCTIVE] <= whole.buckets[Bucket.PRODUCTIVE] + 2.6
    later = summary_of(prefix, now=last + silent_s)
    has_told = any(event["event"] == "time_spent" for event in prefix)
    if has_told:
        grown = later.buckets[Bucket.PRODUCTIVE] - then.buckets[Bucket.PRODUCTIVE]
        assert grown <= min(silent_s, 2.0 + (last - FIRST) / 20) + 1e-6
