"""How deadlines are chosen, learned, kept and forgotten."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.timeouts import (
    OUT_OF_SECTION,
    REMEMBERED,
    STARTUP,
    UNNAMED_FLOORS,
    WINDOW,
    LearnedTimeouts,
    Samples,
)

durations = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def test_defaults_before_anything_is_learned(make):
    """Nothing is ever unbounded: 3600 s start-up and first occurrence, 600 s a step, 1800 s between."""
    book = make.book()
    assert book.startup_limit().seconds == 3600
    assert book.step_limit().seconds == 600
    assert book.out_of_section_limit().seconds == 1800
    assert book.deadline(make.beat(occurrences=0)) == 3600
    assert book.deadline(make.section("fwd", occurrences=0)) == 3600
    assert book.deadline(make.beat(occurrences=1)) == 600


def test_a_section_without_samples_has_no_deadline_of_its_own(make):
    """The enclosing heartbeat's applies."""
    assert make.book().deadline(make.section("fwd", occurrences=3)) is None


def test_learned_from_completed_occurrences(make):
    """Factor times quantile, floored."""
    book = make.book(timeout_floor=1)
    book.add("fwd", "compute", [2.0, 3.0])
    assert book.deadline(make.section("fwd")) == 15
    book = make.book()
    book.add("fwd", "compute", [0.1])
    assert book.deadline(make.section("fwd")) == 30


@pytest.mark.parametrize("floor", [30, 0.5])
def test_what_somebody_set_is_the_deadline(make, floor):
    """Argument, section_timeouts, heartbeat_timeout and the others are neither learned nor floored."""
    book = make.book(
        timeout_floor=floor,
        section_timeouts={"eval": 7},
        heartbeat_timeout=3,
        out_of_section_timeout=4,
        initial_heartbeat_timeout=5,
    )
    for name, kind in [("step", "heartbeat"), ("eval", "compute"), ("arg", "io")]:
        book.add(name, kind, [1000.0] * 5)
    book.add_out_of_section([1000.0])
    assert book.deadline(make.section("arg", timeout=2)) == 2
    assert book.deadline(make.section("arg", timeout=2, occurrences=0)) == 2
    assert book.deadline(make.section("eval")) == book.deadline(make.section("eval", occurrences=0)) == 7
    assert book.deadline(make.beat()) == book.step_limit().seconds == 3
    assert book.deadline(make.beat(occurrences=0)) == 5
    assert (book.out_of_section_limit().seconds, book.startup_limit().seconds) == (4, 5)


def test_a_heartbeat_and_a_section_of_one_name_are_two_things(make):
    """Their durations are not mixed."""
    book = make.book(timeout_floor=1)
    book.add("step", "heartbeat", [10.0])
    book.add("step", "compute", [1.0])
    assert (book.step_limit().seconds, book.deadline(make.section("step"))) == (50, 5)


def test_first_occurrences_are_learned_between_attempts_only(make):
    """A peer that leaves the section at once says nothing about rank 0, which evaluates in it for minutes."""
    book = make.book()
    book.add("eval", "compute", [0.001], first=True)
    assert book.deadline(make.section("eval", occurrences=0)) == 3600
    book.add("eval", "compute", [200.0], first=True)
    book.begin_attempt()
    assert book.deadline(make.section("eval", occurrences=0)) == 1000


def test_a_first_occurrence_counts_apart_from_the_rest(make):
    """Compilation in the first step does not stretch the deadline of the others."""
    book = make.book(timeout_floor=1)
    book.add("step", "heartbeat", [500.0, 1.0, 1.0], first=True)
    assert book.step_limit().seconds == 5


def test_unnamed_time_has_a_higher_floor(make):
    """Gaps of a millisecond between steps must not condemn the first evaluation that happens there."""
    book = make.book()
    book.add_out_of_section([0.001] * 1000)
    assert book.out_of_section_limit().seconds == 30 * UNNAMED_FLOORS
    book.add("step", "heartbeat", [0.1] * 10)
    assert book.deadline(make.beat(kind="pulse")) == 30 * UNNAMED_FLOORS
    assert book.deadline(make.beat()) == 30


