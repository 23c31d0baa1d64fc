"""How values are written."""

from __future__ import annotations

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.settings import parse


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        (90, 90),
        (1.5, 1.5),
        ("30s", 30),
        ("10min", 600),
        (" 1h30m ", 5400),
        ("2 days", 172800),
        ("250ms", 0.25),
    ],
)
def test_durations_are_numbers_or_have_units(text: object, seconds: float) -> None:
    """Seconds come out, whatever unit went in."""
    assert parse.duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "ten", "10 parsecs", "10min!", "s", True, None, [], "inf", "nan", math.inf, 10**400, "1h-3m"]
)
def test_what_is_no_duration_is_refused(text: object) -> None:
    """No unit is guessed, and nothing is without bound."""
    with pytest.raises(ValueError, match="expected"):
        parse.duration_s(text)


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_a_printed_duration_reads_back(seconds: float) -> None:
    """Python's own spelling of a number of seconds is a duration."""
    assert parse.duration_s(repr(seconds)) == seconds


@pytest.mark.parametrize("text", [None, "null", "none", "learned", ""])
def test_no_deadline_means_learned(text: object) -> None:
    """A timeout can be handed back to learning; it can never be switched off."""
    assert parse.learned_duration(text) is None


@pytest.mark.parametrize("bad", [0, -1, "0", "-5"])
def test_a_deadline_is_above_zero(bad: object) -> None:
    """A deadline of zero would call every step late."""
    with pytest.raises(ValueError, match="expected"):
        parse.learned_duration(bad)


def test_section_timeouts_from_text_and_mapping() -> None:
    """Both spellings mean the same; a section given as null is learned; a name may hold colons."""
    assert parse.section_timeouts("a:10,b:null,io:read:2min") == {"a": 10.0, "io:read": 120.0}
    assert parse.section_timeouts({"a": 10, "b": None}) == {"a": 10.0}
    assert parse.section_timeouts("") == {}


@pytest.mark.parametrize("bad", ["a", "a:", ":10", "a:10,,b:3", {"a": -1}, {3: 4}, ["a"], 7])
def test_bad_section_timeouts_are_refused(bad: object) -> None:
    """Nothing in the list is skipped."""
    if bad == "a:":  # an empty timeout is a null one
        assert parse.section_timeouts(bad) == {}
        return
    with pytest.raises(ValueError, match="expected"):
        parse.section_timeouts(bad)


@pytest.mark.parametrize("text", ["SIGUSR1", "usr1", int(signal.SIGUSR1), str(int(signal.SIGUSR1)), signal.SIGUSR1])
def test_signals_by_name_or_number(text: object) -> None:
    """All spellings of one signal are that signal."""
    assert parse.signal_number(text) == signal.SIGUSR1
    assert parse.signal_name(text) == "SIGUSR1"


def test_real_time_signals_have_names() -> None:
    """A signal between SIGRTMIN and SIGRTMAX is written with an offset, and reads back."""
    number = parse.signal_number("SIGRTMAX-3")
    assert number == signal.SIGRTMAX - 3
    assert parse.signal_name(number) == "SIGRTMAX-3"
    assert parse.signal_number("rtmin+2") == signal.SIGRTMIN + 2


@pytest.mark.parametrize("bad", ["SIGKILL", 9, "STOP", "SIGNOTHING", "SIG_DFL", 0, -1, 4096, None, True, "SIGRTMAX+1"])
def test_signals_that_cannot_be_handled_are_refused(bad: object) -> None:
    """A signal that no handler sees would make the setting a lie."""
    with pytest.raises(ValueError, match="expected"):
        parse.signal_number(bad)


def test_signal_lists() -> None:
    """A list is canonical and without duplicates; none is allowed."""
    assert parse.signal_names("TERM,SIGUSR1,15") == ("SIGTERM", "SIGUSR1")
    assert parse.signal_names(["SIGTERM"]) == ("SIGTERM",)
    assert parse.signal_names("none") == ()


@pytest.mark.parametrize(("text", "value"), [(True, True), ("Yes", True), ("1", True), ("off", False), (0, False)])
def test_switches(text: object, value: bool) -> None:
    """The usual spellings of true and false."""
    assert parse.switch(text) is value


@pytest.mark.parametrize("bad", ["", "maybe", 2, None])
def test_a_switch_is_not_guessed(bad: object) -> None:
    """What is neither true nor false is an error."""
    with pytest.raises(ValueError, match="true or false"):
        parse.switch(bad)


@pytest.mark.parametrize(
    ("given", "value"), [("auto", "auto"), (100, 100), ("100", 100), ("10min", "10min"), ("1H", "1h")]
)
def test_checkpoint_every(given: object, value: object) -> None:
    """Steps, a duration with its unit, or auto."""
    assert parse.checkpoint_every(given) == value


@pytest.mark.parametrize("bad", [0, -1, 1.5, "1.5", "0min", "soon", True, None, "0"])
def test_checkpoint_every_refuses_what_is_ambiguous(bad: object) -> None:
    """1.5 could be steps or seconds."""
    with pytest.raises(ValueError, match="expected"):
        parse.checkpoint_every(bad)


@pytest.mark.parametrize("bad", [True, 1.5, "1.5", "x", None, -1])
def test_whole_numbers_are_whole(bad: object) -> None:
    """A number of restarts is no fraction and no truth value."""
    with pytest.raises(ValueError, match="whole number"):
        parse.whole_number(0)(bad)
