"""Sentences for events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from told_run import EVENTS

from resilience_sdk.report.event_words import NewestEvents, sentence


@pytest.mark.parametrize(
    ("event", "told"),
    [
        ({"event": "attempt_start", "attempt": 1, "world_size": 8}, "attempt 1 begins with 8 ranks"),
        ({"event": "rank_exit", "rank": 3, "signal": "SIGKILL"}, "rank 3 was ended by SIGKILL"),
        ({"event": "rank_exit", "rank": 3, "exit_code": 1}, "rank 3 left with exit code 1"),
        ({"event": "rank_exit", "rank": 3, "exit_code": 0}, None),
        ({"event": "rank_exit", "rank": 2, "signal": "SIGTERM", "ended_by_launcher": True}, None),
        ({"event": "attempt_end", "attempt": 0, "ended_by": "hang"}, "attempt 0 is over: it hung"),
        ({"event": "stall", "text": "no progress for 10 s: rank 1 stuck"}, "no progress for 10 s: rank 1 stuck"),
        ({"event": "stall_end", "why": "went on", "after_s": 21.0}, "went on after 21.0 s"),
        ({"event": "stall_end", "why": "verdict", "after_s": 60.0}, None),
        ({"event": "incident", "id": "0001-hang", "summary": "Rank 1 hung"}, "incident 0001-hang: Rank 1 hung"),
        (
            {"event": "recovered", "id": "0001-hang", "recovery_s": 4.0, "lost_steps": 3},
            "0001-hang is over, all ranks step again after 4.0 s, 3 steps lost",
        ),
        ({"event": "ckpt_commit", "step": 40, "seconds": 2.0}, "checkpoint after 40 steps is whole, in 2.0 s"),
        ({"event": "ckpt_fail", "step": 1, "error": "disk full"}, "checkpoint after 1 step failed: disk full"),
        ({"event": "decision", "verdict": "restart", "reason": "1 of 3"}, "restart: 1 of 3"),
        ({"event": "decision", "verdict": "restart", "reason": "restart, not counted"}, "restart, not counted"),
        ({"event": "straggler", "what": "report", "scores": []}, None),
        ({"event": "straggler", "what": "found", "text": "rank 3 is slow"}, "slow: rank 3 is slow"),
        ({"event": "health", "ok": True, "what": "gpu"}, None),
        ({"event": "degraded", "what": "no progress signal", "ranks": [0, 1, 2]}, "no progress signal (ranks 0-2)"),
        ({"event": "step_time", "steps": 3}, None),
        ({"event": "of another version"}, None),
    ],
)
def test_sentences(event: dict[str, Any], told: str | None) -> None:
    """What a person cares about is told in plain words, and nothing else."""
    assert sentence({"t": 1.0, **event}) == told


def test_each_thing_is_told_once() -> None:
    """Every node's launcher announces an attempt; the next one is news again."""
    newest = NewestEvents(most=3)
    begin = {"event": "attempt_start", "attempt": 0, "world_size": 2}
    newest.add([{**begin, "t": 1.0, "host": "a"}, {**begin, "t": 1.2, "host": "b"}])
    assert [text for _, _, text in newest.all()] == ["attempt 0 begins with 2 ranks"]
    stalls = [{"event": "stall", "text": f"no progress for {n} s: rank 1 stuck", "t": 2.0 + n} for n in (10, 20)]
    newest.add(stalls)
    assert [text for _, _, text in newest.all()][1:] == ["no progress for 20 s: rank 1 stuck"]
    newest.add([{**begin, "t": 99.0}, *({"event": "resume", "step": n, "t": 100.0 + n} for n in range(5))])
    assert [text for _, _, text in newest.all()] == [f"resumed after {n} steps" for n in (2, 3, 4)]


@given(st.lists(EVENTS, max_size=12))
def test_any_events_can_be_told(events: list[dict[str, Any]]) -> None:
    """A journal of another version breaks nothing, and a sentence is one line."""
    newest = NewestEvents()
    newest.add(events)
    assert all("\n" not in text and text for _, _, text in newest.all())
