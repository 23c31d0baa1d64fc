"""The stop without a monitor: whatever the order in which ranks come to their checks, they stop at the same one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.preemption.agreement import StopDecision
from resilience_sdk.preemption.reasons import Hindrance
from resilience_sdk.preemption.reduce import Reduction, agreed, contribution, next_every

PATIENCE_S = 30.0


class Wire:
    """What a network does: brings the contributions of all ranks together, and keeps what is written once."""

    def __init__(self, size):
        self.size = size
        self.brought = {}
        self.decisions = {}
        self.broken = False

    def merged(self, number):
        """Return the maxima of an all_reduce that all ranks have begun, else None."""
        rows = self.brought.get(number, {})
        return [max(column) for column in zip(*rows.values(), strict=True)] if len(rows) == self.size else None


class End:
    """One rank's end of it."""

    def __init__(self, wire, rank):
        self.wire, self.rank, self.number = wire, rank, 0

    def begin(self, values):
        self.number += 1
        self.wire.brought.setdefault(self.number, {})[self.rank] = values

    def result(self, patience_s):
        if self.wire.broken:
            raise RuntimeError("connection closed by peer\nand a trace")
        return self.wire.merged(self.number)

    def decide(self, number, wanted):
        assert number == self.number
        return self.wire.decisions.setdefault(number, wanted)

    def silent_ranks(self):
        return [rank for rank in range(self.wire.size) if rank not in self.wire.brought.get(1, {})]


class Rank:
    """One rank, which checks and goes on."""

    def __init__(self, wire, number, clock):
        self.said = []
        self.count = 0
        self.stopped_at = None
        self.asked = False
        self.reduction = Reduction(
            lambda: End(wire, number), is_alone=False, patience_s=PATIENCE_S, clock=clock, give_up=self.give_up
        )

    def give_up(self, why, hindrance, ranks):
        self.said.append(why)
        self.hindrance, self.named = hindrance, list(ranks)

    def check(self):
        self.count += 1
        if self.reduction.stops(self.count, self.asked, lambda: 20.0):
            self.stopped_at = self.count


def job(size):
    """Return some ranks and the clock's hands."""
    hands = [0.0]
    wire = Wire(size)
    return [Rank(wire, number, lambda: hands[0]) for number in range(size)], hands, wire


@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(2, 4),
    apart=st.integers(1, 4),
    asks=st.integers(0, 60),
    who=st.integers(0, 3),
    turns=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.001, 0.1, 2.0])), max_size=150),
)
def test_all_ranks_stop_at_one_check_or_none_does(size, apart, asks, who, turns):
    """Ranks wait for one another every `apart` checks, as in training; a rank that comes too late may void the stop."""
    ranks, hands, _ = job(size)
    # At the end everybody goes on in turn.
    everybody = [(number, 0.1) for _ in range(100) for number in range(size)]
    for turn, (number, seconds) in enumerate(turns + everybody):
        if turn >= asks:
            ranks[who % size].asked = True
        rank = ranks[number % size]
        hands[0] += seconds
        behind = (
            min(other.count for other in ranks if other.stopped_at is None)
            if any(other.stopped_at is None for other in ranks)
            else rank.count
        )
        if rank.stopped_at is None and rank.count // apart * apart <= behind:
            rank.check()
    stops = {rank.stopped_at for rank in ranks}
    assert len(stops) == 1, stops
    given_up = [rank for rank in ranks if rank.said]
    assert (stops == {None}) == bool(given_up)
    assert all(len(rank.said) <= 1 for rank in ranks)


def test_ranks_that_go_in_step_stop_within_two_seconds_with_the_time_that_is_left():
    """About one all_reduce per second of checks; the deadline of the rank that was told is everybody's."""
    ranks, hands, wire = job(3)
    for _ in range(2000):
        hands[0] += 0.01
        for rank in ranks:
            rank.check()
    assert 20 < len(wire.brought) < 35  # in 20 s, and some at the start
    ranks[1].asked = True
    asked_at, asked_s = ranks[1].count, hands[0]
    while ranks[0].stopped_at is None:
        hands[0] += 0.01
        for rank in ranks:
            rank.check()
    assert {rank.stopped_at for rank in ranks} == {ranks[0].count}
    assert ranks[0].count - asked_at <= 200
    assert all(asked_s < rank.reduction.ends_at - 18 <= hands[0] + 2 for rank in ranks)
    assert not any(rank.said for rank in ranks)


