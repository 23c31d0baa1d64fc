"""Curves and heat maps from the rows of a journal: thinned, with what stands out still in them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.report.digest import LossRows, ProgressRows
from resilience_sdk.report.heat import heat_map
from resilience_sdk.report.series import CurvePoint, loss_curves, step_time_curves, thinned


def progress(at: float, ranks: list[int], own_ms: list[float | None], **more: Any) -> dict[str, Any]:
    """Return the event of a node."""
    told = {"wall_s": 10.0, "mean_ms": 100.0, "longest_ms": 120.0, "host": f"n{ranks[0]}", "step": int(at)}
    return {"event": "progress", "t": at, "ranks": ranks, "own_ms": own_ms, **told, **more}


_ROW = progress(10.0, [0, 1], [1.0, 2.0])


def rows_of(*events: dict[str, Any]) -> ProgressRows:
    """Return the rows of events that can be understood."""
    rows = ProgressRows()
    assert all([rows.add(event) for event in events])
    return rows


_POINTS = st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6), st.integers(0, 5)), max_size=300)


@given(_POINTS, st.integers(1, 50))
@settings(max_examples=80, deadline=None)
def test_thinning_keeps_the_extremes_and_the_order(told: list[tuple[float, float, int]], most: int) -> None:
    """Whatever the points are, and however few may be left."""
    ordered = sorted(told, key=lambda one: (one[2], one[0]))
    points = [CurvePoint(attempt * 2e6 + at, 0, value, value, value, attempt) for at, value, attempt in ordered]
    kept = thinned(points, most)
    assert len(kept) <= max(most, 0 if not points else 1)
    assert [one.at for one in kept] == sorted(one.at for one in kept)
    if points:
        assert min(one.low for one in kept) == min(one.value for one in points)
        assert max(one.high for one in kept) == max(one.value for one in points)
        assert sum(one.weight for one in kept) == len(points)


def test_a_spike_of_one_point_in_a_hundred_thousand_stays() -> None:
    """In the band of the point that it became part of."""
    points = [CurvePoint(float(at), at, 1.0, 1.0, 9.0 if at == 77_777 else 1.0) for at in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= 400
    (spike,) = [one for one in kept if one.high == 9.0]
    assert abs(spike.at - 77_777) <= 300


def test_nodes_that_tell_at_about_the_same_time_are_one_point() -> None:
    """With the least and the most of them as its band, also where one of them misses a turn."""
    events = [progress(at + node, [node], [50.0], mean_ms=100.0 + 50 * node) for at in (10, 20, 30) for node in (0, 1)]
    mean, longest = step_time_curves(rows_of(*events[:-1]), [0.0])
    assert mean.values == pytest.approx((0.125, 0.125, 0.1))
    assert (mean.low[0], mean.high[0]) == (pytest.approx(0.1), pytest.approx(0.15))
    assert longest.values[0] == pytest.approx(0.15)  # a step that took longer than the longest that was told


def test_a_hang_is_a_gap_and_no_time_of_a_step() -> None:
    """A line climbed through the hang to what was told of the step that hung; the next one begins behind it."""
    before = [progress(at, [0], [50.0], wall_s=1.0) for at in (10.0, 11.0, 12.0)]
    hung = progress(75.0, [0], [0.0], wall_s=62.0, mean_ms=62_000.0, longest_ms=62_000.0, steps=1)
    after = [progress(at, [0], [50.0], wall_s=1.0) for at in (77.0, 78.0)]
    for hangs in ([(13.0, 74.0)], [(13.0, 75.5)]):  # the last words of a node come about as its ranks are ended
        mean, longest = step_time_curves(rows_of(*before, hung, *after), [0.0], hangs)
        assert [value is None for value in mean.values] == [False] * 3 + [True] + [False] * 2
        assert max(value for value in longest.values if value is not None) == pytest.approx(0.12)


def test_a_long_step_beside_a_hang_stays() -> None:
    """A spike that is no hang is the job's own, whatever happened an hour before."""
    slow = progress(200.0, [0], [50.0], wall_s=60.0, mean_ms=60_000.0, longest_ms=60_000.0, steps=1)
    mean, _ = step_time_curves(rows_of(progress(10.0, [0], [50.0]), slow), [0.0], [(20.0, 80.0)])
    assert [value for value in mean.values if value is not None] == pytest.approx([0.1, 60.0])


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": [[1]]}, {"ranks": []}, {"ranks": [0, 0]}, {"ranks": [-1, 0]}, {"ranks": "01"}, {"wall_s": None},
        {"mean_ms": math.nan}, {"mean_ms": 0}, {"wall_s": -1}, {"mean_ms": 10**400}, {"ranks": [True, 0]},
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_understood_is_none(change: dict[str, Any]) -> None:
    """And leaves nothing behind."""
    rows = ProgressRows()
    assert not rows.add({**_ROW, **change})
    assert (len(rows), len(rows.own_ms), rows.node_of) == (0, 0, {})


