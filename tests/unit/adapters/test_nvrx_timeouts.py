"""The arithmetic of NVRx's timeouts: what was measured, what it becomes, and what it is merged with."""

from __future__ import annotations

import dataclasses
import logging
import signal

import pytest

from resilience_sdk.adapters.nvrx.timeouts import (
    FaultToleranceConfig,
    HeartbeatTimeouts,
    Longest,
    SectionTimeouts,
    heartbeat_timeouts,
    section_timeouts,
)


def beats(*times, started=0.0):
    longest = Longest(started)
    for time in times:
        longest.beat(time)
    return longest


@pytest.mark.parametrize(
    ("current", "expected"),
    [
        (HeartbeatTimeouts(), (20, 14)),
        (HeartbeatTimeouts(21, 15, True), (20.5, 14.5)),
        (HeartbeatTimeouts(99, 99, False), (20, 14)),
    ],
)
def test_heartbeats_give_the_longest_times_the_factor(current, expected):
    """A calculated timeout is merged half and half, a configured one is replaced."""
    found = heartbeat_timeouts(beats(10, 11, 18, 20), 2.0, current)
    assert (found.initial, found.subsequent, found.were_calculated) == (*expected, True)


def test_one_heartbeat_is_not_enough():
    """The time between two is not known yet."""
    assert heartbeat_timeouts(beats(10), 2.0, HeartbeatTimeouts()) is None


def nested():
    longest = Longest(5.0)
    for name, opened, closed in (("one", 10, 40), ("two", 13, 23)):
        longest.open(name, opened)
        if name == "two":
            longest.close(name, closed)
    longest.close("one", 40)
    return longest


def test_sections_nest_and_the_time_between_is_measured():
    """From the start to the first, between two, and to the time of asking where none is open."""
    longest = nested()
    found = section_timeouts(longest, 1.0, SectionTimeouts({"one": None, "two": 7}))
    assert (found.section, found.out_of_section) == ({"one": 30, "two": 10}, 5)
    assert found.were_calculated
    assert found.are_valid
    longest.open("one", 100)
    assert longest.out_of_section == 60
    longest.note_out_of_section(110)  # one is open: this is no such time
    longest.close("one", 120)
    assert longest.out_of_section == 60
    longest.note_out_of_section(220)
    assert longest.out_of_section == 100


def test_sections_may_overlap_and_each_has_its_own_start():
    """One that is closed in the midst of another says nothing of that."""
    longest = Longest(0.0)
    for name, time in (("a", 1), ("b", 3), ("c", 6)):
        longest.open(name, time)
    for name in ("a", "b", "c"):
        longest.close(name, 10)
    assert longest.sections == {"a": 9, "b": 7, "c": 4}


def test_wrong_use_of_sections_is_named():
    """Opened twice, and closed without being open."""
    longest = Longest(0.0)
    longest.open("one", 1)
    with pytest.raises(ValueError, match="one is open already"):
        longest.open("one", 2)
    with pytest.raises(ValueError, match="two is not open"):
        longest.close("two", 2)


def test_what_is_not_selected_stays():
    """Calculated ones are merged, configured ones replaced, others kept, each by its own."""
    current = SectionTimeouts({"one": 10, "two": 10, "three": 3}, 50, {"one"}, True)
    found = section_timeouts(nested(), 1.0, current, selected=["one", "two"], with_out_of_section=False)
    assert found.section == {"one": 20, "two": 10, "three": 3}
    assert (found.calculated_sections, found.out_of_section) == ({"one", "two"}, 50)
    merged = section_timeouts(nested(), 1.0, found, selected=["two"])
    assert (merged.section["two"], merged.out_of_section) == (10, 27.5)


def test_a_section_that_was_never_closed_is_not_ready():
    """As one that is configured and was not seen."""
    assert section_timeouts(nested(), 1.0, SectionTimeouts({"three": None})) is None
    assert section_timeouts(nested(), 1.0, SectionTimeouts({"three": None}), selected=["one"]) is not None
    assert section_timeouts(Longest(0.0), 1.0, SectionTimeouts(), selected=[]) is None


def test_the_longest_of_all_ranks_counts_on_each():
    """Also on one that has measured nothing."""
    slow, fast, none = beats(9, 10), beats(2, 8), Longest(0.0)
    slow.sections, fast.sections = {"one": 2.0}, {"one": 1.0, "two": 8.0}
    fast.out_of_section = 20.0
    told = [rank.to_json() for rank in (slow, fast, none)]
    for rank in (slow, fast, none):
        rank.take_longer(told)
        assert (rank.initial, rank.subsequent, rank.out_of_section) == (9, 6, 20)
        assert rank.sections == {"one": 2.0, "two": 8.0}


def test_a_configuration_is_written_and_read(tmp_path):
    """As the `fault_tolerance:` section of a file, which may hold others; types are those of the fields."""
    config = FaultToleranceConfig(rank_heartbeat_timeout=3, rank_section_timeouts={"a": 1, "b": None})
    config.rank_termination_signal, config.log_level = "SIGUSR1", "warn"
    path = tmp_path / "ft.yaml"
    config.to_yaml_file(str(path))
    found = FaultToleranceConfig.from_yaml_file(str(path))
    assert found == config
    assert (found.rank_termination_signal, found.log_level) == (signal.SIGUSR1, logging.WARNING)
    assert (found.initial_rank_heartbeat_timeout, found.safety_factor) == (3600, 5)
    assert dataclasses.asdict(found)["rank_section_timeouts"] == {"a": 1, "b": None}
    path.write_text("a: 1")
    with pytest.raises(ValueError, match="no `fault_tolerance:`"):
        FaultToleranceConfig.from_yaml_file(str(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank_heartbeat_timeout", "soon"),
        ("rank_section_timeouts", "a:later"),
        ("safety_factor", 0.5),
        ("rank_termination_signal", "SIGNONE"),
        ("log_level", "LOUD"),
        ("log_level", 7),
    ],
)
def test_a_value_that_cannot_be_read_is_an_error(field, value):
    """In place of a default that nobody wanted."""
    with pytest.raises(ValueError, match=r"expected|no signal"):
        FaultToleranceConfig.from_kwargs(**{field: value})


def test_unknown_names_are_ignored_or_refused():
    """As the caller wants it."""
    assert FaultToleranceConfig.from_kwargs(nothing=1) == FaultToleranceConfig()
    with pytest.raises(ValueError, match="nothing"):
        FaultToleranceConfig.from_kwargs(ignore_not_recognized=False, nothing=1)


def test_values_of_a_command_line_are_text():
    """A section without a timeout is known all the same."""
    config = FaultToleranceConfig.from_kwargs(
        rank_section_timeouts="setup:60, step:null", rank_heartbeat_timeout="null"
    )
    assert config.rank_section_timeouts == {"setup": 60, "step": None}
    assert config.rank_heartbeat_timeout is None


def test_timeouts_are_printed_as_people_read_them():
    """In log lines of scripts and callbacks."""
    assert str(HeartbeatTimeouts(1.234, None, True)) == (
        "HeartbeatTimeouts(initial=1.23, subsequent=None, were_calculated=True)"
    )
    text = str(SectionTimeouts({"a": 1.234, "b": None}, 2, {"a"}))
    assert "sections=[a=1.23, b=None], calculated_sections=['a'], out_of_section=2.00, calculated: False" in text
