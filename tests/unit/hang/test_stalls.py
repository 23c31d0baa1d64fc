"""Notices: early, in one line, with doubling pauses, and closed."""

from __future__ import annotations

import time
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import resilience_sdk
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.detect import Judgement
from resilience_sdk.hang.notices import (
    StallNotices,
    look_after_s,
    notice_after_s,
    notice_text,
    place_of,
    without_progress_s,
)
from resilience_sdk.hang.saves import saving_frames
from resilience_sdk.hang.timers import Due
from resilience_sdk.hang.waits import On

STUCK = Activity(Kind.STUCK, 20.0)
FRAMES = ("/usr/lib/python3.11/threading.py:327 wait", "/home/me/train.py:15 forward", "/home/me/train.py:40 main")


def judged(*ranks, in_s=40.0, kind="slow"):
    return Judgement(kind, waited_for=tuple(ranks), due=Due(in_s, "stuck_after 60 s"))


@pytest.mark.parametrize(
    ("usual_s", "verdict_s", "after_s"),
    [
        (0.1, 60.0, 10.0),
        (1.0, 60.0, 20.0),
        (1.0, 600.0, 20.0),
        (3.0, 60.0, 30.0),
        (30.0, 60.0, 60.0),
        (0.0, 300.0, 10.0),
    ],
)
def test_a_notice_comes_after_ten_seconds_or_twenty_steps(usual_s, verdict_s, after_s):
    """At most half of the time to the verdict, at least two steps."""
    assert notice_after_s(60.0, usual_s, verdict_s) == pytest.approx(after_s)


@given(st.floats(0.0, 1e3), st.floats(1.0, 1e4))
def test_the_ranks_are_looked_at_before_any_notice_is_due(usual_s, in_s):
    """The look tells when the verdict would be, which is never before `stuck_after` and two steps."""
    verdict_s = max(60.0, 2 * usual_s) + in_s
    assert look_after_s(60.0, usual_s) <= notice_after_s(60.0, usual_s, verdict_s)


@given(st.floats(0.0, 1e3), st.floats(0.1, 1e4))
def test_a_short_deadline_that_somebody_set_is_noticed_before_it_ends(usual_s, set_s):
    """After half of it, as every other."""
    assert look_after_s(60.0, usual_s, set_s) <= notice_after_s(60.0, usual_s, set_s)


def test_progress_is_a_step_and_before_the_first_a_section(make):
    """Of the ranks that are waited for: one that has gone ahead and waits does not hide them."""
    ahead = make.rank(0, make.beat(5.0), beats=11, beat_ago=5.0)
    behind = make.rank(1, make.beat(90.0), beats=10, beat_ago=90.0)
    assert without_progress_s([ahead, behind], make.now) == pytest.approx(90.0)
    starts = make.rank(0, beats=0, created=30.0, world_size=1)
    assert without_progress_s([starts], make.now) == pytest.approx(30.0)


def test_a_stall_that_is_shorter_than_asked_for_is_none(make):
    """So that nobody has to find out who is waited for while all come on."""
    states = [make.rank(0, make.beat(2.0), beat_ago=2.0), make.rank(1, make.beat(5.0), beat_ago=5.0)]
    assert without_progress_s(states, make.now, 6.0) == 0.0
    assert without_progress_s(states, make.now, 4.0) == without_progress_s(states, make.now)


@pytest.mark.parametrize("page", [{"done": True}, {"paused": "labels"}])
def test_who_is_done_or_paused_does_not_stall(make, page):
    """Neither has anything to come on with."""
    assert without_progress_s([make.rank(0, idle=900.0, **page)], make.now) == 0.0


