"""Ranks that died of a signal by which somebody asked them to leave, and how far the ranks had come then."""

from __future__ import annotations

import signal

import pytest

from resilience_sdk.attribution.exits import Resource, classification
from resilience_sdk.launcher.restart_policy import FREE_OF_SERVER, decide
from resilience_sdk.postmortem.facts import AttemptEnd, EndedBy, RankExit, RankTrace, asked_to_leave
from resilience_sdk.preemption.listener import StepsDone, completed_at

PEER_LOST = {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:4711", "frames": []}
OWN_FAULT = {"type": "ValueError", "message": "no", "frames": []}


def exits(*codes: int, by_us: tuple[int, ...] = ()) -> list[RankExit]:
    """Ranks that ended with these codes, in this order."""
    return [RankExit(rank, rank, rank, code, rank, rank, rank in by_us) for rank, code in enumerate(codes)]


def traces(**raised: dict[str, object]) -> dict[int, RankTrace]:
    """What the ranks left: the exceptions of some (`r0=...`)."""
    return {rank: RankTrace(rank, rank, None, raised.get(f"r{rank}"), None, None) for rank in range(3)}


@pytest.mark.parametrize(
    ("ended", "raised", "asked"),
    [
        (exits(-15), {}, [0]),
        (exits(-10, -15), {}, [0, 1]),
        (exits(-1, 75, 0), {}, [0]),
        (exits(1, -15), {"r0": PEER_LOST}, [1]),  # it lost its peer, who was signalled
        (exits(-6, -15), {}, [1]),
        (exits(1, -15), {"r0": OWN_FAULT}, []),
        (exits(1, -15), {}, []),
        (exits(-9, -15), {}, []),
        (exits(-15), {"r0": OWN_FAULT}, []),
        (exits(-15, by_us=(0,)), {}, []),
        (exits(0, 75), {}, []),
    ],
)
def test_a_rank_that_died_of_such_a_signal_was_asked_unless_a_rank_failed_of_its_own(ended, raised, asked):
    """Nor where we had sent it ourselves."""
    assert [end.rank for end in asked_to_leave(ended, traces(**raised))] == asked


def test_further_signals_ask_where_the_settings_say_so():
    """Such as a real-time one."""
    number = int(signal.SIGRTMIN) + 5
    assert not asked_to_leave(exits(-number), traces())
    assert asked_to_leave(exits(-number), traces(), {number})


@pytest.mark.parametrize(
    ("given", "shown", "done"),
    [
        (None, None, None),
        (22, None, 23),  # the number of the step that was just made
        (22, 23, 23),
        (23, 23, 23),  # some give the amount: the heartbeats know
        (StepsDone(23), None, 23),
        (StepsDone(23), 23, 23),
        (5, 23, 23),
    ],
)
def test_steps_at_a_stop_are_those_that_are_complete(given, shown, done):
    """By the heartbeats where those have numbers, else by the number that `check()` was given."""
    assert completed_at(given, shown) == done


def test_a_port_of_ours_that_was_taken_costs_no_restart():
    """Three times: then it is no chance any more."""
    known = classification("port_in_use", 0.9)
    end = AttemptEnd(
        0, EndedBy.RANKS, {0: 1}, cause=known.cause, category=known.category, action=known.action, free=True
    )
    assert decide([end], 3).reason == FREE_OF_SERVER
    assert decide([end], 3).restarts_left == 3
    assert decide([end] * 4, 3).restarts_left == 2
    waits = AttemptEnd(0, EndedBy.RANKS, {0: 1}, cause="port_in_use", resource=Resource("port", "4711"))
    assert decide([waits], 3).restarts_left == 2
