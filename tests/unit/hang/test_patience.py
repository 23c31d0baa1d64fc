"""When a rank may be called hung, by what it does: the table of docs/hangs.md."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.detect import judge
from resilience_sdk.hang.notices import notice_text
from resilience_sdk.hang.timers import HangRules, verdict_due, watch
from resilience_sdk.hang.waits import On

RULES = HangRules(stuck_after=60.0, hang_cap=3600.0)
ALL = list(Kind)


@pytest.fixture
def book(make):
    """Steps of 1 s, whose learned deadline is the floor of 30 s."""
    book = make.book()
    book.add("step", "heartbeat", [1.0] * 50)
    return book


@pytest.fixture
def due(make, book):
    """When a rank that has been in its step for `since` seconds is due, by what it does."""

    def ask(kind, *, still=0.0, since=31.0, on=On.LOCK, stack=None, book=book, survived_s=0.0, endings=0, **page):
        stack = (make.beat(since),) if stack is None else stack
        ends_in_s, worked_s = page.pop("ends", None), page.pop("worked", still)
        activity = Activity(kind, still, on, ends_in_s=ends_in_s, worked_s=worked_s)
        state = make.rank(1, *stack, activity=activity, survived_s=survived_s, endings=endings, **page)
        return verdict_due(watch(state, book, make.now), book, RULES)

    return ask


@pytest.mark.parametrize("kind", [Kind.STOPPED, Kind.STUCK])
def test_stopped_and_stuck_have_a_minute_whatever_their_deadline(make, due, kind):
    """Also where the learned deadline is an hour, or a first occurrence runs."""
    assert due(kind, still=59.0).in_s == pytest.approx(1.0)
    assert due(kind, still=60.0).now
    first = (make.beat(62), make.section("eval", 61, occurrences=0))
    assert due(kind, still=60.0, stack=first).now
    slow = make.book()
    slow.add("step", "heartbeat", [20.0] * 50)
    assert due(kind, still=60.0, since=62.0, book=slow).now


def test_before_its_first_step_a_rank_may_sleep_and_retry(make, due):
    """Five minutes for one that stands still; one minute for one that is stopped, or whose child is."""
    start = {"stack": (), "beats": 0, "created": 400.0}
    assert due(Kind.STUCK, still=299.0, **start).in_s == pytest.approx(1.0)
    assert due(Kind.STUCK, still=300.0, **start).now
    assert due(Kind.STOPPED, still=60.0, **start).now
    assert due(Kind.STUCK, still=60.0, on=On.STOPPED_CHILD, **start).now


@pytest.mark.parametrize("on", [On.SOCKET, On.PIPE, On.POLL, On.CHILD])
def test_who_waits_for_something_outside_has_five_minutes(due, on):
    """A rollout, an upload."""
    assert due(Kind.STUCK, still=299.0, on=on).in_s == pytest.approx(1.0)


def test_long_steps_and_survived_stillness_are_granted_more(make, due):
    """Twice the usual step since it began, three times what a rank has survived at that place; not of a stopped one."""
    slow = make.book()
    slow.add("step", "heartbeat", [50.0] * 50)
    assert due(Kind.STUCK, still=60.0, since=75.0, book=slow).in_s == pytest.approx(25.0)
    assert due(Kind.STUCK, still=60.0, survived_s=40.0).in_s == pytest.approx(60.0)
    assert due(Kind.STOPPED, still=60.0, survived_s=4000.0).now


def test_a_place_that_ended_the_job_before_gets_ten_times_as_long(due):
    """The second time is later, the third time is the last; stopped ranks are as the first time."""
    assert due(Kind.STUCK, still=60.0, endings=1).in_s == pytest.approx(540.0)
    assert not due(Kind.STUCK, still=600.0, endings=1).final
    assert due(Kind.STUCK, still=600.0, endings=2).final
    assert due(Kind.STOPPED, still=60.0, endings=2).now


def test_who_works_is_never_hung_before_the_cap(due):
    """Beyond its own deadline of 30 s."""
    assert due(Kind.BUSY, since=3000.0).in_s == pytest.approx(630.0)
    assert due(Kind.BUSY, since=3631.0).now


@pytest.mark.parametrize("kind", [Kind.SPINNING, Kind.POLLING, Kind.UNKNOWN])
def test_doubtful_ranks_have_ten_times_the_learned_deadline_and_ten_minutes(make, due, kind):
    """A stack that stays, and wake-ups without work, may be slow work."""
    assert due(kind, still=700.0, since=599.0).in_s == pytest.approx(1.0)
    assert due(kind, still=700.0, since=600.0).now
    slow = make.book()
    slow.add("step", "heartbeat", [20.0] * 50)
    assert due(kind, still=2000.0, since=999.0, book=slow).in_s == pytest.approx(1.0)
    assert due(kind, still=700.0, since=3000.0, endings=1).in_s == pytest.approx(630.0)


def test_who_spins_has_the_same_stack_for_ten_minutes(due):
    """A loop whose stack changed a minute ago works."""
    assert due(Kind.SPINNING, still=60.0, since=2000.0).in_s == pytest.approx(540.0)


def test_when_all_wait_in_collectives(due):
    """Nobody is to blame and the network may come back: five minutes of stillness."""
    assert due(Kind.WAITING, still=299.0, since=299.0).in_s == pytest.approx(1.0)
    assert due(Kind.WAITING, still=300.0, since=299.0).now


def test_an_epoch_that_beats_around_its_steps_does_not_make_them_long(make):
    """The usual step is that of the innermost heartbeat; without one that is open, the shortest."""
    book = make.book()
    book.add("epoch", "heartbeat", [3600.0] * 3)
    book.add("step", "heartbeat", [0.1] * 50)
    assert book.usual_step_s() == book.usual_step_s("step") == 0.1
    stack = (make.beat(70.0, name="epoch"), make.beat(70.0))
    state = make.rank(1, *stack, activity=Activity(Kind.STUCK, 60.0, On.LOCK))
    assert verdict_due(watch(state, book, make.now), book, RULES).now


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("timeout", [5.0, 900.0])
def test_a_deadline_that_somebody_set_is_literal(make, due, kind, timeout):
    """Neither earlier nor later, whatever the rank does; the answer names the setting."""
    stack = (make.beat(1000.0), make.section("eval", timeout - 1.0, timeout=timeout))
    before = due(kind, still=timeout - 1.0, stack=stack)
    assert before.in_s == pytest.approx(1.0)
    assert (before.is_set, before.rule) == (True, f"timeout={timeout:g} of the block")
    stack = (make.beat(1000.0), make.section("eval", timeout, timeout=timeout))
    assert due(kind, stack=stack).now


def test_a_first_occurrence_is_granted_its_budget_inside_a_set_deadline_while_it_works(make, due):
    """The first evaluation inside a step with a set deadline; one in which nothing moves is not protected."""
    book = make.book(heartbeat_timeout=20.0)
    stack = (make.beat(30.0), make.section("eval", 29.0, occurrences=0))
    assert due(Kind.BUSY, stack=stack, book=book).in_s > 3000
    assert due(Kind.STUCK, still=25.0, stack=stack, book=book).now


def test_a_rank_alone_between_pulses_may_be_through_with_its_loop(make, due):
    """Of an unchanged script of one rank nobody knows that the loop goes on: five minutes."""
    stack = (make.beat(100.0, kind="pulse"),)
    assert due(Kind.STUCK, still=60.0, stack=stack, world_size=1).in_s == pytest.approx(240.0)
    assert due(Kind.STUCK, still=60.0, stack=stack, world_size=2).now


# -- waits that end by themselves


@pytest.mark.parametrize("on", [On.SLEEP, On.LOCK, On.MUTEX])
def test_a_wait_that_ends_soon_is_granted_until_two_seconds_after_it(due, on):
    """The later of the table's time and that; the rule says so."""
    found = due(Kind.STUCK, still=10.0, on=on, ends=80.0)
    assert (found.in_s, found.waits_for_end) == (pytest.approx(82.0), True)
    assert "after the end of its wait" in found.rule
    assert due(Kind.STUCK, still=10.0, on=on, ends=30.0).in_s == pytest.approx(50.0)
    assert due(Kind.STUCK, still=90.0, on=on, ends=-1.0).in_s == pytest.approx(1.0)
    assert due(Kind.STUCK, still=90.0, on=on, ends=-2.0).now