def test_startup_is_learned_from_several_attempts(make):
    """One fresh start says nothing of a resume."""
    book = make.book(timeout_floor=1)
    book.add_startup(20)
    book.begin_attempt()
    assert book.startup_limit().seconds == 3600
    book.add_startup(40)
    book.begin_attempt()
    assert book.startup_limit().seconds == 200


def test_one_outlier_does_not_count_five_times(make):
    """Once in a hundred or rarer, an occurrence is granted to happen again, and somewhat slower: no more."""
    book = make.book(timeout_floor=1)
    book.add("fwd", "compute", [1.0] * 500 + [60.0])
    assert book.deadline(make.section("fwd")) == 150


def test_a_checkpoint_every_thousand_steps_stays_covered(make):
    """A rare but regular slow occurrence is never called a hang, with several ranks pooled too."""
    ranks = 4
    book = make.book(timeout_floor=1, pool=ranks)
    for cycle in range(6):
        for _ in range(999 * ranks):
            book.add("step", "heartbeat", [0.1])
        if cycle:
            assert book.step_limit().seconds > 60
        book.add("step", "heartbeat", [60.0] * ranks)


@given(slow=st.floats(10, 1e5))
def test_one_slow_occurrence_is_forgotten(slow):
    """After as many normal occurrences as are remembered, the deadline is what it was."""
    samples = Samples()
    samples.add(slow)
    for _ in range(REMEMBERED):
        samples.add(1.0)
    assert samples.peak() == 1.0
    assert samples.quantile(0.99) == 1.0


@given(durations)
def test_never_below_the_quantile_it_is_learned_from(values):
    """Nor below the longest duration that is remembered, nor below the floor."""
    book = LearnedTimeouts(Settings(safety_factor=1, timeout_floor=0.001))
    book.add("fwd", "compute", values)
    ordered = sorted(values)
    quantile = ordered[math.ceil(0.99 * len(ordered)) - 1]
    assert book.deadline(_open("fwd")) >= max(quantile, max(values), 0.001)


@given(durations, st.floats(1, 100))
def test_slower_work_never_has_a_shorter_deadline(values, scale):
    """Monotone in the scale of what was seen."""
    one, other = LearnedTimeouts(Settings()), LearnedTimeouts(Settings())
    one.add("fwd", "compute", values)
    other.add("fwd", "compute", [value * scale for value in values])
    assert other.deadline(_open("fwd")) >= one.deadline(_open("fwd"))


@given(durations.flatmap(lambda values: st.tuples(st.just(values), st.permutations(values))))
def test_the_order_of_arrival_does_not_matter(both):
    """Durations of several ranks arrive in any order."""
    books = [LearnedTimeouts(Settings(timeout_floor=0.001)) for _ in both]
    for book, values in zip(books, both, strict=True):
        book.add("fwd", "compute", values)
    assert books[0].deadline(_open("fwd")) == books[1].deadline(_open("fwd"))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0.001, 1e4))
def test_the_floor_holds(values, floor):
    """No learned deadline is below it."""
    book = LearnedTimeouts(Settings(timeout_floor=floor))
    book.add("fwd", "compute", values)
    assert book.deadline(_open("fwd")) >= floor


@given(values=durations, floor=st.floats(0.1, 1e4), factor=st.floats(1, 20))
def test_the_deadline_is_its_formula_though_the_window_is_not_always_sorted(values, floor, factor):
    """The largest of factor x quantile, half of the factor x peak, and the floor."""
    book = LearnedTimeouts(Settings(timeout_floor=floor, safety_factor=factor))
    book.add("fwd", "compute", values)
    ordered = sorted(values)
    quantile = ordered[math.ceil(0.99 * len(ordered)) - 1]
    wanted = max(factor * quantile, max(1.0, factor / 2) * ordered[-1], floor)
    assert book.deadline(_open("fwd")) == wanted


