"""Sections that hold collectives: who waits in them is not slow, and who is slow waits least."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.straggler.windowing import WINDOW_STEPS, SectionWindow

from .cluster import Cluster, slow_rank
from .windows import Fleet, slow, what


class Training:
    """README's loop: a forward of each rank's own, and a backward that ends on all ranks together."""

    def __init__(self, ranks, forward, *, is_joint=True):
        self.fleet = Fleet(ranks)
        self.forward = forward
        self.is_joint = is_joint

    def run(self, windows):
        """Return what is said of so many windows."""
        return [change for _ in range(windows) for change in self.window()]

    def window(self):
        fwd = {rank: [self.forward(rank) for _ in range(WINDOW_STEPS)] for rank in self.fleet.places}
        last = [max(column) for column in zip(*fwd.values(), strict=True)]
        bwd = {rank: [0.005 + at - own for at, own in zip(last, row, strict=True)] for rank, row in fwd.items()}
        return self.fleet.show(
            SectionWindow("fwd", "compute", fwd), SectionWindow("bwd", "compute", bwd, is_joint=self.is_joint)
        )


def spikes(seed):
    """Return forwards of 10 ms of which three in a hundred take thirty times as long, on each rank by itself."""
    chance = random.Random(seed)
    return lambda rank: 0.01 * (30.0 if chance.random() < 0.03 else chance.lognormvariate(0.0, 0.1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_who_waits_for_a_late_rank_is_not_named(ranks):
    """Whoever is late in the forward is named in it; in a hundred windows nobody in the backward."""
    training = Training(ranks, spikes(1))
    changes = training.run(100)
    assert {change.verdict.section for change in changes} <= {"fwd"}


def test_without_being_told_the_waiting_rank_would_be_named():
    """Durations alone do not say which of two sections holds the wait: what the rank has seen does."""
    training = Training(2, spikes(1), is_joint=False)
    assert {change.verdict.section for change in training.run(100)} == {"fwd", "bwd"}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_slow_rank_is_named_in_its_own_work_and_the_waits_confirm_it(ranks):
    """Its backward is the shortest, since nobody is waited for in it."""
    chance = random.Random(2)
    training = Training(ranks, lambda rank: chance.lognormvariate(0.0, 0.05) * (0.03 if rank == 1 else 0.01))
    assert what(training.run(12)) == [("found", "transient", (1,)), ("still", "persistent", (1,))]
    (verdict,) = training.fleet.judge.verdicts
    assert (verdict.section, verdict.waits_least) == ("fwd", True)


def test_what_was_said_before_it_is_known_is_taken_back():
    """A section may begin to hold collectives: then the verdict is over, and no other comes."""
    fleet = Fleet(4)
    durations = slow(1, by=3.0)
    assert what(fleet.run(3, durations)) == [("found", "transient", (1,))]
    joint = [fleet.show(SectionWindow("fwd", "compute", fleet.durations(durations), is_joint=True)) for _ in range(10)]
    assert what(joint[0]) == [("over", "transient", (1,))]
    assert not any(joint[1:])
    assert fleet.run(3, durations) == []  # it stays known, whatever a late window says


def test_everybody_slower_is_still_a_regression():
    """Of a section that holds collectives the shortest is judged: nobody waits in that."""
    fleet = Fleet(4)
    changes = []
    for window in range(40):
        factor = 1.5 if window >= 20 else 1.0
        durations = fleet.durations(lambda rank, step, factor=factor: factor)
        changes += fleet.show(SectionWindow("bwd", "compute", durations, is_joint=True))
    assert what(changes) == [("found", "global", ())]
    assert changes[0].verdict.section_kind == "compute"


@given(st.integers(2, 8), st.integers(0, 2**32), st.floats(0.0, 2.0))
@settings(max_examples=40, deadline=None)
def test_no_heavy_tail_makes_a_waiting_rank_slow(ranks, seed, sigma):
    """However the forwards are distributed, and whoever is slower in them."""
    chance = random.Random(seed)
    factors = [chance.uniform(0.5, 3.0) for _ in range(ranks)]
    training = Training(ranks, lambda rank: 0.01 * factors[rank] * chance.lognormvariate(0.0, sigma))
    named = {change.verdict.section for change in training.run(20) if change.verdict.ranks}
    assert named <= {"fwd"}


def test_it_goes_from_the_node_that_has_seen_it_to_the_one_that_judges():
    """And the section has no scores any more, by which a waiting rank would be listed as slow."""
    cluster = Cluster(2, slow=slow_rank(2, "bwd"))
    cluster.joint = {"bwd"}
    assert cluster.run(80) == []
    report = cluster.aggregate.report(0.7, 0.7)
    assert set(report.section_relative) == {"fwd"}
    assert not report.names_somebody


def test_scores_of_a_section_that_turns_out_to_be_joint_are_dropped():
    """Also those since the last report."""
    cluster = Cluster(slow=slow_rank(2, "bwd"))
    cluster.run(40)
    cluster.joint = {"bwd"}
    cluster.run(40)
    assert not cluster.aggregate.verdicts
    assert set(cluster.aggregate.report(0.7, 0.7).section_relative) == {"fwd"}


def test_its_time_on_the_device_is_joint_too():
    """There the wait is for the kernels of the collective."""
    cluster = Cluster(
        sections={"fwd": ("compute", 1), "bwd": ("compute", 1)}, slow=lambda r, s, step: 0.05 if r == 1 else 0.0
    )
    collector = cluster.collectors[0]
    cluster.joint = {"bwd"}
    cluster.run(8)
    for rank in range(4):
        collector.add(rank, "bwd", "gpu", 0, 0, [10_000_000 * (1 + 4 * (rank == 1))] * 32)
        collector.add(rank, "fwd", "gpu", 0, 0, [10_000_000] * 32)
    pieces = [piece for piece in collector.take(0, 100.0) if piece.kind == "gpu"]
    assert {(piece.name, piece.is_joint) for piece in pieces} == {("bwd", True), ("fwd", False)}
