"""What an attempt left behind tells about its progress."""

import types

import pytest

from resilience_sdk.launcher.evidence import asked, completed_a_step


def page(beats=0, declared=False, source="none"):
    """As much of a page as progress is told from."""
    return types.SimpleNamespace(beats=beats, declared=declared, beat_source=source)


@pytest.mark.parametrize(
    ("pages", "lasted_s", "told"),
    [
        ([page(), page(beats=1)], 1.0, True),
        ([page(declared=True)], 1.0, False),
        ([page(declared=True)], 3600.0, False),
        ([page(source="optimizer")], 3600.0, False),
        # Killed before its first beat, or left in argparse: no sign yet, and no time to have trained.
        ([page()], 5.0, False),
        ([None], 5.0, False),
        ([], 5.0, False),
        # A script that never gives a sign may have trained for this long.
        ([page()], 61.0, None),
        ([None], 61.0, None),
        # Nobody watched.
        ([None], None, None),
    ],
)
def test_silence_is_told_from_a_start_that_failed(pages, lasted_s, told):
    """Without any sign of progress, the time that the attempt lasted decides whether that means anything."""
    assert completed_a_step(pages, lasted_s) is told


@pytest.mark.parametrize(
    ("notice", "told"),
    [
        ({"source": "rank 1: SIGTERM", "time_left_s": 60.0}, "rank 1: SIGTERM"),
        ({"source": "aws spot", "reason": "terminate at 12:00"}, "aws spot: terminate at 12:00"),
        (
            {"source": "preempt", "reason": "kernel update", "by": "root@head"},
            "preempt: kernel update (asked by root@head)",
        ),
    ],
)
def test_an_incident_says_who_asked_and_why(notice, told):
    """As far as the event of the notice knows."""
    assert asked(notice) == told
