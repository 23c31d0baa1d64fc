"""Hung or slow: when a verdict may be given, and when it must not."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.detect import Confirmation, judge
from resilience_sdk.hang.timeouts import OUT_OF_SECTION, STARTUP
from resilience_sdk.hang.timers import CollectivePosition, HangRules, RankState
from resilience_sdk.hang.waits import On
from resilience_sdk.recorder.page_reader import OpenSection

CAP = 3600.0


@pytest.fixture
def book(make):
    """Deadlines of a run with 1 s steps: step and fwd 30 s, bwd 100 s, eval 300 s."""
    book = make.book()
    for name, kind, typical in [
        ("step", "heartbeat", 1.0),
        ("fwd", "compute", 0.5),
        ("bwd", "compute", 20.0),
        ("eval", "compute", 60.0),
    ]:
        book.add(name, kind, [typical] * 50)
    return book


@pytest.fixture
def verdict(make, book):
    """Judge these ranks now; all of the world unless `cap` or another book is given."""

    def decide(*states, cap=CAP, book=book):
        return judge(states, book, make.now, HangRules(hang_cap=cap))

    return decide


# -- hangs


def test_quiet_while_everybody_is_in_time(make, verdict):
    """Nobody late: no suspects, and the next look is due at half of the nearest deadline."""
    judgement = verdict(make.rank(0, make.beat(1)), make.rank(1, make.beat(1)))
    assert judgement.kind == "quiet"
    assert judgement.suspects == ()
    assert judgement.next_look_ns == pytest.approx(make.now + 14e9, abs=1e3)


def test_half_way_is_the_time_for_evidence(make, verdict):
    """Past half of a deadline a rank is named, without being a suspect."""
    judgement = verdict(make.rank(0, make.beat(16)), make.rank(1, make.beat(1)))
    assert (judgement.kind, judgement.half_way) == ("quiet", (0,))
    assert judgement.next_look_ns == pytest.approx(make.now + 14e9, abs=1e3)


def test_confirmed_when_all_are_past_their_own(make, verdict):
    """The plain hang: one rank stuck in fwd, the other waits in the same step."""
    judgement = verdict(
        make.rank(0, make.beat(31), make.section("bwd", 30)),
        make.rank(1, make.beat(31), make.section("fwd", 31)),
    )
    assert judgement.kind == "confirmed"
    assert {s.rank for s in judgement.suspects} == {0, 1}


def test_confirmed_by_the_rank_that_is_behind(make, verdict):
    """Who stands in an earlier step is waited for; its deadline alone decides."""
    behind = make.rank(1, make.beat(40, occurrences=9), beats=9)
    judgement = verdict(make.rank(0, make.beat(20)), behind)
    assert (judgement.kind, judgement.waited_for) == ("confirmed", (1,))
    assert [(s.rank, s.name, s.deadline_s) for s in judgement.suspects] == [(1, "step", 30)]


def test_an_expired_outer_section_counts_while_an_inner_one_is_open(make, verdict):
    """An inner section with time left does not hide that the outer one is late."""
    outer = make.section("outer", 2, timeout=1)
    inner = make.section("inner", 2, timeout=100)
    judgement = verdict(make.rank(0, make.beat(2), outer, inner, world_size=1))
    assert (judgement.kind, judgement.suspects[0].name) == ("confirmed", "outer")


def test_steps_that_complete_are_progress_of_what_is_open_around_them(make, verdict):
    """An epoch is not late as long as its steps come, whatever its deadline, unless somebody has set that."""

    def kind(beat_ago, **epoch):
        around = make.section("epoch", 9000, occurrences=0, **epoch)
        return verdict(make.rank(0, around, make.beat(1), beat_ago=beat_ago, world_size=1)).kind

    assert kind(1.5) == "quiet"
    assert kind(1.5, timeout=8000) == "confirmed"
    late = make.rank(0, make.section("epoch", 9000, occurrences=0), beat_ago=3700, world_size=1)
    judgement = verdict(late)
    assert (judgement.kind, judgement.suspects[0].name) == ("confirmed", "epoch")
    stuck = make.rank(0, make.section("epoch", 9000), make.beat(31), beat_ago=32, world_size=1)
    judgement = verdict(stuck)
    assert (judgement.kind, judgement.suspects[0].name) == ("confirmed", "step")


def test_out_of_section_needs_no_section_of_a_certain_name(make, verdict):
    """A rank that hangs between two steps is found, whatever the steps are called."""
    late = make.rank(1, idle=2000, beats=10)
    judgement = verdict(make.rank(0, make.beat(1990, name="turn")), late)
    assert (judgement.kind, judgement.waited_for) == ("confirmed", (1,))
    assert {s.name for s in judgement.suspects} == {"turn", OUT_OF_SECTION}


def test_a_rank_that_never_starts(make, verdict):
    """Start-up has a deadline, for one rank and for all."""
    waiting = make.rank(0, make.beat(3700, occurrences=0), beats=0)
    late = make.rank(1, beats=0, created=3700)
    judgement = verdict(waiting, late)
    assert (judgement.kind, judgement.waited_for) == ("confirmed", (1,))
    assert judgement.suspects[-1].name == STARTUP
    assert verdict(*(attrs.evolve(late, rank=r) for r in (0, 1))).kind == "confirmed"


def test_a_section_without_a_deadline_outside_a_heartbeat_is_bounded(make, verdict):
    """Nothing is unbounded: the time out of section covers it."""
    stack = make.section("strange", 1801, occurrences=1)
    behind = make.rank(1, make.beat(1801, occurrences=11), beats=11)
    assert verdict(make.rank(0, stack, beats=10), behind).kind == "confirmed"


def test_an_unchanged_script_is_expected_to_step_where_something_shows_it(make, book):
    """In its start-up it has promised nothing: a server that waits for its clients looks the same."""
    silent = make.rank(1, beats=0, created=400.0, declared=False, activity=Activity(Kind.STUCK, 400.0))
    other = make.rank(0, beats=0, created=400.0, declared=False, activity=Activity(Kind.BUSY))

    def waited_for(one, another=other):
        judgement = judge([another, one], book, make.now, HangRules(), stalled=True)
        return (judgement.kind, judgement.waited_for)

    assert waited_for(silent) == ("suspect", ())
    waits = attrs.evolve(other, in_collective=True, activity=Activity(Kind.WAITING, 400.0))
    assert waited_for(silent, waits) == ("confirmed", (1,))
    stopped = attrs.evolve(silent, process_state="T", activity=Activity(Kind.STOPPED, 60.0))
    assert waited_for(stopped) == ("confirmed", (1,))
    trains = attrs.evolve(silent, snapshot=attrs.evolve(silent.snapshot, trains=True, world_size=1))
    judgement = judge([trains], book, make.now, HangRules(), stalled=True)
    assert (judgement.kind, judgement.waited_for) == ("confirmed", (1,))


def test_survivors_behind_a_dead_rank(make, verdict):
    """Death alone is no hang; ranks that are late behind it are hung, nothing will come."""
    dead = make.rank(1, make.beat(5), alive=False)
    assert verdict(make.rank(0, make.beat(5)), dead).kind == "quiet"
    judgement = verdict(make.rank(0, make.beat(31)), dead)
    assert (judgement.kind, judgement.waited_for) == ("confirmed", (1,))


def test_a_rank_that_left_early_does_not_hold_the_verdict(make, verdict):
    """One rank ended its program, the others wait in the next step for ever."""
    gone = make.rank(1, exit_state="clean", done=True, alive=False)
    assert verdict(make.rank(0, make.beat(31)), gone).kind == "confirmed"


def test_a_stopped_rank_that_nobody_watched_is_a_suspect_until_its_deadline(make, verdict):
    """State T says who, not since when: without an activity only the deadline confirms."""
    early = make.rank(1, make.beat(2), process_state="T")
    judgement = verdict(make.rank(0, make.beat(2)), early)
    assert (judgement.kind, judgement.suspects[0].name) == ("slow", "stopped")
    late = make.rank(1, make.beat(31), process_state="T")
    assert verdict(make.rank(0, make.beat(31)), late).kind == "confirmed"


# -- slow, not hung


def test_first_step_twenty_times_slower(make, verdict):
    """Compilation and warm-up have the budget of a first occurrence, inner sections included."""
    stack = make.beat(1000, occurrences=0), make.section("fwd", 1000, occurrences=0)
    assert verdict(make.rank(0, *stack, beats=0), make.rank(1, *stack, beats=0)).kind == "quiet"


def test_later_sections_of_a_slow_first_step(make, verdict):
    """Under gradient accumulation the second pass of a section may still compile."""
    stack = make.beat(1000, occurrences=0), make.section("fwd", 500, occurrences=1)
    assert verdict(make.rank(0, *stack, beats=0), make.rank(1, *stack, beats=0)).kind == "slow"


@pytest.mark.parametrize("name", ["eval", "checkpoint"])
@pytest.mark.parametrize("occurrences", [0, 10])
def test_rank_0_alone_is_busy_while_others_wait_in_backward(make, book, verdict, name, occurrences):
    """They inherit its deadline: the learned one, or that of a first occurrence."""
    book.add("checkpoint", "io", [60.0] * 10)
    busy = make.rank(0, make.section(name, 200, occurrences=occurrences))
    waiting = [make.rank(r, make.beat(199), make.section("bwd", 198)) for r in (1, 2)]
    judgement = verdict(busy, *waiting)
    assert (judgement.kind, judgement.waited_for) == ("slow", (0,))
    assert {s.rank for s in judgement.suspects} == {1, 2}


def test_first_checkpoint_inside_a_step(make, verdict):
    """The step's deadline passes, but the innermost section is there for the first time."""
    busy = make.rank(0, make.beat(200), make.section("checkpoint", 199, occurrences=0))
    waiting = make.rank(1, make.beat(200), make.section("bwd", 199))
    assert verdict(busy, waiting).kind == "slow"


