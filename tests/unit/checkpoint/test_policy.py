from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.checkpoint.policy import Every, SavePolicy, best_interval_s, parse_every
from resilience_sdk.errors import ConfigError


def simulate(every, pace_s, *, steps, write_s=0.5, mttf_s=3600.0):
    """Run a training whose n-th step takes `pace_s(n)`; return save times, save steps and questions asked."""
    policy = SavePolicy(every, mttf_s=mttf_s)
    now, saves, saved_steps, questions = 0.0, [], [], 0
    policy.start(0, now)
    for step in range(1, steps + 1):
        now += pace_s(step)
        due = policy.due(step)
        if due == "ask":
            questions += 1
            answer = policy.answer(step, now)
            if answer is not None:
                assert answer > step
                policy.next_question = answer
                continue
        if due != "no":
            saves.append(now)
            saved_steps.append(step)
            now += write_s
            policy.next_question = policy.saved(step, now, write_s)
    return saves, saved_steps, questions


def test_every_so_many_steps_needs_no_question():
    """A number of steps means its multiples, on every rank alike and after any resume."""
    _, steps, questions = simulate(parse_every(10), lambda _: 1.0, steps=35)
    assert steps == [10, 20, 30]
    assert questions == 0


def asked_at(every, steps, *, first=0):
    """Return which of the steps, at which alone it is asked, are saved at."""
    policy = SavePolicy(Every(steps=every))
    policy.start(first, 0.0)
    saved = []
    for step in steps:
        if policy.due(step) == "save":
            saved.append(step)
            policy.saved(step, 0.0, 0.1)
    return saved


@given(st.integers(1, 20), st.integers(0, 50), st.sampled_from(["steps", "auto"]))
def test_nothing_is_due_before_it_is_said_to_be(interval, first, kind):
    """So nobody needs to ask in between, and at that step there is something to do."""
    policy = SavePolicy(Every(steps=interval) if kind == "steps" else parse_every("auto"))
    policy.start(first, 0.0)
    policy.due(first + 1)
    policy.next_question = first + 1 + interval
    due_at = policy.next_due()
    for step in range(first + 2, due_at):
        assert policy.due(step) == "no"
    if due_at > first + 1:
        assert policy.due(due_at) != "no"


def test_a_multiple_that_was_passed_is_due_at_the_next_question():
    """Some are asked about seldom: ranks with different numbers of batches, or a step that counts several."""
    assert asked_at(10, [4, 8, 12, 16, 20, 24, 48]) == [12, 20, 48]
    assert asked_at(2, [3, 5, 7]) == [3, 5, 7]
    assert asked_at(10, [11, 12, 20], first=10) == [20]  # resumed from the save after 10
    assert asked_at(10, [0, 9], first=0) == []
    assert asked_at(10, [10], first=10) == [10]  # where nothing was resumed, the first question begins the count


def test_after_going_back_the_same_multiples_are_due():
    """A script may load an older state."""
    assert asked_at(10, [19, 20, 29, 12, 19, 20, 21, 30], first=11) == [20, 20, 30]


@given(st.integers(1, 20), st.lists(st.integers(1, 30), max_size=30), st.integers(0, 50))
def test_no_multiple_is_passed_without_a_save(every, advances, first):
    """It is saved at exactly where a multiple lies between two questions."""
    asked = list(itertools.accumulate(advances, initial=first))
    passed = [now for before, now in itertools.pairwise(asked) if now // every > before // every]
    assert asked_at(every, asked[1:], first=first) == passed


@settings(max_examples=50, deadline=None)
@given(st.floats(0.001, 5.0), st.floats(20.0, 200.0))
def test_a_duration_is_kept_to_within_a_step_with_few_questions(pace, interval):
    """At a steady pace the interval is met within one step, with a number of questions that is logarithmic."""
    steps = int(6 * interval / pace) + 10
    saves, _, questions = simulate(Every(seconds=interval), lambda _: pace, steps=min(steps, 200_000))
    for before, after in itertools.pairwise(saves):
        assert interval <= after - before - 0.5 <= interval + pace + 1e-6
    assert questions <= (len(saves) + 1) * 2 * (math.log2(interval / pace) + 2)


def test_a_slower_pace_is_noticed():
    """Steps that become 100 times slower delay a save by a few intervals, not by 100."""
    saves, _, _ = simulate(Every(seconds=60.0), lambda n: 0.01 if n < 1000 else 1.0, steps=5000)
    assert saves[0] < 15 * 60.0
    gaps = [after - before for before, after in itertools.pairwise(saves[1:])]
    assert max(gaps) < 62.0


def test_auto_follows_the_measured_time_of_a_save():
    """A save of 8 s under an MTTF of 10,000 s is worth taking every 400 s."""
    assert best_interval_s(8.0, 10_000.0) == pytest.approx(400.0)
    saves, _, _ = simulate(Every(), lambda _: 1.0, steps=5000, write_s=8.0, mttf_s=10_000.0)
    gaps = [after - before for before, after in itertools.pairwise(saves[1:])]
    assert all(gap == pytest.approx(408.0, abs=1.5) for gap in gaps)


def test_young_s_interval_is_exact_and_bounded():
    """sqrt(2 * write * MTTF), and never longer than the time to the next failure."""
    assert best_interval_s(2.0, 900.0) == 60.0
    assert best_interval_s(0.5, 3600.0) == 60.0
    assert best_interval_s(800.0, 100.0) == 100.0
    assert best_interval_s(90.0, 100.0) == 100.0


def test_a_save_in_the_background_is_counted_by_its_stall_and_bounded_by_its_writing():
    """A short stall allows frequent saves, but the disk is left alone for as long as it wrote."""
    policy = SavePolicy(Every(), mttf_s=7200.0)
    policy.measured(stall_s=0.25, write_s=10.0)
    assert policy.interval_s == 60.0
    policy.measured(stall_s=0.25, write_s=90.0)
    assert policy.interval_s == 180.0
    assert policy.expected_save_s == 90.0


def test_a_bigger_state_is_assumed_to_take_longer():
    """Before the first save, the size of the state gives the guess."""
    small, big = SavePolicy(Every()), SavePolicy(Every())
    small.start(0, 0.0, 1_000)
    big.start(0, 0.0, 200_000_000_000)
    assert big.interval_s > 100 * small.interval_s


def test_a_failed_save_is_not_tried_again_at_every_step():
    """After a failure the next try is an interval away, and its duration is not learned."""
    policy = SavePolicy(Every(seconds=10.0))
    policy.start(0, 0.0)
    assert policy.answer(5, 11.0) is None
    policy.next_question = policy.saved(5, 11.0, None)
    assert policy.answer(6, 12.0) is not None


@pytest.mark.parametrize("value", [0, -1, "often", 2.5, "2.5", True, None, "-5min"])
def test_a_bad_every_names_the_value(value):
    """What is neither auto, steps nor a duration is refused with what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        parse_every(value)


@pytest.mark.parametrize(("value", "parsed"), [("auto", Every()), (5, Every(steps=5)), ("10min", Every(seconds=600.0))])
def test_every_has_three_spellings(value, parsed):
    """`auto`, a number of steps, a duration."""
    assert parse_every(value) == parsed
