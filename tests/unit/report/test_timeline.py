"""The timeline of a run: its strip has the seconds of the account, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.ledger import Ledger
from resilience_sdk.goodput.summary import Summary, summarize
from resilience_sdk.report import timeline
from resilience_sdk.report.facts import Segment

BEGAN = 1_790_000_000.0
SECONDS = st.floats(0.0, 5_000.0)
STALLED = {"activity": "stuck", "section": "fwd"}
_BEGINNING = (
    st.fixed_dictionaries({"event": st.just("run_start"), "job": st.sampled_from("ab")}),
    st.fixed_dictionaries({"event": st.just("attempt_start"), "attempt": st.integers(0, 3), "rendezvous_s": SECONDS}),
    st.fixed_dictionaries({"event": st.just("first_beat"), "step": st.integers(0, 50)}),
    st.fixed_dictionaries({"event": st.just("resume"), "step": st.integers(0, 50)}),
)
_COSTS = (
    st.fixed_dictionaries({"event": st.just("step_time"), "data_s": SECONDS, "saves_s": SECONDS}),
    st.fixed_dictionaries({"event": st.just("ckpt_commit"), "step": st.integers(0, 90), "stall_s": SECONDS}),
    st.fixed_dictionaries({"event": st.just("stall"), "for_s": SECONDS, "ranks": st.just([STALLED])}),
    st.just({"event": "stall_end", "why": "went on"}),
)
_ENDINGS = (
    st.fixed_dictionaries(
        {"event": st.just("incident"), "kind": st.sampled_from(["hang", "crash"]), "id": st.just("0001-hang"),
         "action": st.sampled_from(["restart", "none"])}
    ),
    st.just({"event": "recovered", "id": "0001-hang"}),
    st.just({"event": "stop_agreed"}),
    st.just({"event": "attempt_end", "ended_by": "hang", "exit_codes": {"0": 1}}),
    st.fixed_dictionaries({"event": st.just("decision"), "exit_code": st.just(75), "verdict": st.just("preempted")}),
    st.just({"event": "finished"}),
)  # fmt: skip
HAPPENED = st.lists(st.tuples(st.floats(0.0, 3_000.0), st.one_of(*_BEGINNING, *_COSTS, *_ENDINGS)), max_size=40)


def account_of(happened: list[tuple[float, dict[str, Any]]]) -> Summary:
    """Return the account of events, each so many seconds after the one before it."""
    ledger, at = Ledger(), BEGAN
    common = {"job": "a", "host": "n0", "boot_id": "b", "attempt": 0, "rank": 0, "step_is_global": True}
    for after_s, event in happened:
        at += after_s
        mono_ns = int((at - BEGAN + 100) * 1e9)
        ledger.apply({**common, "node": 0, "ranks": [0], "t": at, "mono_ns": mono_ns, **event})
    return summarize(ledger)


def sums_of(segments: tuple[Segment, ...]) -> dict[str, float]:
    """Return what the strip shows of each bucket, in seconds."""
    return {
        bucket.value: sum(segment.parts.get(bucket.value, 0.0) for segment in segments) for bucket in Bucket
    }  # fmt: skip


@given(HAPPENED)
def test_the_strip_has_the_seconds_of_the_table(happened: list[tuple[float, dict[str, Any]]]) -> None:
    """Whatever a journal tells, each bucket has the same seconds in both, and no segment more than its length."""
    account = account_of(happened)
    segments = timeline.segments_of(account)
    assert sums_of(segments) == pytest.approx({bucket.value: account.buckets[bucket] for bucket in Bucket}, abs=0.01)
    for segment in segments:
        assert sum(segment.parts.values()) == pytest.approx(segment.ended_at - segment.began_at, abs=0.01)
        assert segment.parts[segment.bucket] == max(segment.parts.values())


def trained(data_s: float, hung_s: float = 0.0) -> list[tuple[float, dict[str, Any]]]:
    """Return an attempt of 1,000 s, half of whose 80 steps were lost with it and done again."""
    return [
        (0, {"event": "run_start"}), (0, {"event": "attempt_start"}), (100, {"event": "first_beat", "step": 0}),
        (400, {"event": "ckpt_commit", "step": 40}), (100, {"event": "stall", "for_s": 0.0, "ranks": [STALLED]}),
        (hung_s, {"event": "stall_end", "why": "went on"}), (300, {"event": "ckpt_commit", "step": 80}),
        (0, {"event": "step_time", "data_s": data_s}), (100, {"event": "rank_exit", "exit_code": 1}),
        (0, {"event": "attempt_start", "attempt": 1}), (0, {"event": "resume", "attempt": 1, "step": 40}),
    ]  # fmt: skip


def test_training_shows_data_and_lost_steps_where_only_their_sums_are_known() -> None:
    """A strip that was productive alone stood above a table with hundreds of seconds of other buckets."""
    segments = timeline.segments_of(account_of(trained(100.0, 50.0)))
    training = [one for one in segments if "data" in one.parts]
    parts = {name: sum(one.parts[name] for one in training) for name in training[0].parts}
    assert parts == pytest.approx({"data": 50.0, "replayed": 450.0, "productive": 400.0})
    assert all(one.bucket in ("replayed", "productive") and one.attempt == 0 for one in training)
    (hang,) = (one for one in segments if "hang" in one.parts)
    assert (hang.parts, hang.ended_at - hang.began_at) == ({"hang": pytest.approx(50.0)}, pytest.approx(50.0))
    assert training[0].ended_at == hang.began_at < hang.ended_at == training[1].began_at


def test_thousands_of_stretches_keep_their_sums() -> None:
    """A bounded number of segments stands for them all."""
    happened = [(0.0, {"event": "run_start"})]
    for attempt in range(500):
        happened += [
            (1, {"event": "attempt_start", "attempt": attempt}), (2, {"event": "first_beat", "attempt": attempt}),
            (attempt, {"event": "rank_exit", "attempt": attempt, "exit_code": 1}),
        ]  # fmt: skip
    account = account_of(happened)
    segments = timeline.segments_of(account)
    assert len(account.stretches) > timeline.MOST_SEGMENTS == len(segments)
    assert sums_of(segments) == pytest.approx({bucket.value: account.buckets[bucket] for bucket in Bucket}, abs=0.01)


def test_attempts_are_named_by_their_job() -> None:
    """A job that was queued again counts from 0 once more, often under the same key."""
    happened = [
        (0, {"event": "run_start"}), (0, {"event": "attempt_start"}), (9, {"event": "first_beat"}),
        (9, {"event": "attempt_start", "attempt": 1}), (9, {"event": "decision", "exit_code": 75}),
        (9, {"event": "run_start"}), (0, {"event": "attempt_start"}), (9, {"event": "decision", "exit_code": 75}),
        (9, {"event": "run_start", "job": "b"}), (0, {"event": "attempt_start", "job": "b"}),
    ]  # fmt: skip
    account = account_of(happened)
    attempts, _ = timeline.attempts_of(account, timeline.segments_of(account), ())
    told = [(one.job, one.job_number, one.attempt) for one in attempts]
    assert told == [("a", 1, 0), ("a", 1, 1), ("a", 2, 0), ("b", 3, 0)]


def test_the_bar_of_an_attempt_is_in_the_order_of_time() -> None:
    """Its buckets stand as they began: start-up before training, what a fault cost behind it."""
    account = account_of([*trained(100.0), (50, {"event": "first_beat", "attempt": 1})])
    attempts, _ = timeline.attempts_of(account, timeline.segments_of(account), ())
    order = [name for name in attempts[0].buckets if name in ("startup", "productive", "restart")]
    assert order == ["startup", "productive"]
    assert next(iter(attempts[1].buckets)) == "restart"