def test_an_end_that_lies_too_far_after_the_last_work_is_no_reason(due):
    """10 x `stuck_after` for all waits in a row; an hour's sleep is called hung as one without an end."""
    assert due(Kind.STUCK, still=10.0, ends=590.0).in_s == pytest.approx(592.0)
    assert due(Kind.STUCK, still=10.0, ends=591.0).in_s == pytest.approx(50.0)
    assert due(Kind.STUCK, still=10.0, worked=540.0, ends=60.0).in_s == pytest.approx(62.0)
    assert due(Kind.STUCK, still=10.0, worked=541.0, ends=60.0).in_s == pytest.approx(50.0)


def test_a_thread_s_wait_and_that_before_the_first_step_have_the_later_time(due):
    """The table gives these 300 s anyway."""
    assert due(Kind.STUCK, still=10.0, on=On.WORKER, ends=400.0).in_s == pytest.approx(402.0)
    assert due(Kind.STUCK, still=10.0, on=On.WORKER, ends=200.0).in_s == pytest.approx(290.0)
    start = {"stack": (), "beats": 0, "created": 400.0}
    assert due(Kind.STUCK, still=10.0, ends=400.0, **start).in_s == pytest.approx(402.0)


@pytest.mark.parametrize("kind", [Kind.STOPPED, Kind.WAITING, Kind.POLLING, Kind.SPINNING, Kind.UNKNOWN, Kind.BUSY])
def test_of_all_other_ranks_nothing_changes(due, kind):
    """Collectives, polling, stops."""
    assert due(kind, still=10.0, ends=500.0).in_s == due(kind, still=10.0).in_s


