"""Passes of one rank become windows that are the same on all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.windowing import RankCutter, first_pass

FWD = ("fwd", "compute")


@given(st.lists(st.integers(1, 63), min_size=1, max_size=30), st.sampled_from([1, 2, 8]))
def test_windows_do_not_depend_on_when_somebody_looks(looks, every):
    """However the passes come in portions, window k has the passes 1 + 8k to 8 + 8k; every one, or every other."""
    cutter, start, found = RankCutter(), 0, {}
    for count in looks:
        found.update(cutter.add(FWD, 0, start, list(range(start, start + count)), every))
        start += count
    assert sorted(found) == list(range(0, (start - 1) // 8, every))
    for index, row in found.items():
        assert row == tuple(range(first_pass(index), first_pass(index) + 8))
    assert cutter.passes[FWD] == start


def test_what_was_overwritten_is_missing_and_the_rest_keeps_its_place():
    """A ring that turned over between two looks costs these passes; a window with less than half is left out."""
    cutter = RankCutter()
    assert cutter.add(FWD, 0, 0, [1] * 4) == []  # the first does not count
    assert cutter.add(FWD, 0, 22, [2] * 12) == [(3, (2,) * 8)]  # window 0 has 3 of 8, window 2 has 3
    assert cutter.add(FWD, 0, 38, [3] * 3) == [(4, (2, None, None, None, None, 3, 3, 3))]


def test_of_two_threads_the_first_counts():
    """The same section in another thread is another lane."""
    cutter = RankCutter()
    cutter.add(FWD, 1, 0, [1] * 9)
    assert cutter.add(FWD, 0, 0, [5] * 64) == []
    assert cutter.passes[FWD] == 9
