"""How values are written: all spellings of one value are that value, and nothing is guessed."""

from __future__ import annotations

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.settings import parse

USR1 = int(signal.SIGUSR1)
LEAVING = ("SIGTERM", "SIGUSR1")


@pytest.mark.parametrize(
    ("read", "given", "value"),
    [
        *((parse.duration_s, text, 90) for text in ("90", 90, 90.0, "90s", "1m30s", " 1.5 min ")),
        *((parse.duration_s, text, s) for text, s in (("2 days", 172800), ("1h30m", 5400), ("250ms", 0.25))),
        # A timeout can be handed back to learning; it can never be switched off.
        *((parse.learned_duration, text, None) for text in (None, "null", "none", "learned", "")),
        (parse.section_timeouts, "a:10,b:null,io:read:2min", {"a": 10.0, "io:read": 120.0}),
        *((parse.section_timeouts, written, {"a": 10.0}) for written in ({"a": 10, "b": None}, "a:10,b:")),
        *((parse.section_timeouts, nothing, {}) for nothing in ("", None)),
        *((parse.signal_number, text, USR1) for text in ("SIGUSR1", "usr1", USR1, str(USR1), signal.SIGUSR1)),
        (parse.signal_number, "rtmin+2", signal.SIGRTMIN + 2),
        (parse.signal_name, "usr1", "SIGUSR1"),
        (parse.signal_name, signal.SIGRTMAX - 3, "SIGRTMAX-3"),
        *((parse.signal_names, written, LEAVING) for written in ("TERM,SIGUSR1,15", ["SIGTERM", USR1])),
        (parse.signal_names, USR1, ("SIGUSR1",)),
        (parse.signal_names, "none", ()),
        *((parse.switch, written, True) for written in (True, "Yes", "1")),
        *((parse.switch, written, False) for written in ("off", 0)),
        *((parse.checkpoint_every, written, 100) for written in (100, "100")),
        *((parse.checkpoint_every, text, text.lower()) for text in ("auto", "10min", "1H")),
    ],
)
def test_a_value_may_be_spelt_in_several_ways(read, given, value) -> None:
    """As a number, as text with a unit or a name, as what YAML makes of it."""
    assert read(given) == value


@pytest.mark.parametrize(
    ("read", "bad"),
    [
        *((parse.duration_s, text) for text in ("", "ten", "10 parsecs", "10min!", "s", "1h-3m", "inf", "nan")),
        *((parse.duration_s, value) for value in (True, None, [], math.inf, 10**400)),
        # A deadline of zero would call every step late.
        *((parse.learned_duration, value) for value in (0, -1, "0", "-5")),
        *((parse.section_timeouts, bad) for bad in ("a", ":10", "a:10,,b:3", {"a": -1}, {3: 4}, ["a"], 7)),
        # A signal that no handler sees would make the setting a lie.
        *((parse.signal_number, bad) for bad in ("SIGKILL", 9, "STOP", "SIGNOTHING", "SIG_DFL", "SIGRTMAX+1")),
        *((parse.signal_number, bad) for bad in (0, -1, 4096, None, True)),
        *((parse.switch, bad) for bad in ("", "maybe", 2, None)),
        # 1.5 could be steps or seconds.
        *((parse.checkpoint_every, bad) for bad in (0, -1, 1.5, "1.5", "0min", "soon", True, None, "0")),
        *((parse.whole_number(0), bad) for bad in (True, 1.5, "1.5", "x", None, -1)),
    ],
)
def test_what_is_ambiguous_or_has_no_bound_is_refused(read, bad) -> None:
    """No unit is guessed, nothing in a list is skipped."""
    with pytest.raises(ValueError, match="expected"):
        read(bad)


@given(st.floats(min_value=0, max_value=1e9, allow_nan=False))
def test_a_printed_duration_reads_back(seconds: float) -> None:
    """Python's own spelling of a number of seconds is a duration."""
    assert parse.duration_s(repr(seconds)) == seconds
