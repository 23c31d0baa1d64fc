"""Reading flight records: real ones of two gloo ranks (torch 2.13), and what other versions may leave out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.hang.evidence import MAX_BYTES, parse_flight_record


def test_a_rank_that_waits(make):
    """Rank 0 stands in its 4th all_reduce, rank 1 never entered it."""
    waiting, late = (make.flight("late", rank).groups["0"] for rank in (0, 1))
    assert (waiting.enqueued, waiting.completed) == (4, 3)
    assert (late.enqueued, late.completed) == (3, 3)
    assert waiting.position.blocked
    assert waiting.position.is_world
    assert not late.position.blocked
    assert waiting.started is None  # gloo does not say
    entry = waiting.entries[4]
    assert (entry.op, entry.input_sizes, entry.dtypes, entry.retired) == (
        "all_reduce",
        ((8,),),
        ("Float",),
        False,
    )
    assert late.entries[3].retired
    assert entry.text() == "all_reduce [8] Float"


@pytest.mark.parametrize("said", ["1", "3"])
def test_the_status_of_gloo_may_be_behind_for_ever(make, said):
    """A thread that is late writes a lower number last; what the entries say counts."""
    data = json.loads((make.data / "flight-late-0.json").read_text())
    data["pg_status"]["0"]["last_completed_collective"] = said
    assert parse_flight_record(data).groups["0"].completed == 3


def test_several_process_groups(make):
    """Groups are told apart by name; one that was never used is not there."""
    assert set(make.flight("groups", 0).groups) == {"0"}
    groups = make.flight("groups", 1).groups
    assert groups["1"].label == "second"
    assert (groups["1"].enqueued, groups["1"].completed) == (1, 0)


def test_nccl_tells_members_and_started():
    """The same format with a filled configuration."""
    record = parse_flight_record(
        {
            "version": "2.10",
            "pg_config": {"7": {"name": "7", "desc": "tp", "ranks": "[2, 3]"}},
            "pg_status": {
                "1": {
                    "last_enqueued_collective": 9,
                    "last_started_collective": 8,
                    "last_completed_collective": 7,
                }
            },
            "entries": [
                {
                    "pg_id": 1,
                    "process_group": ["7", "tp"],
                    "collective_seq_id": 9,
                    "profiling_name": "nccl:_all_gather_base",
                    "state": "scheduled",
                },
                {"pg_id": 1, "process_group": ["7", "tp"], "collective_seq_id": 9, "is_p2p": True},
            ],
        }
    )
    group = record.groups["7"]
    assert (group.members, group.started, group.entries[9].op) == ((2, 3), 8, "_all_gather_base")
    assert not group.position.is_world


def test_without_status_the_entries_tell():
    """Older versions have no pg_status."""
    entries = [
        {"process_group": ["0", "default_pg"], "pg_id": 0, "collective_seq_id": n, "retired": n < 3} for n in (1, 2, 3)
    ]
    group = parse_flight_record(json.dumps({"entries": entries})).groups["0"]
    assert (group.enqueued, group.completed) == (3, 2)


@pytest.mark.parametrize("garbage", ["", "{", "[]", "null", b"\xff\xfe", None, 7, "[" * 100_000])
def test_what_is_no_record(garbage):
    """A cut or foreign file is no record, and no failure."""
    assert parse_flight_record(garbage) is None


def test_too_large_is_not_read():
    """The monitor's memory is bounded."""
    assert parse_flight_record(" " * (MAX_BYTES + 1)) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(
    ["pg_id", "process_group", "collective_seq_id", "input_sizes", "retired", "timeout_ms", "profiling_name"]
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "entries": st.lists(st.dictionaries(keys, values), max_size=4) | values,
            "pg_status": st.dictionaries(st.sampled_from(["0", "1"]), values) | values,
            "pg_config": values,
            "version": values,
        },
    )
)
def test_any_shape_is_survived(data):
    """Every missing or misshapen key counts as unknown."""
    record = parse_flight_record(data)
    assert record is not None
    record.positions()
