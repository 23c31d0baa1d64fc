"""All ranks agree by themselves from some place on, as one of them is seen by no monitor."""

from __future__ import annotations

import math

import pytest

from resilience_sdk.preemption import listener as rank
from resilience_sdk.preemption.context import NO_PAGES, NoJournal, PreemptionContext
from resilience_sdk.preemption.listener import Checks, Listener
from resilience_sdk.preemption.signals import Handlers
from resilience_sdk.recorder import page_layout as at


class Journal(NoJournal):
    """Keeps what it is told."""

    def __init__(self):
        self.told = []

    def emit(self, event, **facts):
        self.told.append((event.value, facts))


@pytest.fixture
def listener(monkeypatch):
    """What listens in this process, which has a monitor."""
    words = memoryview(bytearray(8 * at.LANES_AT)).cast("Q")
    side = PreemptionContext(words, NO_PAGES, Journal(), 0, (), math.inf, wakeup=lambda: -1, is_alone=True)
    listener = Listener(side, Handlers(words, NO_PAGES, 0, ()), rank._flag_changed)
    monkeypatch.setattr(rank, "_side", side)
    monkeypatch.setattr(rank, "_me", listener)
    before = rank._asked
    rank._ask(listener)
    yield listener
    rank._ask(before)


def test_who_had_a_monitor_asks_it_no_more(listener):
    """Nothing asks before; behind it each check does."""
    listener.handlers.note(at.NOTICE_REQUEST)
    assert not rank.check()
    rank.leave_to_ranks()
    assert rank.check()
    rank.leave_to_ranks()
    assert rank.check()


def test_where_a_rank_cannot_take_part_it_is_named_when_a_stop_is_asked_for(listener, capsys):
    """Nobody waits for it, neither before nor behind that; it is said once."""
    rank.leave_to_ranks(deaf=[3])
    assert not rank.check()
    assert not capsys.readouterr().err
    listener.handlers.note(at.NOTICE_REQUEST)
    assert [rank.check() for _ in range(2)] == [False, False]
    assert capsys.readouterr().err.count("rank 3 cannot be recorded") == 1
    [degraded] = [facts for event, facts in listener.journal.told if event == "degraded"]
    assert degraded["culprits"] == [{"rank": 3}]


def test_who_begins_to_listen_later_agrees_so_too(listener):
    """The first check may come behind it."""
    rank.leave_to_ranks(deaf=[3])
    side = rank._side
    assert (side.has_coordinator(), side.first_check(7), side.deaf) == (False, 7, (3,))


def test_a_process_that_nothing_can_tell_is_left_alone(monkeypatch):
    """It has no side."""
    monkeypatch.setattr(rank, "_side", None)
    assert not rank.is_heard()
    rank.leave_to_ranks()
    assert isinstance(rank._me, Checks)