def test_a_deadline_that_somebody_set_is_literal_for_a_sleep(make, due):
    """It would go on in time, and the block has a timeout."""
    stack = (make.beat(100.0), make.section("eval", 19.0, timeout=20.0))
    assert due(Kind.STUCK, still=19.0, ends=30.0, stack=stack).in_s == pytest.approx(1.0)


@given(data=st.data(), still=st.floats(0.0, 2000.0), more=st.floats(0.0, 2000.0))
def test_a_wait_is_granted_no_less_than_the_table_and_no_more_than_its_bound(make, data, still, more):
    """For all ends: never earlier than without one, never later than 10 x `stuck_after` + 2 s after the last work."""
    book = make.book()
    on = data.draw(st.sampled_from([On.SLEEP, On.LOCK, On.MUTEX, On.WORKER]))
    ends = data.draw(st.floats(-100.0, 4000.0))

    def left(ends_in_s):
        activity = Activity(Kind.STUCK, still, on, ends_in_s=ends_in_s, worked_s=still + more)
        return verdict_due(watch(make.rank(1, make.beat(5000.0), activity=activity), book, make.now), book, RULES).in_s

    assert left(ends) >= left(None)
    assert left(ends) <= max(left(None), 602.0 - still - more + 1e-6)


# -- the judgement as a whole


def test_the_rank_that_is_behind_is_judged_by_what_it_does(make, book):
    """Its peers are past their deadlines; they inherit the patience with the one they wait for."""

    def kind(activity):
        waits = make.rank(0, make.beat(400.0), activity=Activity(Kind.WAITING, 400.0), in_collective=True)
        late = make.rank(1, make.beat(401.0), activity=activity, in_collective=False)
        return judge([waits, late], book, make.now, RULES).kind

    assert kind(Activity(Kind.BUSY)) == "slow"
    assert kind(Activity(Kind.SPINNING, 300.0)) == "slow"
    assert kind(Activity(Kind.STUCK, 59.0)) == "slow"
    assert kind(Activity(Kind.STUCK, 60.0)) == "confirmed"
    assert kind(Activity(Kind.STOPPED, 60.0)) == "confirmed"


def test_a_stuck_rank_is_called_hung_before_any_deadline_has_passed(make):
    """Nothing is learned yet and the default deadline is 600 s; stalled, the ranks are judged all the same."""
    book = make.book()
    waits = make.rank(0, make.beat(61.0), activity=Activity(Kind.WAITING, 61.0), in_collective=True)
    stuck = make.rank(1, make.beat(61.0), activity=Activity(Kind.STUCK, 61.0, On.LOCK), in_collective=False)
    assert judge([waits, stuck], book, make.now, RULES).kind == "quiet"
    judgement = judge([waits, stuck], book, make.now, RULES, stalled=True)
    assert (judgement.kind, judgement.waited_for) == ("confirmed", (1,))


