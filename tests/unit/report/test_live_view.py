"""The order in which ranks are shown, how far they are behind, and how many there are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from views import ROWS, VIEWS, row, view

from resilience_sdk.report import live_view
from resilience_sdk.report.live_view import SORTS, in_order, with_lags, with_rows


def test_the_worst_come_first() -> None:
    """Who stands still, then who nears its deadline, who is slow, who waits, who is behind, and who is through."""
    rows = [
        row(0),
        row(1, activity="waits", age_s=40.0, deadline_s=300.0),
        row(2, activity="stopped", age_s=40.0, deadline_s=60.0),
        row(3, activity="busy", age_s=20.0),
        row(4, is_slow=True, score=0.7),
        row(5, lag=9),
        row(6, activity="done"),
        row(7, activity="gone", age_s=None, deadline_s=None),
        row(8, score=0.9),
    ]
    assert [one.rank for one in in_order(rows, "worst")] == [2, 7, 3, 4, 1, 5, 8, 0, 6]
    assert [one.rank for one in in_order(rows, "rank")] == list(range(9))
    assert in_order(rows, "lag")[0].rank == 5
    assert in_order(rows, "score")[0].rank == 4


def test_healthy_ranks_keep_their_places() -> None:
    """A rank that was read a moment before another is not behind it: rows do not dance from second to second."""
    rows = with_lags([row(0, step=100), row(1, step=99), row(2, step=100)], 5.0)
    assert [one.rank for one in in_order(rows, "worst")] == [0, 1, 2]
    assert [one.shown_lag for one in rows] == [0, 0, 0]
    assert with_lags([row(0), row(1, step=99, activity="stopped")], 5.0)[1].shown_lag == 1


def test_lags_compare_what_can_be_compared() -> None:
    """Who was told some seconds ago is granted what the others did since; an event of long ago is no place at all."""
    told = row(1, step=80, seen=live_view.NODE, seen_s=2.0)
    old = row(2, step=3, seen=live_view.JOURNAL)
    assert [one.lag for one in with_lags([row(0), told, old], 5.0)] == [0, 9, None]
    mixed = [row(0), row(1, step=7, step_is_global=False)]
    assert [one.lag for one in with_lags(mixed, 5.0)] == [None, None]


@pytest.mark.parametrize("sort", SORTS)
def test_twenty_of_many_ranks(sort: str) -> None:
    """However many there are; what the others do is counted."""
    ranks = [row(rank) for rank in range(4095)]
    seen = view([*ranks, row(4095, activity="stuck", age_s=50.0)], sort, world_size=4100)
    assert len(seen.rows) == 20
    assert (seen.ranks, seen.unseen, seen.activities) == (4096, 4, {"runs": 4095, "stuck": 1})
    if sort == "worst":
        assert seen.rows[0].rank == 4095
    last = with_rows(seen, ranks, sort, first=1 << 30)
    assert (last.first, len(last.rows)) == (4075, 20)


@given(VIEWS, st.lists(ROWS, max_size=40, unique_by=lambda row: row.rank), st.sampled_from(SORTS), st.integers(-3, 99))
def test_any_ranks_make_a_view(bare: live_view.LiveView, rows: list[live_view.RankRow], sort: str, first: int) -> None:
    """Whatever they do, all are counted, each is there once, and the worst are there."""
    seen = with_rows(bare, with_lags(rows, 1.0), sort, first)
    assert seen.ranks == len(rows) == sum(seen.activities.values())
    assert len({one.rank for one in seen.rows}) == len(seen.rows) == min(20, len(rows))
    if first <= 0 and rows and sort == "worst":
        assert seen.rows[0].trouble == min(one.trouble for one in rows)
    assert len(json.loads(json.dumps(seen.to_json(), default=str))["rows"]) == len(seen.rows)