def test_a_notice_is_told_again_after_twice_the_time_and_closed_when_steps_go_on(make):
    """20, 40, 80 s; then one step of the named rank ends it."""
    notices = StallNotices(60.0)
    stuck = make.rank(1, make.beat(20.0), beats=10, beat_ago=20.0, activity=STUCK)
    told = [for_s for for_s in range(5, 100) if notices.due(judged(1), [stuck], float(for_s), 0.1)]
    assert told == [10, 20, 40, 80]
    assert not notices.went_on([stuck], 90.0)
    assert notices.lasted_s == 90.0
    assert notices.went_on([make.rank(1, make.beat(0.1), beats=11, beat_ago=0.1)], 0.1)
    assert not notices.is_open


def test_a_busy_rank_is_told_later_and_not_again_for_what_it_has_survived(make):
    """An evaluation of 50 s each epoch is told once; one that takes much longer is told."""
    notices = StallNotices(60.0)
    stack = make.beat(50.0), make.section("eval", 50.0)
    busy = make.rank(0, *stack, beats=10, beat_ago=50.0, activity=Activity(Kind.BUSY))
    assert not notices.due(judged(0, in_s=3600.0), [busy], 29.0, 0.1)
    assert notices.due(judged(0, in_s=3600.0), [busy], 50.0, 0.1)
    notices.close()
    assert not notices.due(judged(0, in_s=3600.0), [busy], 70.0, 0.1)
    assert notices.due(judged(0, in_s=3600.0), [busy], 80.0, 0.1)


def test_nothing_is_told_again_just_before_the_verdict(make):
    """The verdict says more; the first notice comes in any case."""
    notices = StallNotices(60.0)
    stuck = make.rank(1, make.beat(20.0), beats=10, beat_ago=20.0, activity=STUCK)
    assert not notices.due(judged(1, in_s=1.0), [stuck], 23.0, 0.1)
    assert notices.due(judged(1, in_s=1.0), [stuck], 25.0, 0.1)
    assert not notices.due(judged(1, in_s=9.0), [stuck], 51.0, 0.1)


def test_who_is_waited_for_since_a_moment_is_not_named(make):
    """Rank 1 has waited for rank 0 until now; that it is behind says nothing before four seconds, a fifth of 20."""
    notices = StallNotices(60.0)
    states = [make.rank(r, make.beat(30.0), beats=10, beat_ago=30.0, activity=STUCK) for r in range(2)]
    assert [notices.due(judged(0, in_s=3600.0), states, for_s, 1.0) for for_s in (17.0, 18.0, 19.0)] == [False] * 3
    assert [notices.due(judged(1), states, for_s, 1.0) for for_s in (30.0, 33.0, 34.0)] == [False, False, True]


def test_a_second_rank_that_comes_and_goes_delays_no_notice(make):
    """Rank 1 wakes up now and then; it is rank 0 that everybody has waited for all the time."""
    notices = StallNotices(60.0)
    states = [make.rank(r, make.beat(30.0), beats=10, beat_ago=30.0, activity=STUCK) for r in range(2)]
    looks = [judged(0, 1) if for_s % 2 else judged(0) for for_s in range(7, 12)]
    assert [notices.due(look, states, float(7 + i), 0.1) for i, look in enumerate(looks)] == [False] * 3 + [True, False]


@pytest.mark.parametrize("kind", ["held", "quiet"])
def test_what_a_person_holds_is_no_news(make, kind):
    """A debugger and a pause are known to whoever uses them."""
    assert not StallNotices(60.0).due(judged(1, kind=kind), [make.rank(1, activity=STUCK)], 1e4, 0.1)


def test_the_line_says_who_where_and_when(make):
    """Rank, what it does, the user's own line, the section, who waits in what, and the verdict."""
    flight = {0: make.flight("late", 0), 1: make.flight("late", 1)}
    states = [
        make.rank(0, make.beat(20.0), world_size=2),
        make.rank(1, make.beat(20.0), make.section("fwd", 20.0), activity=STUCK),
    ]
    text = notice_text(judged(1), states, {1: FRAMES}, flight, 20.0, now=0.0)
    assert text == (
        "no progress for 20 s: rank 1 stuck at train.py:15 in forward (section 'fwd'); "
        "rank 0 waits for it in all_reduce 4; verdict in 40 s"
    )