def test_what_is_no_duration_is_ignored(make):
    """A torn or absurd value teaches nothing."""
    book = make.book()
    book.add("fwd", "compute", [math.nan, math.inf, -1.0])
    assert book.deadline(make.section("fwd")) is None


def test_the_window_is_bounded():
    """Memory does not grow with the run."""
    samples = Samples()
    for n in range(3 * WINDOW):
        samples.add(float(n))
    assert len(samples) == WINDOW
    assert samples.quantile(0.0) == 2 * WINDOW


# -- persistence


def _learn(**where) -> LearnedTimeouts:
    book = LearnedTimeouts(Settings(timeout_floor=1), **where)
    book.add("fwd", "compute", [9.0, *[2.0] * 10], first=True)
    book.add("step", "heartbeat", [4.0] * 10)
    book.add_out_of_section([20.0])
    return book


def _reload(book: LearnedTimeouts, **where) -> LearnedTimeouts:
    return LearnedTimeouts.from_json(json.loads(json.dumps(book.to_json())), Settings(timeout_floor=1), **where)


def test_reused_by_the_same_script_and_world_size():
    """The next job begins with what this one knew, the first occurrences included."""
    again = _reload(_learn(script="a.py", world_size=4), script="a.py", world_size=4)
    assert again.deadline(_open("fwd")) == 10
    assert again.step_limit().seconds == 20
    assert again.out_of_section_limit().seconds == 100
    assert again.deadline(_open("fwd", occurrences=0)) == 45


@pytest.mark.parametrize("where", [{"script": "a.py", "world_size": 8}, {"script": "b.py", "world_size": 4}])
def test_under_other_conditions_a_doubled_prior(where):
    """Until there are enough durations of the new job's own."""
    again = _reload(_learn(script="a.py", world_size=4), **where)
    assert again.deadline(_open("fwd")) == 20
    assert again.deadline(_open("fwd", occurrences=0)) == 90
    again.add("fwd", "compute", [1.0] * 31)
    assert again.deadline(_open("fwd")) == 20
    again.add("fwd", "compute", [1.0])
    assert again.deadline(_open("fwd")) == 5


def test_the_file_keeps_other_jobs():
    """Two world sizes taking turns do not erase one another."""
    four = _learn(script="a.py", world_size=4)
    eight = _reload(four, script="a.py", world_size=8)
    eight.add("fwd", "compute", [100.0] * 40)
    again = _reload(eight, script="a.py", world_size=4)
    assert again.deadline(_open("fwd")) == 10


