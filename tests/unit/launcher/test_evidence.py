"""What an attempt left behind tells about its progress."""

import types

import pytest

from resilience_sdk.attribution.exits import classification
from resilience_sdk.attribution.log_tail import LogFindings
from resilience_sdk.launcher.attempt_files import RankTrace
from resilience_sdk.launcher.decision import EndedBy
from resilience_sdk.launcher.evidence import Facts, completed_a_step, crash_incident, first_death, first_traceback
from resilience_sdk.launcher.ranks import RankExit


def page(beats=0, declared=False, source="none"):
    """As much of a page as progress is told from."""
    return types.SimpleNamespace(beats=beats, declared=declared, beat_source=source)


@pytest.mark.parametrize(
    ("pages", "lasted_s", "told"),
    [
        ([page(), page(beats=1)], 1.0, True),
        ([page(declared=True)], 1.0, False),
        ([page(declared=True)], 3600.0, False),
        ([page(source="optimizer")], 3600.0, False),
        # Killed before its first beat, or left in argparse: no sign yet, and no time to have trained.
        ([page()], 5.0, False),
        ([None], 5.0, False),
        ([], 5.0, False),
        # A script that never gives a sign may have trained for this long.
        ([page()], 61.0, None),
        ([None], 61.0, None),
        # Nobody watched.
        ([None], None, None),
    ],
)
def test_silence_is_told_from_a_start_that_failed(pages, lasted_s, told):
    """Without any sign of progress, the time that the attempt lasted decides whether that means anything."""
    assert completed_a_step(pages, lasted_s) is told


def ended(*codes, raised=None):
    """The ends of ranks in the order in which they were seen; one of them had raised before all."""
    exits = [RankExit(rank, rank, 100 + rank, code, at, 10 + at, False) for at, (rank, code) in enumerate(codes)]
    traces = {rank: RankTrace(rank, 100 + rank, None, None, None, None) for rank, _ in codes}
    if raised is not None:
        error = {"type": "ValueError", "message": "bad", "frames": ["u.py:1 f"], "user_frame": "u.py:1 f"}
        traces[raised] = RankTrace(raised, 100 + raised, None, error, 5, None)
    facts = Facts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS)
    found = crash_incident(facts, first_death(facts), 1.0, None)
    return [item.text for item in found.evidence if item.source == "order"]


def test_the_order_of_the_deaths_is_one_account():
    """Who was first, and the others after it: never again from the start, in the order of the launcher's looks."""
    first = "rank 1 was the first to die of its own: it exited with code 1"
    assert ended((1, 1), (0, -6), raised=1) == [first, "the others after it: rank 0 died by SIGABRT"]
    late = " (some of these were gone before it: its process took longer to end)"
    assert ended((0, -6), (1, 1), raised=1) == [first, f"the others after it: rank 0 died by SIGABRT{late}"]
    assert ended((1, 1), raised=1) == [first]


def died(told, *ranks):
    """Rank 1 aborted; the log that all ranks share says this of these."""
    exits = [RankExit(rank, rank, 100 + rank, code, rank, rank, False) for rank, code in enumerate((0, -6))]
    traces = {rank: RankTrace(rank, 100 + rank, None, None, None, None) for rank in range(2)}
    job_told = LogFindings(classification(told, 0.9), frozenset(ranks))
    facts = Facts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS, job_told=job_told)
    return first_death(facts)


@pytest.mark.parametrize(
    ("told", "ranks", "cause"),
    [
        ("cuda_illegal_memory_access", (1,), "cuda_illegal_memory_access"),
        ("cuda_illegal_memory_access", (), "cuda_illegal_memory_access"),
        ("storage_full", (0,), "rank_abort"),  # which rank 0 got over
    ],
)
def test_the_log_of_all_ranks_speaks_for_the_rank_that_died(told, ranks, cause):
    """Not where it speaks of another one; it names no other culprit in any case."""
    found = died(told, *ranks)
    assert (found.culprits, found.classification.cause) == ((1,), cause)


def raised(rank, kind, message):
    """The trace of a rank that left an exception with its traceback."""
    record = {"type": kind, "message": message, "frames": [], "traceback": f"Traceback ...\n{kind}: {message}\n"}
    return RankTrace(rank, 100 + rank, None, record, rank, None)


@pytest.mark.parametrize("others", [True, False])
def test_the_first_traceback_is_shown_again_where_others_came_after_it(others):
    """With one rank's alone on the screen there is nothing to repeat."""
    exits = [RankExit(rank, rank, 100 + rank, 1, order, order, False) for order, rank in enumerate((1, 0))]
    silent = RankTrace(0, 100, None, None, None, None)
    lost = raised(0, "RuntimeError", "[pair.cc:1] Connection closed by peer [::1]:1")
    traces = {1: raised(1, "ValueError", "bad"), 0: lost if others else silent}
    facts = Facts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS)
    shown = first_traceback(facts, first_death(facts))
    assert shown == ("the first to fail was rank 1:\nTraceback ...\nValueError: bad" if others else None)
