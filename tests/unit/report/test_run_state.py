"""What the journal says about a run."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.journal import Event
from resilience_sdk.report.run_state import goodput_of, state_of


def _events(*items: dict[str, Any]) -> list[dict[str, Any]]:
    base = {"job": "j", "host": "h", "attempt": 0, "rank": None, "step": None}
    return [{**base, "t": float(number), **item} for number, item in enumerate(items)]


def test_ranks_of_the_newest_attempt() -> None:
    """Each attempt starts a new table; exits are told by the launcher."""
    state = state_of(
        _events(
            {"event": "run_start"},
            {"event": "attempt_start", "world_size": 2},
            {"event": "rank_start", "rank": 0},
            {"event": "rank_exit", "rank": 0, "signal": "SIGKILL", "exit_code": None},
            {"event": "attempt_end"},
            {"event": "attempt_start", "world_size": 2, "attempt": 1},
            {"event": "rank_start", "rank": 0, "attempt": 1},
            {"event": "first_beat", "rank": 0, "attempt": 1},
            {"event": "ckpt_commit", "rank": 0, "step": 20, "attempt": 1},
            {"event": "rank_exit", "rank": 1, "exit_code": 3, "attempt": 1},
        )
    )
    assert (state.job, state.attempt, state.attempts, state.world_size) == ("j", 1, 2, 2)
    assert (state.ranks[0].state, state.ranks[0].step, state.ranks[0].host) == ("stepping", 20, "h")
    assert (state.ranks[1].state, state.ranks[1].exit_code) == ("exited", 3)
    assert (state.checkpoint_step, state.checkpoint_at) == (20, 8.0)
    assert not state.attempt_ended


def test_that_the_page_was_written_is_no_event_of_the_job() -> None:
    """`status` said that the last event of a job was `report`."""
    state = state_of(_events({"event": "run_start"}, {"event": "finished"}, {"event": "report"}))
    assert (state.last_event, state.last_event_at) == ("finished", 1.0)


def test_a_notice_stands_until_the_job_goes_on() -> None:
    """The newest counts; steps that go on, and the end of the attempt, end it."""
    first = {"event": "stall", "since": 100.0, "text": "no progress for 10 s: rank 1 stuck"}
    again = {**first, "text": "no progress for 20 s: rank 1 stuck"}
    begin = {"event": "attempt_start", "world_size": 2}
    assert state_of(_events(begin, first, again)).stall == {"since": 100.0, "at": 2.0, "text": again["text"]}
    assert state_of(_events(begin, first, {"event": "stall_end", "why": "went on"})).stall is None
    assert state_of(_events(begin, first, {"event": "attempt_end"})).stall is None
    assert state_of(_events(begin, first, {"event": "attempt_start", "attempt": 1})).stall is None


def test_no_progress_signal_is_told_until_the_last_of_its_ranks_has_beaten() -> None:
    """A slow start is no fault that lasts; other things that are degraded stay."""
    events = _events(
        {"event": "attempt_start", "world_size": 2},
        {"event": "degraded", "what": "monitor", "why": "slow"},
        {"event": "degraded", "what": "no progress signal", "ranks": [0, 1]},
        {"event": "first_beat", "rank": 1},
        {"event": "first_beat", "rank": 0},
    )
    told = [[item["message"] for item in state_of(events[:length]).degraded] for length in (3, 4, 5)]
    assert told == [["monitor: slow", "no progress signal"], ["monitor: slow", "no progress signal"], ["monitor: slow"]]
    again = _events({"event": "attempt_start", "attempt": 1})
    assert [item["message"] for item in state_of([*events[:3], *again]).degraded] == ["monitor: slow"]


def test_a_checkpoint_that_was_found_damaged_is_not_the_newest() -> None:
    """What the last resume passed over is told beside what it took, until there is a newer one."""
    saved = [{"event": "ckpt_commit", "step": 10}, {"event": "ckpt_commit", "step": 20}]
    left_out = {"event": "ckpt_skip", "step": 21, "why": "no time", "time_left_s": 3.0}
    damaged = {"event": "ckpt_skip", "step": 20, "checkpoint": "step-00000020", "why": "state.pt is cut"}
    resumed = {"event": "resume", "step": 10, "checkpoint": "step-00000010", "created_at": 0.5}
    state = state_of(_events(*saved, left_out))
    assert (state.checkpoint_step, state.passed_over) == (20, {})
    state = state_of(_events(*saved, damaged, resumed, {"event": "run_start"}))
    assert (state.checkpoint_step, state.checkpoint_at) == (10, 0.5)
    assert state.passed_over == {20: {"step": 20, "at": 2.0, "why": "state.pt is cut"}}
    state = state_of(_events(*saved, damaged, resumed, {"event": "ckpt_commit", "step": 20}))
    assert (state.checkpoint_step, state.checkpoint_at, state.passed_over) == (20, 4.0, {})


def test_a_checkpoint_with_a_nan_is_not_the_newest() -> None:
    """However many follow, one of them is told, beside the good one from before; where all are so, there is one."""
    bad = [{"event": "ckpt_commit", "step": step, "why_bad": "it holds NaN in w of rank 0"} for step in (20, 30)]
    state = state_of(_events({"event": "ckpt_commit", "step": 10}, *bad))
    assert (state.checkpoint_step, state.checkpoint_at) == (10, 0.0)
    assert state.passed_over == {30: {"step": 30, "at": 2.0, "why": "it holds NaN in w of rank 0"}}
    assert state_of(_events(bad[0])).checkpoint_step == 20


def test_where_all_checkpoints_are_damaged_none_is_good() -> None:
    """A resume that takes none has passed over all that are there; older ones in the journal are deleted."""
    saved = [{"event": "ckpt_commit", "step": step} for step in (1, 2, 3)]
    damaged = [
        {"event": "ckpt_skip", "step": 3, "checkpoint": "step-00000003", "why": "cut"},
        {"event": "ckpt_quarantine", "step": 2, "checkpoint": "step-00000002", "why": "it kills"},
    ]
    state = state_of(_events(*saved, *damaged))
    assert (state.checkpoint_step, state.checkpoint_at) == (None, None)
    assert list(state.passed_over) == [3, 2]


def test_late_events_of_an_old_attempt_do_not_mix() -> None:
    """A monitor may write about attempt 0 after attempt 1 began."""
    state = state_of(
        _events(
            {"event": "attempt_start", "attempt": 1},
            {"event": "dump", "rank": 3, "attempt": 0},
        )
    )
    assert state.ranks == {}


def test_a_requeued_job_starts_over_and_keeps_its_checkpoint() -> None:
    """The same key, the same host, a second announcement: attempts count from 0 again."""
    events = _events(
        {"event": "run_start"},
        {"event": "attempt_start", "attempt": 0},
        {"event": "attempt_start", "attempt": 1},
        {"event": "ckpt_commit", "step": 7, "attempt": 1},
        {"event": "run_start"},
        {"event": "attempt_start", "attempt": 0},
        {"event": "rank_start", "rank": 0},
    )
    state = state_of(events)
    assert (state.attempt, state.attempts, state.checkpoint_step) == (0, 1, 7)
    assert list(state.ranks) == [0]
    assert state.started_at == 4.0


def test_several_nodes_announce_one_job() -> None:
    """The launcher of each node says run_start; that is one job."""
    state = state_of(
        _events(
            {"event": "run_start", "host": "a"},
            {"event": "attempt_start", "host": "a"},
            {"event": "rank_start", "rank": 0, "host": "a"},
            {"event": "run_start", "host": "b"},
            {"event": "rank_start", "rank": 1, "host": "b"},
        )
    )
    assert {rank.host for rank in state.ranks.values()} == {"a", "b"}


def test_another_job_in_the_same_directory() -> None:
    """A foreign launcher announces nothing; its ranks do."""
    state = state_of(_events({"event": "rank_start", "rank": 5}, {"event": "rank_start", "rank": 0, "job": "k"}))
    assert state.job == "k"
    assert list(state.ranks) == [0]


_values = st.none() | st.booleans() | st.integers(-3, 10**30) | st.floats() | st.text(max_size=3) | st.just([])


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "t": st.floats(0, 1e12),
                "event": st.sampled_from([e.value for e in Event]) | st.text(max_size=5),
            },
            optional={
                key: _values
                for key in (
                    "job",
                    "host",
                    "attempt",
                    "rank",
                    "step",
                    "world_size",
                    "exited",
                    "exit_code",
                    "why",
                )
            },
        ),
        max_size=12,
    )
)
def test_any_event_is_survived(events: list[dict[str, Any]]) -> None:
    """Lines of other versions, with any values, never fail."""
    state_of(events)


def test_a_lease_that_is_held_after_the_end_takes_no_time_of_the_run() -> None:
    """Its launcher writes the report meanwhile; of a job that told no end it is the last sign."""
    begun = [
        {"event": "run_start", "t": 1000.0, "job": "j", "host": "h", "boot_id": "b"},
        {"event": "attempt_start", "t": 1001.0, "job": "j", "host": "h", "attempt": 0, "ranks": [0]},
        {"event": "first_beat", "t": 1010.0, "job": "j", "rank": 0, "attempt": 0},
    ]
    ended = {"event": "decision", "t": 1060.0, "job": "j", "verdict": "stop", "exit_code": 77}
    assert goodput_of([*begun, ended], renewed_after_s=30.0).wall_s == goodput_of([*begun, ended]).wall_s == 60.0
    assert goodput_of(begun, renewed_after_s=30.0).wall_s == 40.0
