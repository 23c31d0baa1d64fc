"""Starts of open blocks after a pause: in order, not in the future, and on the same side of completed heartbeats."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.recorder.recorder import is_inside, moved_by_pause

_NOW = 1_000


@st.composite
def _timelines(draw):
    """Starts, the length of a pause that ends now, and completed passes, all before now."""
    passes = draw(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)).map(sorted).map(tuple), max_size=3))
    return draw(st.sets(st.integers(0, 900), max_size=6)), draw(st.integers(0, 900)), passes


@given(_timelines())
def test_a_pause_keeps_the_stack(timeline):
    """What was open outside all passes is outside and later, in the same order; what was left behind stays."""
    starts, pause, passes = timeline
    moved = moved_by_pause(starts, pause, _NOW, passes)
    assert moved.keys() == starts
    open_before = sorted(start for start in starts if not is_inside(start, passes))
    after = [moved[start] for start in open_before]
    assert after == sorted(after)
    assert all(one < next_one or one == _NOW for one, next_one in pairwise(after))
    assert all(start <= moved[start] <= _NOW for start in starts)
    assert not any(is_inside(start, passes) for start in after)
    assert all(moved[start] == start for start in starts - set(open_before))


def test_a_pause_is_left_out():
    """With nothing in the way, each start is later by the whole pause, and by no more than up to now."""
    assert moved_by_pause([100, 300], 50, _NOW, [(10, 20)]) == {100: 150, 300: 350}
    assert moved_by_pause([980], 50, _NOW, []) == {980: _NOW}
