"""What `status` says of a rank, and of a run that left no outcome."""

import pytest

from resilience_sdk.cli.status import render
from resilience_sdk.incidents import Culprit
from resilience_sdk.report.outcome import supervised_end
from resilience_sdk.report.run_state import state_of


def status_lines(**facts):
    """What is printed of a status of which nothing else is known."""
    status = {
        "run_dir": "/r",
        "state": "running",
        "live": [],
        "ranks": [],
        "passed_over": [],
        "incidents": {"count": 0},
        "memory": [],
        "memory_grows": [],
        "degraded": [],
        "problems": [],
    }
    nothing = dict.fromkeys(
        (
            "outcome",
            "in_use_by",
            "job",
            "last_event",
            "checkpoint",
            "stragglers",
            "stall",
            "supervised",
            "step_time",
            "why_slow",
            "goodput",
        )
    )
    return render(nothing | status | facts, 0.0)


def rank_row(**facts):
    """The line of a rank that lives."""
    live = {
        "rank": 0,
        "pid": 7,
        "sections": [],
        "step": None,
        "step_is_global": False,
        "seconds_since_beat": 1.0,
        "paused": None,
        "done": False,
        "progress_signal": True,
    }
    (row,) = (line for line in status_lines(live=[live | facts]) if line.startswith("rank 0"))
    return row.removeprefix("rank 0").strip()


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, "no step yet, outside any section"),
        ({"step": 36, "step_is_global": True, "sections": ["step"]}, "step 36"),
        ({"step": 36, "step_is_global": True, "sections": ["step", "fwd", "comm"]}, "step 36, in fwd > comm"),
        ({"step": 36, "step_is_global": True, "sections": ["epoch"]}, "step 36, in epoch"),
        ({"step": 36, "step_is_global": True}, "step 36, outside any section"),
        ({"step": 36, "sections": ["step"]}, "step 36 of this attempt"),
        ({"step": 36, "step_is_global": True, "done": True}, "done, step 36"),
    ],
)
def test_a_rank_is_where_its_step_and_its_sections_are(facts, told):
    """Steps of a loop that does not know where it was resumed are marked."""
    assert rank_row(**facts) == f"{told}, last beat 1.0 s ago, pid 7"


@pytest.mark.parametrize(("is_global", "told"), [(True, "step 9"), (None, "step 9"), (False, "step 9 of this attempt")])
def test_the_step_of_an_ended_rank_says_what_it_counts(is_global, told):
    """As the journal of its exit has it; one of an older version does not say."""
    begin = {"event": "attempt_start", "t": 1.0, "job": "j", "attempt": 1}
    ended = {
        "event": "rank_exit",
        "t": 2.0,
        "job": "j",
        "attempt": 1,
        "rank": 0,
        "step": 9,
        "step_is_global": is_global,
    }
    rank = state_of([begin, ended]).ranks[0]
    assert (rank.step, rank.step_is_global) == (9, is_global)
    assert Culprit(0, step=9, step_is_global=is_global).told_step == told


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"step": 1499, "step_is_global": False, "completed": 1500}, "1500 steps of this attempt"),
        ({"step": 1499, "step_is_global": True, "completed": 500}, "last step 1499"),
        ({"step": 1499, "step_is_global": False}, "last step 1499 of this attempt"),
        ({}, None),
    ],
)
def test_an_ended_rank_has_as_many_steps_as_it_completed(fields, told):
    """Its last step has the number before: steps count from 0."""
    begin = {"event": "attempt_start", "t": 1.0, "job": "j", "attempt": 1}
    rank = state_of([begin, {**begin, "event": "rank_exit", "t": 2.0, "rank": 0, **fields}]).ranks[0]
    assert rank.progress == told


def test_a_command_under_supervise_that_records_nothing_has_an_end_all_the_same():
    """`resilience supervise -- true` was not killed; what was journalled after its end is of a later job."""
    end = {"event": "decision", "what": "supervise", "exit_code": 0, "reason": "it left with 0"}
    assert supervised_end([end]) == "its command recorded nothing; resilience supervise ended with 0: it left with 0"
    assert supervised_end([end, {"event": "run_start"}]) is None
    assert supervised_end([{**end, "exit_code": None}]) is None  # it is to be run again
    assert supervised_end([]) is None


def test_the_line_on_goodput_names_what_counts_and_how_to_read_on_from_any_directory():
    """No bucket of half a per cent; a path with a space is one word of the command."""
    buckets = {"productive": 90.0, "startup": 9.6, "rendezvous": 0.4, "idle": 0.0}
    told = {"wall_s": 100.0, "goodput": 0.9, "ettr": 0.9, "buckets": buckets}
    incident = {"id": "0001-crash", "detected_at": 0.0, "summary": "it died"}
    lines = status_lines(run_dir="/my runs/a", goodput=told, incidents={"count": 1, "last": incident})
    assert any(line.startswith("goodput") and line.endswith(": productive 90%, startup 10%") for line in lines)
    assert any("resilience why '/my runs/a' tells more" in line for line in lines)
