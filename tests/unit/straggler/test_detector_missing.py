"""The judge where ranks and sections come late, go, move, or tell nonsense."""

from __future__ import annotations

import math

import pytest

from resilience_sdk.straggler.windowing import RankPlace, SectionWindow

from .windows import Fleet, slow, what


def test_a_rank_that_never_reports_and_one_that_stops_leave_the_rest_right():
    """Also where a section is missing on one rank, or single passes are."""
    fleet = Fleet(8)
    for window in range(14):
        durations = fleet.durations(slow(5, by=1.3, since=64))
        del durations[2]
        if window > 9:
            del durations[7]
        durations[4][window % 8] = math.nan
        durations[6][6:] = [math.nan] * 2
        fleet.show(SectionWindow("fwd", "compute", durations), SectionWindow("eval", "compute", {0: [0.001] * 8}))
    assert {change.verdict.ranks for change in fleet.changes} == {(5,)}


def test_durations_may_be_missing():
    """Single ones, all of a rank, and nothing but zeros."""
    fleet = Fleet(8)
    for _ in range(10):
        durations = fleet.durations(slow(5, by=1.3))
        durations[0] = [math.nan] * 6 + [0.01] * 2
        durations[1] = [math.nan] * 8
        durations[2] = [0.0] * 8
        fleet.show(SectionWindow("fwd", "compute", durations), SectionWindow("none", "compute", {}))
    assert {change.verdict.ranks for change in fleet.changes} == {(5,)}


def test_a_rank_that_vanishes_ends_its_verdict():
    """What is not seen is not slow."""
    fleet = Fleet(8)
    fleet.run(8, slow(5, by=1.3))
    del fleet.places[5]
    assert what(fleet.run(4)) == [("over", "persistent", (5,))]


def test_a_section_that_nobody_reports_any_more_ends_its_verdict():
    """Nothing is left to be slow in; a window in which the section does not come says nothing about it."""
    fleet = Fleet(8)
    fleet.run(8, slow(5, by=1.3))
    for _ in range(4):
        fleet.show(SectionWindow("optim", "compute", fleet.durations()))
    assert len(fleet.judge.verdicts) == 1
    for _ in range(3):
        fleet.show(SectionWindow("fwd", "compute", {}))
    assert fleet.judge.verdicts == ()


def test_sections_may_come_in_windows_of_their_own():
    """The waits of the last one count, and the step as a whole is not judged beside sections."""
    fleet = Fleet(8)
    fleet.show(SectionWindow("comm_wait", "comm", {rank: [0.02] * 8 for rank in range(8)} | {2: [0.001] * 8}))
    for _ in range(20):
        fleet.show(SectionWindow("fwd", "compute", fleet.durations(slow(2, by=2.0))), step_time_s=0.05)
    for factor in [1.0] * 12 + [2.0] * 12:
        fleet.show(SectionWindow("step", "heartbeat", {rank: [0.05 * factor] * 8 for rank in range(8)}))
    (verdict,) = fleet.judge.verdicts
    assert (verdict.ranks, verdict.waits_least) == ((2,), True)
    assert verdict.share == pytest.approx(0.2, abs=0.02)


def test_a_job_without_sections_still_has_its_steps():
    """A global regression of the heartbeat, and nobody named."""
    fleet = Fleet(4)
    fleet.run(20, kind="heartbeat")
    assert what(fleet.run(6, slow(*range(4), by=1.5), kind="heartbeat")) == [("found", "global", ())]


def test_a_rank_that_moves_begins_anew():
    """Its history on the old node says nothing."""
    fleet = Fleet(8)
    fleet.run(1, slow(5, by=2.0))
    fleet.judge.place(5, RankPlace("elsewhere"))
    assert fleet.run(1, slow(5, by=2.0)) == []
    assert what(fleet.run(1, slow(5, by=2.0))) == [("found", "transient", (5,))]
    assert fleet.judge.verdicts[0].nodes == ("elsewhere",)


def test_a_rank_that_nobody_announced_is_judged():
    """It joins as it is seen."""
    fleet = Fleet(8)
    fleet.places[8] = RankPlace("late")
    fleet.run(3)
    assert what(fleet.run(3, slow(8, by=2.0))) == [("found", "transient", (8,))]
