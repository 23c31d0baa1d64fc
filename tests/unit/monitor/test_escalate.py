"""Escalation ends ranks for certain, in bounded time, and leaves a trace of every signal."""

import signal
import time

from resilience_sdk.core.journal import read_journal
from resilience_sdk.monitor.hang_response import end_ranks


def signals(journal) -> list[tuple[int, str]]:
    """Return (rank, signal) of every journalled signal in order."""
    events = read_journal(journal.path.parent).events
    return [(event["rank"], event["signal"]) for event in events if event["event"] == "signal_sent"]


def test_sigterm_is_enough_for_a_rank_that_heeds_it(start_rank, journal):
    """No SIGKILL follows, and nobody waits for the rest of the grace."""
    ranks = [start_rank(0), start_rank(1)]
    started = time.monotonic()
    result = end_ranks(
        [rank.target for rank in ranks],
        term_grace_s=20,
        reason="hang",
        journal=journal,
        in_charge=lambda: True,
    )
    assert time.monotonic() - started < 10
    assert (result.ended, result.survivors, result.broken_off) == ((0, 1), (), False)
    assert signals(journal) == [(0, "SIGTERM"), (1, "SIGTERM")]
    assert [rank.process.wait(10) for rank in ranks] == [-signal.SIGTERM] * 2


def test_a_stubborn_rank_is_killed_after_the_grace(start_rank, journal):
    """The grace is one for all ranks together, and the order given is the order of the signals."""
    stubborn, heeding = start_rank(1, "stubborn"), start_rank(0)
    result = end_ranks(
        [stubborn.target, heeding.target],
        term_grace_s=2.0,
        reason="hang",
        journal=journal,
        in_charge=lambda: True,
    )
    assert set(result.ended) == {0, 1}
    assert signals(journal) == [(1, "SIGTERM"), (0, "SIGTERM"), (1, "SIGKILL")]
    assert stubborn.process.wait(10) == -signal.SIGKILL


def test_a_stopped_rank_is_continued_so_that_it_can_end(start_rank, journal):
    """SIGTERM is pending before SIGCONT: the rank ends by SIGTERM and runs none of its own code."""
    rank = start_rank(3)
    rank.stop()
    result = end_ranks([rank.target], term_grace_s=20, reason="hang", journal=journal, in_charge=lambda: True)
    assert result.ended == (3,)
    assert signals(journal) == [(3, "SIGTERM"), (3, "SIGCONT")]
    assert rank.process.wait(10) == -signal.SIGTERM


def test_a_stopped_rank_that_handles_sigterm_is_killed_as_it_stands(start_rank, journal):
    """Continued, it would take the signal for a scheduler's notice and go on behind the verdict."""
    rank = start_rank(3, "stubborn")
    rank.stop()
    result = end_ranks([rank.target], term_grace_s=20, reason="hang", journal=journal, in_charge=lambda: True)
    assert result.ended == (3,)
    assert signals(journal) == [(3, "SIGKILL")]


def test_a_replaced_monitor_sends_nothing_more(start_rank, journal):
    """The generation is asked before every signal: the second rank gets none."""
    ranks = [start_rank(0), start_rank(1)]
    answers = iter([True, False])
    result = end_ranks(
        [rank.target for rank in ranks],
        term_grace_s=20,
        reason="hang",
        journal=journal,
        in_charge=lambda: next(answers),
    )
    assert result.broken_off
    assert signals(journal) == [(0, "SIGTERM")]
    assert ranks[1].process.poll() is None


def test_ranks_that_are_gone_get_no_signal(start_rank, journal):
    """A rank that died meanwhile counts as ended."""
    rank = start_rank(0)
    rank.process.kill()
    rank.process.wait(10)
    result = end_ranks([rank.target], term_grace_s=20, reason="hang", journal=journal, in_charge=lambda: True)
    assert (result.ended, result.survivors) == ((0,), ())
    assert signals(journal) == []