def test_everybody_evaluates(make, verdict):
    """Slow evaluation on all ranks, within what was learned of it."""
    assert verdict(*(make.rank(r, make.section("eval", 250)) for r in (0, 1))).kind == "quiet"


def test_recompilation_in_the_middle_of_a_run(make, verdict):
    """The stack shows the compiler: learned deadlines do not count; those that somebody set do."""
    compiling = make.rank(0, make.beat(200), make.section("fwd", 200), slow_work="compile")
    waiting = make.rank(1, make.beat(200), make.section("bwd", 199), in_collective=True)
    assert verdict(compiling, waiting).kind == "slow"
    strict = make.book(heartbeat_timeout=100)
    assert verdict(compiling, waiting, book=strict).kind == "confirmed"


def test_after_done_an_upload_may_take_any_time(make, verdict):
    """No deadline runs after heartbeat.done(), on one rank or on all."""
    done = make.rank(0, idle=9e4, done=True)
    assert verdict(done, make.rank(1, idle=9e4, done=True)).kind == "quiet"
    assert verdict(done, make.rank(1, idle=9e4)).kind == "suspect"


def test_the_loop_is_over_without_done(make, verdict):
    """All stopped at one count with nothing open: late, and no reason to act."""
    judgement = verdict(make.rank(0, idle=9e4), make.rank(1, idle=9e4))
    assert judgement.kind == "suspect"
    assert len(judgement.suspects) == 2