def test_the_line_of_a_busy_rank_says_that_it_is_slow(make):
    """Nothing is threatened."""
    busy = make.rank(1, make.beat(50.0), activity=Activity(Kind.BUSY))
    text = notice_text(judged(1, in_s=3600.0), [busy], {}, {}, 50.0, now=0.0)
    assert text == "no progress for 50 s: rank 1 busy (section 'step'); slow, not hung"


@pytest.fixture
def line(make, monkeypatch):
    """The line of a rank that does so, at noon in a zone that is known."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def say(activity, *, due=None, storage=None, frames=FRAMES, **state):
        rank = make.rank(
            1, make.beat(50.0), make.section(state.pop("section", "fwd"), 50.0), activity=activity, **state
        )
        judgement = Judgement("slow", waited_for=(1,), due=due or Due(40.0, "stuck_after 60 s"))
        return notice_text(judgement, [rank], {1: frames}, {}, 20.0, now=43200.0, storage=storage)

    yield say
    monkeypatch.undo()
    time.tzset()


def test_a_wait_that_ends_by_itself_is_told_with_its_end(line):
    """The time of the day, and in how long; nothing is threatened where it is granted."""
    sleeps = Activity(Kind.STUCK, 20.0, On.SLEEP, ends_in_s=38.0, worked_s=20.0)
    assert line(sleeps, due=Due(40.0, "...", waits_for_end=True)) == (
        "no progress for 20 s: rank 1 sleeps until 12:00:38, in 38 s, at train.py:15 in forward (section 'fwd'); "
        "no hang unless it is still there in 40 s"
    )
    locked = line(attrs.evolve(sleeps, on=On.LOCK, ends_in_s=86400.0))
    assert "rank 1 waits on a lock until 1970-01-02 12:00:00, in 86400 s, at" in locked
    assert locked.endswith("verdict in 40 s")
    before = line(attrs.evolve(sleeps, ends_in_s=15.0))
    assert before.endswith("no hang unless it is still there in 40 s")
    assert "rank 1 stuck at train.py:15" in line(attrs.evolve(sleeps, ends_in_s=1e6))
    woken = line(Activity(Kind.STUCK, 20.0, On.LOCK, woke_s=20.0))
    assert "rank 1 stuck, its wait ended at 11:59:40 and it has not moved since, at train.py:15" in woken


def test_who_computes_with_a_stack_that_stays_is_called_busy(line):
    """Most such ranks evaluate: the line threatens nothing that lies ten minutes ahead."""
    text = line(Activity(Kind.SPINNING, 300.0), due=Due(282.0, "its own deadline"))
    assert "rank 1 busy (the same stack for 300 s) at train.py:15" in text
    assert text.endswith("; slow, and no hang unless it is still there in 282 s")


OURS = (f"{Path(resilience_sdk.__file__).parent}/checkpoint/store.py:9 create", *FRAMES[1:])
SAVING = ("/usr/lib/python3.11/site-packages/torch/serialization.py:10 save", *FRAMES[1:])


@pytest.mark.parametrize(
    ("activity", "state", "expected"),
    [
        (Activity(Kind.STUCK, 20.0, On.FILE), {"frames": SAVING}, True),
        (Activity(Kind.STUCK, 20.0, On.LOCK), {"section": "checkpoint"}, True),
        (Activity(Kind.UNKNOWN, 20.0), {"section": "checkpoint", "process_state": "D"}, True),
        (Activity(Kind.WAITING, 20.0, On.FILE_LOCK), {"section": "checkpoint"}, True),
        (Activity(Kind.STUCK, 20.0, On.FILE), {"frames": OURS}, True),
        (
            Activity(Kind.STUCK, 20.0, On.FILE),
            {"frames": ("/x/train.py:15 write_shard", "/x/trainer.py:9 _save_checkpoint")},
            True,
        ),
        # A name alone is no proof: what the function calls trains, waits before no file, or it does more than it says.
        (Activity(Kind.STUCK, 20.0, On.FILE), {"frames": (FRAMES[1], "/x/trainer.py:9 _save_checkpoint")}, False),
        (Activity(Kind.STUCK, 20.0, On.FILE), {"frames": ("/x/train.py:15 save_model_and_train",)}, False),
        (Activity(Kind.STUCK, 20.0, On.SOCKET), {"frames": ("/x/train.py:15 save_state",)}, False),
        (Activity(Kind.STUCK, 20.0, On.FILE), {"section": "activation_checkpoint"}, False),
        (
            Activity(Kind.STUCK, 20.0, On.FILE),
            {"frames": (FRAMES[1], "/x/trainer.py:9 saved_models")},
            False,
        ),
        (Activity(Kind.STUCK, 20.0, On.FILE), {}, False),
        (Activity(Kind.BUSY), {"frames": SAVING}, False),
        (Activity(Kind.STUCK, 20.0, On.SLEEP), {"section": "checkpoint"}, False),
        (Activity(Kind.STUCK, 20.0, On.STOPPED_CHILD), {"section": "checkpoint"}, False),
        (Activity(Kind.STOPPED, 20.0), {"section": "checkpoint", "process_state": "T"}, False),
        (Activity(Kind.WAITING, 20.0, On.COLLECTIVE), {"section": "checkpoint", "in_collective": True}, False),
    ],
)
def test_a_save_that_stands_still_is_called_so(line, activity, state, expected):
    """By its section or its stack, with the place; not while it works, nor where something else explains it."""
    text = line(activity, storage={1: "/mnt/a.pt (nfs on /mnt)"}, **state)
    assert ("rank 1 stuck in a save (checkpoint_stall) at train.py:15" in text) is expected
    assert (", into /mnt/a.pt (nfs on /mnt)" in text) is expected


def test_who_saves_is_found_in_any_thread():
    """Ours at exit, torch's in a thread; not a thread that waits, nor a training."""
    assert saving_frames([FRAMES, SAVING]) == SAVING
    assert saving_frames([OURS]) == OURS
    assert saving_frames([FRAMES, ("/home/me/train.py:9 prefetch",)]) == ()


