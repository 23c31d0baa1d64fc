"""The events of one attempt are found by their place in the journal, and no part of it is read twice."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.postmortem.facts import AttemptJournal


def journal(folder, writer="rank0", **identity):
    """A journal of the job in that folder."""
    return Journal(folder, writer=writer, host="here", boot_id="", **{"job": "job", "attempt": 1, **identity})


def steps(told):
    """The steps of the events so far."""
    return [event["step"] for event in told.events()]


def test_only_this_attempt_of_this_job_counts(tmp_path):
    """A requeued job numbers its attempts as the one before it did; another job may write beside it."""
    journal(tmp_path).emit(Event.STOP_AGREED, step=1)
    told = AttemptJournal(tmp_path, "job", 1)
    journal(tmp_path).emit(Event.STOP_AGREED, step=2)
    journal(tmp_path, "rank1").emit(Event.STOP_AGREED, step=3)
    journal(tmp_path, "rank2", job="other").emit(Event.STOP_AGREED, step=4)
    journal(tmp_path, "rank3", attempt=2).emit(Event.STOP_AGREED, step=5)
    assert steps(told) == [2, 3]
    assert steps(AttemptJournal(tmp_path, "job", 1)) == []


def test_what_was_read_is_not_read_again(tmp_path):
    """The journal of a run that lasts is large, and its end is asked for several times."""
    ours = journal(tmp_path)
    told = AttemptJournal(tmp_path, "job", 1)
    ours.emit(Event.CKPT_COMMIT, step=1)
    assert steps(told) == [1]
    ours.path.write_bytes(b"x" * (ours.path.stat().st_size - 1) + b"\n")
    ours.emit(Event.CKPT_COMMIT, step=2)
    assert steps(told) == [1, 2]
    assert steps(told) == [1, 2]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path):
    """Another node's line may come in two parts over a network file system."""
    ours = journal(tmp_path)
    ours.emit(Event.CKPT_COMMIT, step=1)
    line = ours.path.read_bytes()
    ours.path.write_bytes(b"")
    told = AttemptJournal(tmp_path, "job", 1)
    for end in range(0, len(line) - 1, 7):
        ours.path.write_bytes(line[:end])
        assert steps(told) == []
    ours.path.write_bytes(line)
    assert steps(told) == [1]


@settings(deadline=None, max_examples=25)
@given(looks=st.lists(st.integers(0, 5), max_size=8), seed=st.integers())
def test_however_often_one_looks_each_event_comes_once(tmp_path_factory, looks, seed):
    """By time, whoever wrote them between any two looks."""
    folder, chance = tmp_path_factory.mktemp("journal"), random.Random(seed)
    writers = [journal(folder, f"rank{rank}") for rank in range(3)]
    told = AttemptJournal(folder, "job", 1)
    step = 0
    for written in looks:
        for step in range(step + 1, step + 1 + written):  # noqa: B020 - the count goes on
            chance.choice(writers).emit(Event.CKPT_COMMIT, step=step)
        assert steps(told) == list(range(1, step + 1))
    for writer in writers:
        writer.close()