def test_a_time_out_of_sections_that_somebody_set_is_literal_for_a_rank_alone(make, verdict):
    """As of one rank that waits for its device between two steps: the loop is not taken as over."""
    strict, spinning = make.book(out_of_section_timeout=20), Activity(Kind.SPINNING, 21)
    alone = make.rank(0, idle=21, world_size=1, activity=spinning)
    assert verdict(alone, book=strict).kind == "confirmed"
    assert verdict(alone).kind != "confirmed"
    assert verdict(make.rank(0, idle=19, world_size=1, activity=spinning), book=strict).kind != "confirmed"
    together = [make.rank(r, idle=21) for r in (0, 1)]  # the end of a loop, at which nobody is waited for
    assert verdict(*together, book=strict).kind == "suspect"
    assert verdict(make.rank(0, idle=21, world_size=1, done=True), book=strict).kind == "quiet"


def test_pulses_end_like_steps_that_do_not_end(make, verdict):
    """After the last pulse nobody stands in a collective: the loop may be over."""
    over = [make.rank(r, make.beat(9e4, kind="pulse"), in_collective=False) for r in (0, 1)]
    assert verdict(*over).kind == "suspect"
    assert verdict(over[0], attrs.evolve(over[1], in_collective=True)).kind == "confirmed"
    # Whoever sets the time between two says when there is none to come.
    timed = attrs.evolve(make.beat(9e4, kind="pulse"), timeout_s=5.0)
    late = [make.rank(r, timed, in_collective=False) for r in (0, 1)]
    assert verdict(*late).kind == "confirmed"


@pytest.mark.parametrize("fact", [{"traced": True}, {"reads_terminal": True}, {"slow_work": "prompt"}])
def test_a_person_is_at_it(make, verdict, fact):
    """breakpoint() and debuggers hold any verdict, whoever else is late."""
    held = make.rank(1, make.beat(9e4), **fact)
    assert verdict(make.rank(0, make.beat(9e4)), held).kind == "held"


def test_a_person_is_at_a_child(make, verdict):
    """A DataLoader worker in a debugger, for which its rank waits and looks stuck."""
    stack = make.beat(9e4), make.section("data", 9e4)
    held = make.rank(1, *stack, activity=Activity(Kind.STUCK, 9e4, On.TRACED_CHILD))
    assert verdict(make.rank(0, make.beat(9e4)), held).kind == "held"