@pytest.mark.parametrize("own", [None, [1.0], ["1", "2"], [math.nan, math.inf], [-1.0, -2.0], [[], {}]])
def test_times_that_cannot_be_understood_are_not_told(own: Any) -> None:
    """The rest of the row counts; no rank has told of a section, so whole steps are compared."""
    rows = rows_of(progress(10.0, [0, 1], own), progress(10.0, [2, 3], own, mean_ms=300.0))
    found = heat_map(rows)
    assert found is not None
    assert (found.measure, found.cells) == ("step", ((0.5,), (0.5,), (1.5,), (1.5,)))


def test_a_large_run_has_groups_that_begin_with_nodes_and_its_worst_ranks() -> None:
    """The cell of a group is that of its slowest rank, who is named."""
    events = []
    for node in range(100):
        ranks = list(range(8 * node, 8 * node + 8))
        for at in (10.0, 20.0):
            own = [300.0 if (rank, at) == (17, 20.0) else 100.0 for rank in ranks]
            events.append(progress(at, ranks, own))
    found = heat_map(rows_of(*events))
    assert found is not None
    assert (found.rows[:3], found.rows[-1], len(found.rows)) == (((0, 7), (8, 15), (16, 23)), (792, 799), 100)
    assert (found.cells[2], found.slowest[2][1], found.nodes[2]) == ((1.0, 3.0), 17, "n16")
    assert found.worst[0] == (17, "n16", 2.0, (1.0, 3.0))
    assert len(found.worst) == 20


def test_a_row_counts_where_its_time_lies() -> None:
    """One of a minute fills six columns of ten seconds; nobody told anything in the others."""
    early = [progress(at, [rank], [100.0]) for at in (10.0, 20.0, 30.0) for rank in (0, 1)]
    late = [progress(120.0, [rank], [100.0 + 100 * rank], wall_s=60.0) for rank in (0, 1)]
    found = heat_map(rows_of(*early, *late), columns=12)
    assert found is not None
    assert len(found.times) == 5  # as many columns as were told
    assert found.cells[0] == (1.0, None, pytest.approx(2 / 3, abs=1e-4), pytest.approx(2 / 3, abs=1e-4))


def test_one_rank_has_nobody_beside_it() -> None:
    """So there is no map; nor is there one of nothing."""
    assert heat_map(rows_of(progress(10.0, [0], [1.0]))) is None
    assert heat_map(ProgressRows()) is None


def test_logged_losses_are_curves_of_their_own() -> None:
    """What a program logs is not what a rank checks; what is no number is told apart."""
    losses, logged = LossRows(), LossRows()
    losses.add({"t": 1.0, "step": 5}, {"loss": 2.0, "grad_norm": "nan"})
    logged.add({"t": 2.0, "step": None}, {"train_loss": 3, "lr": 1e-3})
    logged.add({"t": 3.0}, {"lr": 1e-3})
    names = [(curve.name, curve.values, curve.not_finite) for curve in loss_curves(losses, logged, [])]
    assert names == [("loss", (2.0,), ()), ("grad norm", (), ((1.0, 5, "nan"),)), ("loss, logged", (3.0,), ())]
