"""Time out of any section, as polls of a page show it."""

from __future__ import annotations

from resilience_sdk.hang.timeouts import GapWatch


def test_a_gap_seen_from_both_sides_is_exact(make):
    """Nothing open since t; at the next poll a block that was entered 2 s ago is open."""
    watch = GapWatch()
    assert watch.look(make.snapshot(0, idle=5), make.now) == []
    after = make.snapshot(0, (make.beat(2),), idle=5)
    assert watch.look(after, make.now + 10**9) == [3.0]
    assert watch.look(after, make.now + 2 * 10**9) == []


def test_a_gap_whose_end_was_missed_counts_as_far_as_it_was_seen(make):
    """The block after it is over already at the next poll."""
    watch = GapWatch()
    watch.look(make.snapshot(0, idle=5), make.now)
    assert watch.look(make.snapshot(0, idle=1), make.now) == [5.0]


def test_start_up_pauses_and_the_end_do_not_count(make):
    """They have rules of their own."""
    watch = GapWatch()
    for other in ({"beats": 0}, {"done": True}, {"paused": "why"}):
        watch.look(make.snapshot(0, idle=5), make.now)
        assert watch.look(make.snapshot(0, idle=5, **other), make.now) == []
        assert watch.look(make.snapshot(0, (make.beat(2),), idle=5), make.now) == []