def test_after_a_pause_the_time_begins_anew(make, verdict):
    """Whatever was open during a pause of any thread has its whole deadline from the end of the pause on."""
    resumed = make.now - int(20e9)
    states = [make.rank(r, make.beat(9e4), make.section("fwd", 9e4), resumed_ns=resumed) for r in (0, 1)]
    assert verdict(*states).kind == "quiet"
    late = [make.rank(r, make.beat(9e4), resumed_ns=make.now - int(40e9)) for r in (0, 1)]
    assert verdict(*late).kind == "confirmed"


def test_sampled_collectives_may_be_seen_late(make, verdict):
    """Where completed collectives are the only sign, an interval may look longer than it is by the sampling."""
    for source, kind in (("collectives", "quiet"), ("optimizer", "confirmed")):
        states = [make.rank(r, make.beat(301, kind="pulse"), beat_source=source) for r in (0, 1)]
        states = [attrs.evolve(state, in_collective=state.rank == 0) for state in states]
        assert verdict(*states).kind == kind


def test_a_wait_with_a_long_deadline_does_not_hide_the_hang_of_another_rank(make, verdict):
    """The one that waits has done fewer steps, so it is waited for; up to the cap, not for ever."""
    waits = make.rank(0, make.section("join_wait", 5000.0, kind="comm", timeout=7200.0), beats=3)
    assert verdict(waits, make.rank(1, make.beat(2000.0), beats=9)).kind == "slow"
    assert verdict(waits, make.rank(1, make.beat(4900.0), beats=9)).kind == "confirmed"


def test_paused(make, verdict):
    """A paused rank has no deadline, and who waits for it has none either."""
    paused = make.rank(1, make.beat(9e4), paused="label by hand")
    judgement = verdict(make.rank(0, make.beat(9e4)), paused)
    assert judgement.kind == "held"
    assert "label by hand" in judgement.detail


def test_no_progress_signal_no_verdict(make, verdict):
    """A rank that uses nothing of the SDK is never late."""
    silent = [make.rank(r, beats=0, created=1e6, declared=False) for r in (0, 1)]
    assert verdict(*silent).kind == "quiet"


def test_unseen_ranks_may_be_the_ones_waited_for(make, verdict):
    """All known ranks wait at one place: rank 7 of another node may be evaluating."""
    waiting = [make.rank(r, make.beat(40), world_size=8) for r in (0, 1)]
    assert verdict(*waiting).kind == "slow"
    stuck = make.rank(1, make.beat(40, occurrences=9), beats=9, world_size=8)
    assert verdict(waiting[0], stuck).kind == "confirmed"
    outside = [attrs.evolve(waiting[1], in_collective=False), attrs.evolve(waiting[0], in_collective=True)]
    assert verdict(*outside).kind == "confirmed"


def test_an_unreadable_page_is_an_unseen_rank(make, verdict):
    """Nothing is concluded from what cannot be read."""
    assert verdict(make.rank(0, make.beat(40)), RankState(rank=1)).kind == "slow"


def test_nobody_inherits_for_ever(make, verdict):
    """After hang_cap the wait itself is the hang."""
    busy = make.rank(0, make.section("eval", 5000, timeout=9000))
    waiting = make.rank(1, make.beat(3700))
    assert verdict(busy, waiting).kind == "confirmed"
    assert verdict(busy, waiting, cap=4000).kind == "slow"


def test_nothing_known_at_all(verdict):
    """No rank, no verdict."""
    assert verdict().kind == "quiet"


# -- who is waited for


def test_collective_sequences_come_first(make, verdict):
    """Rank 0 is in a later section, but it is the one that did not come to the collective."""

    def position(enqueued, completed):
        return {"0": CollectivePosition(enqueued, completed, is_world=True)}

    busy = make.rank(0, make.beat(40), make.section("eval", 39), collectives=position(5, 5))
    waiting = make.rank(1, make.beat(40), collectives=position(6, 5))
    judgement = verdict(busy, waiting)
    assert judgement.waited_for == (0,)
    assert judgement.kind == "confirmed"


def test_global_steps_compare_on_entry_and_after_exit(make, verdict):
    """A step number stays after the exit: step 7 left is ahead of step 7 entered."""
    inside = make.rank(0, make.beat(40), step=7)
    left = make.rank(1, idle=5, step=7, beats=11)
    assert verdict(inside, left).waited_for == (0,)


