"""The awkward moments: each is found where an undisturbed run comes to it, and told where it does not."""

from __future__ import annotations

import attrs
import pytest
from planted_runs import STEPS, counted_behind, run

from resilience_sdk.faults import Plan
from resilience_sdk.rank.rehearsal import RehearsedRank
from resilience_sdk.rehearse import moments, plan
from resilience_sdk.rehearse.moments import KillMoment, find
from resilience_sdk.rehearse.plan import JobFacts, faults_for, learn

STUCK_S = 4.0


def chosen(kind: str, traces: tuple[RehearsedRank, ...]) -> list[Plan] | str:
    """Return the faults of this moment in a job that saves after 5, 10 and 15 steps."""
    traces = tuple(attrs.evolve(one, saves=(5, 10, 15), weights=()) for one in traces)
    return faults_for(kind, learn(JobFacts((0,), 5.0, (traces,), (), ()), 2), STUCK_S)


def test_a_window_is_open_where_a_step_follows_one_without_an_optimizer() -> None:
    """A loop whose steps are batches, four to each step of the optimizer."""
    traces = tuple(attrs.evolve(one, looks=one.looks[3::4]) for one in run())
    found = [one.step for one in find(traces).in_window]
    assert found == [step for step in range(1, STEPS) if step % 4]
    assert chosen("kill-in-window", traces) == [Plan("kill", "sigkill", rank=1, step=13)]


def test_a_window_within_a_step_is_struck_in_its_passes() -> None:
    """A framework whose step is one of the optimizer, with several passes in it."""
    traces = tuple(attrs.evolve(one, inner="bwd") for one in run())
    assert chosen("kill-in-window", traces) == [Plan("kill", "sigkill", rank=1, step=12, section="bwd")]


def test_an_evaluation_is_struck_on_the_rank_that_makes_it() -> None:
    """The one that is nearest behind the moment at which other kills strike; a first look before any step is none."""
    first = run()
    traces = (attrs.evolve(first[0], evaluations=(("eval", -1), ("eval", 9), ("eval", 14))), first[1])
    assert chosen("kill-in-eval", traces) == [Plan("kill", "sigkill", rank=0, step=14, section="eval")]


def test_an_epoch_ends_where_the_next_step_is_of_another() -> None:
    """By the witnesses, else by the loaders that have come to their end; both name the last step of the epoch."""
    assert [one.step for one in find(run()).at_epoch_end] == [9]
    bare = tuple(
        attrs.evolve(one, looks=tuple(attrs.evolve(look, passes=place // 10) for place, look in enumerate(one.looks)))
        for one in run(has_ring=False)
    )
    assert [one.step for one in find(bare).at_epoch_end] == [9]
    assert [one.step for one in find(tuple(map(counted_behind, bare))).at_epoch_end] == [9]
    assert chosen("kill-at-epoch-end", bare) == [Plan("kill", "sigkill", rank=1, step=9)]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("kill-in-window", "gradients are added up"),
        ("kill-in-eval", "no evaluation is seen"),
        ("kill-at-epoch-end", "no epoch comes to its end"),
    ],
)
def test_a_moment_that_is_not_reached_says_why(kind: str, why: str) -> None:
    """So do those at the last step, behind which nothing could be struck."""
    traces = tuple(attrs.evolve(one, evaluations=(("eval", STEPS - 1),)) for one in run(has_ring=False))
    told = chosen(kind, traces)
    assert isinstance(told, str)
    assert why in told
    assert find(()) == moments.KillMoments()


def test_a_save_is_struck_on_the_rank_that_saves_and_two_attempts_one_after_the_other() -> None:
    """The second at its first step, whatever its number is."""
    assert chosen("kill-in-save", run()) == [Plan("kill", "sigkill", rank=0, step=12, where="save")]
    assert chosen("kill-twice", run()) == [
        Plan("kill", "sigkill", rank=1, step=12),
        Plan("kill", "sigkill", rank=1, attempt=1),
    ]
    assert set(moments.KINDS) <= set(plan.FAULTS)


def test_the_nearest_moment_behind_a_save_is_chosen() -> None:
    """One before it only where there is no other."""
    known = moments.KillMoments(at_epoch_end=(KillMoment(3, 1), KillMoment(11, 1), KillMoment(18, 1)))
    numbers = range(STEPS)
    assert moments.choose("kill-at-epoch-end", known, numbers, 12) == KillMoment(18, 1)
    assert moments.choose("kill-at-epoch-end", known, numbers[:18], 12) == KillMoment(11, 1)