@given(durations)
def test_a_digest_keeps_maximum_and_never_fails(values):
    """What is restored grants at least half of the longest, as before."""
    book = LearnedTimeouts(Settings(timeout_floor=0.001))
    book.add("fwd", "compute", values)
    again = LearnedTimeouts.from_json(book.to_json(), Settings(timeout_floor=0.001))
    assert again.deadline(_open("fwd")) == pytest.approx(book.deadline(_open("fwd")), rel=1e-4)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["jobs", "script", "entries", "section:fwd", "window", "peaks", "firsts", "value"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(json_values)
def test_garbage_is_tolerated(garbage):
    """A damaged timeouts.json costs what it held, nothing else."""
    book = LearnedTimeouts.from_json(garbage, Settings())
    book.add("fwd", "compute", [1.0])
    assert book.deadline(_open("fwd")) >= 5
    json.dumps(book.to_json())


# -- doubling


def test_double_after_an_inconclusive_fire(make):
    """It is said to the caller, kept over restarts, and forgotten after long normal work."""
    book = make.book()
    book.add("fwd", "compute", [10.0])
    assert book.double("fwd") == 100
    assert make.book(book.to_json()).deadline(make.section("fwd")) == 100
    book.add("fwd", "compute", [10.0] * REMEMBERED)
    assert book.deadline(make.section("fwd")) == 50


def test_double_what_was_never_learned(make):
    """The defaults are doubled too; what somebody set, and what has no deadline, is not."""
    book = make.book(section_timeouts={"eval": 5}, out_of_section_timeout=9)
    assert book.double("step") == 1200
    assert book.double(STARTUP) == 7200
    assert book.double(OUT_OF_SECTION) is None
    assert book.double("nothing of that name") == 1200


# -- the rule of NVRx: its own numbers (reference scenarios 13 to 18)


def nvrx(factor: float, prior=None) -> LearnedTimeouts:
    return LearnedTimeouts(Settings(deadline_rule="nvrx", safety_factor=factor, timeout_floor=1e-9), prior, script="s")


def test_nvrx_heartbeats():
    """Start 0, factor 2, beats at 10, 11, 18, 20: initial 20, subsequent 14."""
    book = nvrx(2)
    book.add_startup(10)
    book.add("step", "heartbeat", [1.0, 7.0, 2.0])
    book.begin_attempt()
    assert (book.startup_limit().seconds, book.step_limit().seconds) == (20, 14)


def test_nvrx_merges_with_what_was_calculated():
    """Half new, half old: a step of 14 after one of 15 is 14.5; without new durations the old one stays."""
    prior = nvrx(2)
    prior.add("step", "heartbeat", [7.5])
    book = nvrx(2, prior.to_json())
    assert book.step_limit().seconds == 15
    book.add("step", "heartbeat", [1.0, 7.0, 2.0])
    assert book.step_limit().seconds == 14.5
    book.begin_attempt()
    assert book.step_limit().seconds == 14.5


def test_nvrx_sections():
    """one [10 to 40], two [13 to 23] nested, start 5, factor 1: 30, 10, and 5, 60, 100 out of section."""
    book = nvrx(1)
    book.add("one", "compute", [30.0])
    book.add("two", "compute", [10.0])
    for gap, deadline in [(5.0, 5), (60.0, 60), (100.0, 100)]:
        book.add_out_of_section([gap])
        assert book.out_of_section_limit().seconds == deadline
    assert (book.deadline(_open("one")), book.deadline(_open("two"))) == (30, 10)


def test_nvrx_the_maximum_over_ranks_wins():
    """Pooled, with no collective: ranks without durations have the same deadlines."""
    book = nvrx(1)
    for one, two in [([1.0], [8.0]), ([2.0], []), ([], [3.0])]:
        book.add("one", "compute", one)
        book.add("two", "compute", two)
    assert (book.deadline(_open("one")), book.deadline(_open("two"))) == (2, 8)


def test_nvrx_faster_steps_lower_it():
    """Saved, loaded in a new process, and lowered by faster beats."""
    book = nvrx(2)
    book.add("step", "heartbeat", [10.0])
    again = nvrx(2, json.loads(json.dumps(book.to_json())))
    again.add("step", "heartbeat", [1.0])
    assert again.step_limit().seconds == 11


def _open(name: str, occurrences: int = 10):
    from resilience_sdk.recorder.page_reader import OpenSection

    return OpenSection(name, "compute", 0, None, occurrences)


def test_who_only_looks_has_the_deadlines_of_the_attempt_that_goes_on(make):
    """Its first occurrences stand in the file and do not count before the next attempt, as for who learns them."""
    learns = make.book()
    learns.add("eval", "compute", [200.0], first=True)
    learns.begin_attempt()
    learns.add("eval", "compute", [900.0], first=True)
    learns.add("save", "io", [7.0], first=True)
    learns.add("fwd", "compute", [1.0, 40.0, 40.0], first=True)
    looks = LearnedTimeouts.from_json(learns.to_json(), Settings(), is_same_attempt=True)
    later = LearnedTimeouts.from_json(learns.to_json(), Settings())
    for name in ("eval", "save", "fwd", "new"):
        for occurrences in (0, 5):
            section = make.section(name, occurrences=occurrences)
            assert looks.limit(section) == learns.limit(section)
    assert looks.limit(make.section("eval", occurrences=0)).seconds == 1000.0
    assert later.limit(make.section("eval", occurrences=0)).seconds == 4500.0
