"""Faults that somebody injected take time as any, and say nothing of how often one comes."""

from __future__ import annotations

from typing import Any

import pytest

from resilience_sdk.checkpoint.history import mean_time_to_failure_s
from resilience_sdk.goodput.ledger import Ledger
from resilience_sdk.goodput.summary import summarize
from resilience_sdk.history.facts import Rows
from resilience_sdk.incidents import Culprit, Evidence, Incident, InjectedFaults, event_fields

STRUCK = {"event": "fault_injected", "t": 30.0, "rank": 1, "by": "RESILIENCE_FAULT=kill:rank=1,step=9", "step": 9}
CRASH = {"event": "incident", "t": 31.0, "id": "0001-crash", "kind": "crash", "action": "restart", "cause": "unknown"}


def told(*events: dict[str, Any]) -> list[dict[str, Any]]:
    """A run of one attempt, or more, with these events in it."""
    start = [
        {"event": "run_start", "t": 0.0},
        {"event": "attempt_start", "t": 1.0, "ranks": [0, 1], "node": 0},
        *({"event": "first_beat", "t": 10.0, "rank": rank} for rank in (0, 1)),
    ]
    return [{"rank": None, "job": "job-1", "attempt": 0, "host": "a", **one} for one in (*start, *events)]


def counted(*events: dict[str, Any]) -> tuple[int, int, float | None]:
    """How many faults of a run count, how many were injected, and its MTTF."""
    ledger = Ledger()
    for event in told(*events):
        ledger.apply(event)
    summary = summarize(ledger, 200.0)
    assert (summary.to_json()["faults"], summary.to_json()["injected"]) == (summary.faults, summary.injected)
    return summary.faults, summary.injected, summary.mttf_s


def test_what_an_injected_fault_led_to_is_no_failure():
    """Neither for the mean time between failures, nor for how often to save; the time it took is a restart's."""
    assert counted({**CRASH, "injected": False}) == (1, 0, 200.0)
    assert counted(STRUCK, {**CRASH, "injected": True}) == (0, 1, None)
    assert mean_time_to_failure_s(told({**CRASH, "injected": True}), 100.0) == pytest.approx(131.0)
    assert mean_time_to_failure_s(told({**CRASH, "injected": False}), 100.0) == pytest.approx(131.0 / 2)


def test_a_real_failure_beside_an_injected_one_counts():
    """A rank that was slowed down by hand did not crash by that: the incident knows whom it names."""
    assert counted(STRUCK, {**CRASH, "injected": False}) == (1, 0, 200.0)
    both = ({**CRASH, "injected": True}, {**CRASH, "id": "0002-crash", "t": 60.0, "attempt": 1, "injected": False})
    assert counted(STRUCK, *both)[:2] == (1, 1)


def test_incidents_of_older_versions_count_by_the_attempt_that_was_struck():
    """They do not tell of it; the attempt of another job of that number is another one."""
    assert counted(STRUCK, CRASH) == (0, 1, None)
    assert counted({**STRUCK, "attempt": 3}, CRASH) == (1, 0, 200.0)
    faults = InjectedFaults()
    again = [STRUCK, {"event": "run_start", "t": 99.0}, {**CRASH, "t": 120.0}]
    assert [faults.led_to({"job": "j", "attempt": 0, **one}) for one in again] == [False, False, False]


def test_an_incident_tells_the_journal_whether_it_was_injected():
    """By the evidence that its reader sees."""
    real = Incident(id="1", kind="crash", culprits=(Culprit(1),))
    by_hand = Incident(id="1", kind="crash", culprits=(Culprit(1),), evidence=(Evidence("fault", "injected by ..."),))
    assert [event_fields(one)["injected"] for one in (real, by_hand)] == [False, True]


def test_a_rank_that_was_slowed_down_did_not_crash_by_that():
    """Its reader is told of the fault all the same; a slow rank, or a hang, may well come of it."""
    slow = Evidence("fault", "injected by RESILIENCE_FAULT=slow:rank=1,seconds=0.1, which struck rank 1 at step 3")
    kill = Evidence("fault", "injected by faults.inject() as kill:rank=1, which struck rank 1 at step 9")
    found = {kind: Incident(kind=kind, culprits=(Culprit(1),), evidence=(slow,)) for kind in ("crash", "slow", "hang")}
    assert {kind: one.injected for kind, one in found.items()} == {"crash": False, "slow": True, "hang": True}
    assert Incident(kind="crash", culprits=(Culprit(1),), evidence=(slow, kill)).injected


def test_the_index_takes_strikes_and_what_incidents_tell():
    """Null where an incident of an older version does not tell."""
    rows = Rows(file="a-rank1-7.jsonl")
    for offset, event in enumerate(told(STRUCK, CRASH, {**CRASH, "id": "0002-crash", "injected": True})):
        rows.add(event, offset)
    assert [row["injected"] for row in rows.failures.values()] == [None, True]
    assert [(row["job"], row["attempt"]) for row in rows.strikes.values()] == [("job-1", 0)]