def test_a_checkpoint_that_is_not_read_to_its_end(line):
    """The other direction, by the same name."""
    frames = ("/usr/lib/python3.11/site-packages/torch/serialization.py:10 load", *FRAMES[1:])
    text = line(Activity(Kind.STUCK, 20.0, On.FILE), frames=frames, storage={1: "/mnt/a.pt (nfs on /mnt)"})
    assert "rank 1 stuck reading a checkpoint (checkpoint_stall) at train.py:15" in text
    assert ", from /mnt/a.pt (nfs on /mnt)" in text


def test_a_place_is_a_section_and_a_line_of_the_user(make):
    """Frames of libraries differ from one look to the next."""
    stack = (make.beat(1.0), make.section("fwd", 1.0))
    assert place_of(stack, FRAMES) == "fwd at /home/me/train.py:15 forward"
    assert place_of((), ()) == "- at ?"


def test_a_rank_that_came_back_under_another_process_is_another_stall(make):
    """A new attempt of the same rank has other marks."""
    notices = StallNotices(60.0)
    stuck = make.rank(1, make.beat(20.0), beats=10, beat_ago=20.0, activity=STUCK)
    assert not notices.due(judged(1), [stuck], 18.0, 0.1)
    assert notices.due(judged(1), [stuck], 20.0, 0.1)
    again = attrs.evolve(stuck, snapshot=attrs.evolve(stuck.snapshot, pid=4321))
    assert notices.went_on([again], 1.0)