def test_nobody_is_hung_while_one_who_is_waited_for_works(make, book):
    """Two are behind, one of them is stuck: the other comes first."""
    stuck = make.rank(0, make.beat(400.0), activity=Activity(Kind.STUCK, 400.0))
    busy = make.rank(1, make.beat(400.0), activity=Activity(Kind.BUSY))
    assert judge([stuck, busy], book, make.now, RULES).kind == "slow"


def test_a_loop_that_may_be_over_is_no_hang_unless_a_rank_is_stopped(make, book):
    """All at one count with nothing open; a stopped rank is not through with anything."""
    idle = [make.rank(r, idle=400.0, activity=Activity(Kind.STUCK, 400.0)) for r in (0, 1)]
    assert judge(idle, book, make.now, RULES, stalled=True).kind == "suspect"
    stopped = attrs.evolve(idle[1], process_state="T", activity=Activity(Kind.STOPPED, 400.0))
    other = attrs.evolve(idle[0], activity=Activity(Kind.STOPPED, 400.0), process_state="T")
    assert judge([other, stopped], book, make.now, RULES, stalled=True).kind == "confirmed"


activities = st.builds(Activity, st.sampled_from(ALL), st.floats(0.0, 1e5), st.sampled_from(list(On)))


def test_a_save_behind_the_loop_is_told_and_ends_nobody(make, book):
    """The loop may be over, and the last save stands: it is named, without a verdict."""
    idle = [make.rank(r, idle=400.0, activity=Activity(Kind.STUCK, 400.0, On.FILE)) for r in (0, 1)]
    saves = attrs.evolve(idle[0], slow_work="checkpoint")
    judgement = judge([saves, idle[1]], book, make.now, RULES, stalled=True)
    assert (judgement.kind, judgement.waited_for, judgement.due) == ("suspect", (0,), None)


@pytest.mark.parametrize(
    ("on", "still_s", "named"), [(On.LOCK, 61.0, (0, 1)), (On.LOCK, 59.0, ()), (On.WORKER, 400.0, ())]
)
def test_a_lock_behind_the_loop_that_no_thread_will_release_is_told_and_ends_nobody(make, book, on, still_s, named):
    """Who idles there may want to, and who forgot something hears of it; beside a thread it may yet go on."""
    idle = [make.rank(r, idle=400.0, activity=Activity(Kind.STUCK, still_s, on)) for r in (0, 1)]
    judgement = judge(idle, book, make.now, RULES, stalled=True)
    assert (judgement.kind, judgement.waited_for, judgement.due) == ("suspect", named, None)
    if named:
        text = notice_text(judgement, idle, {}, {}, 64.0, now=0.0)
        assert text.startswith("no progress for 64 s: rank 0 stuck, rank 1 stuck; no verdict, as the loop may be over")


@given(data=st.data())
def test_a_busy_rank_is_never_confirmed_before_the_cap_and_a_spinning_one_before_its_deadline(make, data):
    """For any two ranks, whatever the other one does, and however long it lasts."""
    book = make.book()
    book.add("step", "heartbeat", data.draw(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)))
    since = data.draw(st.floats(0.0, 20_000.0))
    doubtful = data.draw(st.sampled_from([Kind.BUSY, Kind.SPINNING, Kind.POLLING, Kind.UNKNOWN]))
    still = data.draw(st.floats(0.0, 20_000.0))
    awaited = make.rank(
        1, make.beat(since), activity=Activity(doubtful, still), endings=data.draw(st.integers(0, 3)), beats=5
    )
    other = make.rank(0, make.beat(since), activity=data.draw(activities), beats=6)
    judgement = judge([other, awaited], book, make.now, RULES, stalled=True)
    deadline = book.step_limit().seconds
    if judgement.kind == "confirmed":
        assert since >= deadline
        assert since >= deadline + RULES.hang_cap if doubtful is Kind.BUSY else since >= 600.0


@given(kind=st.sampled_from(ALL), still=st.floats(0.0, 1e4), more=st.floats(0.0, 1e4))
def test_patience_only_runs_out(make, kind, still, more):
    """A longer stillness is never granted more time than a shorter one."""
    book = make.book()

    def left(still_s):
        state = make.rank(1, make.beat(1000.0), activity=Activity(kind, still_s))
        return verdict_due(watch(state, book, make.now), book, RULES).in_s

    assert left(still + more) <= left(still)
    assert not math.isnan(left(still))