def test_times_of_another_host_are_read_with_its_own_clock(make, verdict):
    """Only durations leave a host."""
    away = make.rank(1, make.beat(1))
    away = attrs.evolve(away, now_ns=make.now + 60 * 10**9)
    assert verdict(make.rank(0, make.beat(1)), away).suspects[0].rank == 1


# -- two looks


def test_confirmation_needs_two_looks_that_agree(make, verdict):
    """Same ranks waited for, standing where they stood; a rank that came further starts the count again."""
    stuck = [make.rank(r, make.beat(31)) for r in (0, 1)]
    further = [make.rank(r, make.beat(30.5), beats=11) for r in (0, 1)]
    confirmation = Confirmation()
    assert not confirmation.agrees(verdict(*stuck), stuck)
    assert not confirmation.agrees(verdict(*further), further)
    assert confirmation.agrees(verdict(*further), further)
    fine = [make.rank(r, make.beat(1)) for r in (0, 1)]
    assert not confirmation.agrees(verdict(*fine), fine)
    assert not confirmation.agrees(verdict(*further), further)


def test_what_a_late_rank_does_inside_is_no_progress(make, verdict):
    """It opens and closes inner sections of an expired one for ever, and another of its threads beats on."""
    confirmation, looks = Confirmation(), []
    for seconds in (0.3, 0.2):
        state = make.rank(0, make.beat(31), make.section("inner", seconds), world_size=1)
        other = attrs.evolve(state.snapshot.lanes[0], beats=int(100 / seconds), stack=())
        lanes = (state.snapshot.lanes[0], other)
        looks.append([attrs.evolve(state, snapshot=attrs.evolve(state.snapshot, lanes=lanes))])
    assert not confirmation.agrees(verdict(*looks[0]), looks[0])
    assert confirmation.agrees(verdict(*looks[1]), looks[1])


# -- properties

kinds = st.sampled_from(["heartbeat", "compute", "comm", "io", "idle", "pulse"])
ages = st.floats(0, 4000)


@st.composite
def stacks(draw, make):
    depth = draw(st.integers(0, 3))
    sections = []
    for age in sorted((draw(ages) for _ in range(depth)), reverse=True):
        name = draw(st.sampled_from(["step", "fwd", "bwd", "eval", "new"]))
        entered = make.now - int(age * 1e9)
        timeout = draw(st.none() | st.floats(1, 2000))
        sections.append(OpenSection(name, draw(kinds), entered, timeout, draw(st.integers(0, 3))))
    return tuple(sections)


@st.composite
def worlds(draw, make):
    size = draw(st.integers(1, 5))
    return [
        make.rank(
            rank,
            *draw(stacks(make)),
            beats=draw(st.integers(0, 3)),
            idle=draw(ages),
            created=draw(ages),
            world_size=draw(st.just(size) | st.integers(size, 8)),
            declared=draw(st.booleans()),
            done=draw(st.booleans() | st.just(False)),
            paused=draw(st.none() | st.just("why")),
            alive=draw(st.just(True) | st.booleans()),
            traced=draw(st.just(False) | st.booleans()),
            in_collective=draw(st.none() | st.booleans()),
            slow_work=draw(st.none() | st.just("compile")),
        )
        for rank in range(size)
    ]


@given(data=st.data())
@settings(max_examples=150)
def test_never_confirmed_while_the_awaited_rank_is_in_time(make, data):
    """For any state of the world: each rank waited for is dead, or past a deadline of its own."""
    states = data.draw(worlds(make))
    book = make.book()
    book.add("fwd", "compute", [1.0])
    book.add("step", "heartbeat", [1.0])
    judgement = judge(states, book, make.now, HangRules(hang_cap=math.inf))
    if judgement.kind != "confirmed":
        return
    late = {suspect.rank for suspect in judgement.suspects}
    assert judgement.waited_for
    assert not any(s.traced for s in states if s.running)
    for state in states:
        if state.rank in judgement.waited_for and not state.died:
            assert state.rank in late
            assert state.snapshot.paused is None
            assert not state.snapshot.done


@given(data=st.data())
@settings(max_examples=60)
def test_the_order_of_ranks_does_not_matter(make, data):
    """A verdict depends on the ranks, not on how they are listed."""
    states = data.draw(worlds(make))
    shuffled = data.draw(st.permutations(states))
    book = make.book()
    one, other = (judge(order, book, make.now, HangRules(hang_cap=600.0)) for order in (states, shuffled))
    assert (one.kind, one.waited_for, one.next_look_ns) == (other.kind, other.waited_for, other.next_look_ns)
    assert set(one.suspects) == set(other.suspects)
