"""What a rank's time was spent on, from its page at some moments."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_rank import NS, Act, SimulatedRank

from resilience_sdk.goodput.rank_time import Doing, RankTime, Spent, node_spent
from resilience_sdk.goodput.step_time import is_evaluation
from resilience_sdk.recorder.page_reader import LanePasses, OpenSection

STEP = Act("step", 0.2)


def looked_at(acts: list[Act], every_s: float = 0.5, until: float | None = None) -> RankTime:
    """Return the account of a rank that was looked at so often."""
    rank, account, at = SimulatedRank.of(acts), RankTime(), 0.3
    end = rank.ends if until is None else until
    while at < end:
        rank.look(account, at)
        at += every_s
    rank.look(account, end)
    return account


def spent(acts: list[Act], **more: float) -> dict[str, float]:
    """Return what it comes to, without what is nothing."""
    account = looked_at(acts, **more)
    told = attrs.asdict(account.spent)
    return {name.removesuffix("_s"): round(seconds, 3) for name, seconds in told.items() if round(seconds, 3)}


def test_what_lies_between_two_steps_is_not_productive() -> None:
    """Nor what lies behind the last one."""
    account = looked_at([*[Act("gap", 0.1), STEP] * 20, Act("gap", 12.0)])
    assert account.spent == Spent(productive_s=pytest.approx(4.0))
    assert account.wall_s == pytest.approx(18.0)


def test_data_saves_and_evaluations_have_their_place_inside_and_outside_of_steps() -> None:
    """What lies in a step is taken from it, what lies outside is not."""
    outside = [Act("data", 0.3), STEP] * 20
    assert spent(outside) == {"productive": 4.0, "data": 6.0}
    inside = [Act("step", 0.5, inner=(Act("data", 0.3),))] * 20
    assert spent(inside) == {"productive": 4.0, "data": 6.0}
    rare = [*[STEP] * 20, Act("eval", 6.0), *[STEP] * 20, Act("checkpoint", 2.5), *[STEP] * 20]
    assert spent(rare) == {"productive": 12.0, "evaluation": 6.0, "saves": 2.5}


def test_an_evaluation_that_only_its_batches_tell_of_takes_the_time_between_two_steps() -> None:
    """To within a look at either end."""
    acts = [*[STEP] * 20, *[Act("eval_batch", 0.3), Act("gap", 0.2)] * 12, *[STEP] * 20]
    found = spent(acts)
    assert found["productive"] == pytest.approx(8.0)
    assert found["evaluation"] == pytest.approx(6.0, abs=0.5)


@pytest.mark.parametrize("seconds", [3.0, 8.0, 14.0])
@pytest.mark.parametrize("place", ["step", "gap", "data", "eval", "checkpoint"])
def test_a_process_that_is_stopped_stands_wherever_it_is(place: str, seconds: float) -> None:
    """While it lasts, and once it is over."""
    stop = Act("stop", seconds, Doing.STOPPED)
    acts = [*[STEP] * 20, Act(place, 0.2 + seconds, inner=(stop,)), *[STEP] * 20]
    found = spent(acts)
    assert found["standing"] == pytest.approx(seconds, abs=0.5)  # a look
    assert found["productive"] == pytest.approx(8.0 + 0.2 * (place == "step"), abs=0.3)
    meanwhile = spent(acts, until=5.0 + seconds)
    assert meanwhile["productive"] == pytest.approx(4.2, abs=0.3)


def test_who_sleeps_in_a_step_stands_and_who_works_for_long_in_one_does_not() -> None:
    """A step may be long; one in which nothing moves is none."""
    asleep = [*[STEP] * 20, Act("step", 5.0, Doing.STILL), *[STEP] * 20]
    assert spent(asleep)["standing"] == pytest.approx(4.8, abs=0.3)
    at_work = [*[STEP] * 20, Act("step", 5.0), *[STEP] * 20]
    assert spent(at_work) == {"productive": 13.0}
    slow_data = [*[STEP] * 20, Act("data", 5.0, Doing.STILL), *[STEP] * 20]
    assert spent(slow_data) == {"productive": 8.0, "data": 5.0}


def test_a_step_behind_a_long_wait_is_as_usual() -> None:
    """Though the rank has slept since its last step: in its evaluation, for its data."""
    for what in ("eval", "checkpoint", "data", "gap"):
        still = [Act("step", 0.2, Doing.STILL)] * 7
        found = spent([*still, *[Act(what, 2.0, Doing.STILL), *still] * 4], every_s=0.47)
        assert (found["productive"], found.get("standing")) == (7.0, None), what


def test_steps_that_always_sleep_for_long_are_usual() -> None:
    """As those of a program that does its work elsewhere."""
    assert spent([Act("step", 3.0, Doing.STILL)] * 10).get("standing", 0.0) <= 3.0


def test_the_others_wait_for_a_slow_rank() -> None:
    """By so much as it works longer than they do; not where ranks are alike, nor where one stood for a while."""

    def working(seconds: float, *stops: Act) -> RankTime:
        step = Act("step", 0.3, inner=(Act("fwd", seconds),))
        return looked_at([*[step] * 25, *stops, *[step] * 25])

    slow = node_spent([working(0.1), working(0.2)])
    assert slow == Spent(productive_s=pytest.approx(10.0), waiting_s=pytest.approx(5.0))
    assert node_spent([working(0.1), working(0.105)]).waiting_s == 0.0
    stop = Act("step", 6.3, inner=(Act("fwd", 6.1, inner=(Act("stop", 6.0, Doing.STOPPED),)),))
    waits = Act("step", 6.3, Doing.STILL)
    stood = node_spent([working(0.1, waits), working(0.1, stop)])
    assert stood.waiting_s == pytest.approx(0.0, abs=0.01)
    assert stood.standing_s == pytest.approx(6.0, abs=0.5)


def test_names_of_evaluations() -> None:
    """As adapters and users call them."""
    for name in ("eval", "evaluate", "validation", "val_loop", "eval_step"):
        assert is_evaluation(name, "compute")
    for name in ("values", "retrieval", "eval_loss_and_train", "step"):
        assert not is_evaluation(name, "compute")


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "gap", "data", "eval", "checkpoint"]),
        st.floats(0.05, 6.0),
        st.sampled_from(list(Doing)),
    ).map(lambda told: Act(*told)),
    max_size=25,
)


@given(ACTS, st.floats(0.2, 1.5))
@settings(max_examples=25, deadline=None)
def test_the_account_never_claims_more_than_there_was(acts: list[Act], every_s: float) -> None:
    """At any moment productive time is no more than that in steps, and data no more than that in its sections."""
    rank, account, at = SimulatedRank.of(acts), RankTime(), 0.3
    while at < rank.ends + 2.0:
        rank.look(account, at)
        found = account.spent
        assert all(seconds >= 0 for seconds in attrs.astuple(found))
        for name, told_s in (("step", found.productive_s), ("data", found.data_s), ("checkpoint", found.saves_s)):
            lies_s = sum(max(0.0, min(b.ended, at) - max(b.began, 1.0)) for b in rank.blocks if b.name == name)
            assert told_s <= lies_s + 1e-6
        at += every_s


@given(ACTS, st.sampled_from(["step", "gap"]), st.floats(2.0, 30.0))
@settings(max_examples=25, deadline=None)
def test_standing_still_adds_nothing_to_what_is_productive(acts: list[Act], place: str, seconds: float) -> None:
    """Neither while it lasts nor once it is over: at most what it takes until it is seen."""
    before = [*acts, *[STEP] * 30]
    stop = Act(place, 0.2 + seconds, inner=(Act("stop", seconds, Doing.STOPPED),))
    known = looked_at(before).spent.productive_s
    meanwhile = looked_at([*before, stop], until=SimulatedRank.of(before).ends + 0.1 + seconds)
    behind = looked_at([*before, stop, STEP, STEP]).spent.productive_s
    assert meanwhile.spent.productive_s <= known + 0.2 + 1.0
    assert behind <= known + 0.6 + 1.0


def test_a_step_that_is_never_complete_takes_nothing_from_those_that_are() -> None:
    """A rank that is ended where it stood has its other steps as they were."""
    rank, account, at = SimulatedRank.of([*[STEP] * 20, Act("step", 10.0, Doing.STILL)]), RankTime(), 0.3
    while at < 11.0:
        rank.look(account, at)
        at += 0.5
    rank.look(account, at, is_alive=False)
    assert account.spent.productive_s == pytest.approx(4.0)
    assert account.spent.standing_s == pytest.approx(at - 5.2, abs=0.6)


def test_a_pulse_of_a_preparation_is_no_step_beside_heartbeats() -> None:
    """An optimizer that stepped before the loop has left an interval open, for good."""
    rank, account = SimulatedRank.of([Act("gap", 0.1), STEP] * 20), RankTime()
    page = rank.page(5.0)
    lane = attrs.evolve(page.lanes[0], stack=(OpenSection("optimizer", "pulse", NS, None, 1), *page.lanes[0].stack))
    passes = [
        LanePasses("optimizer", "pulse", 0, 0, [0, NS], False, 0),
        LanePasses("step", "heartbeat", 0, 0, [NS, *[NS // 5] * 13], False, 1),
    ]
    early = attrs.evolve(rank.page(1.0), lanes=(attrs.evolve(lane, stack=lane.stack[:1], beats=1, beat_ns=NS),))
    account.look(early, [LanePasses("optimizer", "pulse", 0, 0, [0], False, 0)], 2 * NS, doing=Doing.BUSY)
    account.look(early, [], 4 * NS, doing=Doing.BUSY)
    account.look(attrs.evolve(page, lanes=(lane,)), passes, 5 * NS)
    assert account.brackets_steps
    assert account.spent.productive_s == pytest.approx(13 * 0.2)
