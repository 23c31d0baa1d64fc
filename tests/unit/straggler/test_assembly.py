"""Who is late is waited for, but not for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.window_messages import PATIENCE, Assembly

FWD = ("fwd", "compute")


def offer(assembly, member, *indices, section=FWD):
    for index in indices:
        assembly.offer(member, section, index, f"{member}.{index}")


def taken(assembly):
    return [(index, sorted(parts)) for _, index, parts in assembly.take()]


def test_a_window_is_complete_when_all_have_it():
    """Not before, and each one once."""
    assembly = Assembly([0, 1])
    offer(assembly, 0, 0, 1)
    assert taken(assembly) == []
    offer(assembly, 1, 0)
    assert taken(assembly) == [(0, [0, 1])]
    offer(assembly, 1, 0, 1)
    assert taken(assembly) == [(1, [0, 1])]


def test_one_that_never_reports_delays_the_first_windows_only():
    """After that nobody waits for it, and when it comes at last it takes part."""
    assembly = Assembly([0, 1, 2])
    for index in range(PATIENCE + 1):
        assert taken(assembly) == []
        offer(assembly, 0, index)
        offer(assembly, 1, index)
    assert taken(assembly) == [(index, [0, 1]) for index in range(PATIENCE + 1)]
    offer(assembly, 0, 4)
    offer(assembly, 1, 4)
    assert taken(assembly) == [(4, [0, 1])]
    offer(assembly, 2, 3, 5)
    offer(assembly, 0, 5)
    offer(assembly, 1, 5)
    assert taken(assembly) == [(5, [0, 1, 2])]


def test_who_skips_a_window_does_not_hold_it_up():
    """A rank whose ring turned over has passed it."""
    assembly = Assembly([0, 1])
    offer(assembly, 0, 0, 1, 2)
    offer(assembly, 1, 2)
    assert taken(assembly) == [(0, [0]), (1, [0]), (2, [0, 1])]


def test_who_begins_anew_is_counted_from_where_the_others_are():
    """On a node, a restarted rank begins at 0 again; its windows are those that the others have now."""
    assembly = Assembly([0, 1], realign=True)
    for index in range(5):
        offer(assembly, 0, index)
        offer(assembly, 1, index)
        assert taken(assembly) == [(index, [0, 1])]
    assembly.forget(1)
    assembly.expect(1)
    for index in range(5, 8):
        offer(assembly, 1, index - 5)
        offer(assembly, 0, index)
        assert taken(assembly) == [(index, [0, 1])]


@given(st.data())
def test_every_window_comes_once_in_order_and_nobody_is_lost_who_keeps_pace(data):
    """Whatever order the ranks report in, as long as none is more than two windows behind."""
    members, windows = data.draw(st.integers(1, 5)), 12
    assembly, reached, seen = Assembly(range(members)), [0] * members, []
    while min(reached) < windows:
        able = [m for m in range(members) if reached[m] < windows and reached[m] - min(reached) < PATIENCE]
        member = data.draw(st.sampled_from(able))
        offer(assembly, member, reached[member])
        reached[member] += 1
        seen += taken(assembly)
    assert seen == [(index, list(range(members))) for index in range(windows)]