def test_a_rank_that_never_comes_is_named_and_nobody_waits_for_it_again():
    """One wait, one line, and then the checks cost nothing."""
    ranks, _, wire = job(3)
    for _ in range(10):
        ranks[0].check()
        ranks[2].check()
    assert (
        ranks[0].said
        == ranks[2].said
        == ["rank 1 never called preemption.check(); call it on every rank, once per step"]
    )
    assert (ranks[0].hindrance, ranks[0].named) == (Hindrance.NO_CHECK, [1])
    assert list(wire.brought) == [1]
    ranks[0].asked = True
    ranks[0].check()
    assert ranks[0].stopped_at is None


def test_a_rank_that_comes_too_late_obeys_what_the_others_have_decided():
    """They have waited in vain and gone on; its own all_reduce is complete and says stop, but it must not."""
    ranks, _, wire = job(2)
    ranks[0].asked = True
    ranks[0].check()
    ranks[0].check()
    assert wire.decisions == {1: StopDecision.VOID}
    ranks[1].check()
    ranks[1].check()
    assert ranks[1].stopped_at is None
    assert ranks[1].said == ["another rank has waited for this one in vain"]


def test_a_rank_that_finds_the_stop_written_obeys_it_though_its_own_connection_is_lost():
    """The other rank has read the all_reduce and left; the lost connection is the sign of that."""
    ranks, _, wire = job(2)
    ranks[0].asked = True
    for rank in ranks:
        rank.check()
    ranks[0].check()
    wire.broken = True
    ranks[1].check()
    assert [rank.stopped_at for rank in ranks] == [2, 2]


def test_ranks_that_check_unequally_often_are_told_so():
    """Their checks cannot be compared, so there is no stop."""
    ranks, _, _ = job(2)
    ranks[0].count = 1
    for _ in range(3):
        for rank in ranks:
            rank.check()
    assert all("equally often" in rank.said[0] for rank in ranks)


def test_one_rank_alone_decides_at_once_and_one_without_a_group_waits_for_it():
    """Before init_process_group a rank with peers cannot know what they do."""
    for is_alone in (True, False):
        reduction = Reduction(
            lambda: None, is_alone=is_alone, patience_s=1.0, clock=lambda: 0.0, give_up=lambda *why: None
        )
        assert reduction.stops(1, False, lambda: None) is False
        assert reduction.stops(2, True, lambda: None) is is_alone


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 1000), st.none() | st.floats(0, 1e6), st.integers(1, 1 << 40)),
        min_size=1,
        max_size=5,
    )
)
def test_the_maxima_mean_the_same_whatever_the_order(rows):
    """Anybody's notice, the least time, one interval."""
    columns = list(zip(*(contribution(*row) for row in rows), strict=True))
    told = agreed([max(column) for column in columns])
    assert told.asked == any(row[0] for row in rows)
    assert told.every == max(row[1] for row in rows)
    lefts = [row[2] for row in rows if row[2] is not None]
    assert (told.left_s is None) == (not lefts)
    if lefts:
        assert abs(told.left_s - min(lefts)) <= 0.001
    assert told.is_even == (len({row[3] for row in rows}) == 1)


def test_a_quick_loop_that_becomes_slow_hears_within_two_minutes():
    """Checks of 1 ms become steps of 1 s; what was agreed before that is still to be counted down."""
    ranks, hands, _ = job(2)
    for seconds, checks in ((0.001, 3000), (1.0, 220)):
        for _ in range(checks):
            hands[0] += seconds
            for rank in ranks:
                rank.asked = seconds == 1.0
                if rank.stopped_at is None:
                    rank.check()
    assert ranks[0].stopped_at == ranks[1].stopped_at
    assert 3000 < ranks[0].stopped_at < 3000 + 210


@pytest.mark.parametrize("where", ["connect", "begin", "result", "decide"])
def test_no_error_of_whatever_kind_reaches_the_loop(where):
    """torch without gloo has no such class, and a store may answer with a word that nobody knows."""
    wire, said = Wire(1), []

    def fail(*_):
        raise AttributeError("module has no attribute 'ProcessGroupGloo'")

    end = End(wire, 0)
    if where != "connect":
        setattr(end, where, fail)
    reduction = Reduction(
        fail if where == "connect" else lambda: end,
        is_alone=False,
        patience_s=1.0,
        clock=lambda: 0.0,
        give_up=lambda why, hindrance, ranks: said.append((why, hindrance)),
    )
    stops = [reduction.stops(count, True, lambda: None) for count in range(1, 5)]
    if where == "decide":
        assert stops == [False, True, True, True]  # all ranks have read the same
    else:
        assert stops == [False] * 4
        ((_, hindrance),) = said
        assert hindrance is Hindrance.CUT_OFF


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 1e6))
def test_the_interval_grows_slowly_and_falls_at_once(every, checks, seconds):
    """Never 0, never more than double, never beyond the bound."""
    found = next_every(every, checks, seconds)
    assert 1 <= found <= min(2 * every, 100)
    if seconds:
        assert found == 1 or found <= checks / seconds
