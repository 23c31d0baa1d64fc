"""What an attempt left behind tells about its progress."""

import traceback
import types

import attrs
import pytest

from resilience_sdk.attribution.diagnosis import LogFindings
from resilience_sdk.attribution.exits import classification
from resilience_sdk.postmortem.crash import (
    attempt_end,
    completed_a_step,
    crash_incident,
    first_death,
    first_traceback,
    headline,
)
from resilience_sdk.postmortem.facts import AttemptFacts, EndedBy, EndingRequest, RankExit, RankTrace, ServerEnd


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
    facts = AttemptFacts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS)
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
    facts = AttemptFacts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS, job_told=job_told)
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
    facts = AttemptFacts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS)
    shown = first_traceback(facts, first_death(facts))
    assert shown == ("the first to fail was rank 1:\nTraceback ...\nValueError: bad" if others else None)


def test_a_traceback_that_all_ranks_have_printed_is_not_printed_again():
    """The same bug on each rank: whatever of it stands last on the screen tells it."""
    exits = [RankExit(rank, rank, 100 + rank, 1, rank, rank, False) for rank in range(2)]
    traces = {rank: raised(rank, "ValueError", "bad") for rank in range(2)}
    facts = AttemptFacts(attempt=0, node="n", exits=exits, traces=traces, ended_by=EndedBy.RANKS)
    first = first_death(facts)
    assert first.culprits == (0, 1)
    assert first_traceback(facts, first) is None


def lost_server(code, told=(), oom=None):
    """Two ranks that were killed with the fork server."""
    exits = [RankExit(rank, rank, 100 + rank, -9, rank, 5, False, server_lost=True) for rank in range(2)]
    traces = {rank: RankTrace(rank, 100 + rank, None, None, None, None) for rank in range(2)}
    facts = AttemptFacts(
        attempt=0,
        node="n",
        exits=exits,
        traces=traces,
        ended_by=EndedBy.SERVER,
        cgroup_oom=oom,
        lost_server=ServerEnd(99, code),
        server_told=told,
    )
    return facts, first_death(facts)


@pytest.mark.parametrize(
    ("code", "told", "oom", "cause"),
    [
        (-9, (), None, "fork_server_lost"),
        (-9, (), False, "fork_server_lost"),
        (-9, (), True, "host_oom_kill"),
        (-9, (classification("host_oom_kill", 0.95),), None, "host_oom_kill"),
        (-11, (), True, "fork_server_lost"),  # a segmentation fault is no memory kill, whatever else was killed
        (None, (), None, "fork_server_lost"),
    ],
)
def test_a_lost_fork_server_is_nobodys_fault_and_the_memory_killers_where_it_says_so(code, told, oom, cause):
    """No culprit, both ranks are victims, and the attempt costs nothing of the budget."""
    facts, first = lost_server(code, told, oom)
    assert (first.culprits, first.victims, first.classification.cause) == ((), (0, 1), cause)
    assert attempt_end(facts, first).free
    assert "fork server" in headline(facts, first)
    assert "fork server (pid 99)" in first.classification.evidence[-1 if told else 0].text


@pytest.mark.parametrize(("left_with", "cause"), [(None, "rank_abort"), (0, "abort_at_exit")])
def test_the_words_of_an_end_are_not_believed_of_a_script_that_was_in_the_middle(left_with, cause):
    """`terminate called without an active exception` may come from any thread, at any time."""
    said = classification("abort_at_exit", 0.6)
    page = types.SimpleNamespace(script_exit_code=left_with, exit_state="clean", group_left=None)
    trace = RankTrace(0, 100, page, None, None, None)
    exits = [RankExit(0, 0, 100, -6, 0, 5, False)]
    facts = AttemptFacts(attempt=0, node="n", exits=exits, traces={0: trace}, ended_by=EndedBy.RANKS, told={0: (said,)})
    assert first_death(facts).classification.cause == cause
    shared = attrs.evolve(facts, told={}, job_told=LogFindings(said, frozenset()))
    assert first_death(shared).classification.cause == cause


def chained(how):
    """The traceback of an exception that another one led to, in one of the ways there are."""
    try:
        try:
            raise OSError(2, "No such file or directory\nshard 7", "/data/shard-7.tar")
        except OSError as error:
            if how == "from":
                raise RuntimeError("cannot start the epoch") from error
            if how == "from None":
                raise RuntimeError("cannot start the epoch") from None
            raise RuntimeError("cannot start the epoch")  # noqa: B904 - what Python tells as "During handling of"
    except RuntimeError as error:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@pytest.mark.parametrize(("how", "told"), [("from", True), ("from None", False), ("while handling", False)])
def test_what_an_exception_was_raised_from_is_evidence(how, told):
    """The program has put it into its own words, and the fact is below; what was merely handled is no cause."""
    record = {"type": "RuntimeError", "message": "cannot start the epoch", "frames": [], "traceback": chained(how)}
    facts = AttemptFacts(
        attempt=0,
        node="n",
        exits=[RankExit(0, 0, 100, 1, 1, 1, False)],
        traces={0: RankTrace(0, 100, None, record, 1, None)},
        ended_by=EndedBy.RANKS,
    )
    found = crash_incident(facts, first_death(facts), 1.0, None)
    chain = [item.text for item in found.evidence if item.source == "chain"]
    assert chain == (["raised from FileNotFoundError: [Errno 2] No such file or directory"] if told else []), chain


def test_the_request_of_the_culprit_counts_before_those_of_its_victims():
    """A victim fails by the loss of its peer, so its wish is about something else; of several the end of the job."""
    error = {"type": "ValueError", "message": "bad", "frames": ["u.py:1 f"], "user_frame": "u.py:1 f"}
    stop, exclude = EndingRequest("stop", "lost a peer"), EndingRequest("exclude_node", "bad memory")
    exits = [RankExit(rank, rank, 100 + rank, 1, rank, 10 + rank, False) for rank in range(2)]
    culprit = RankTrace(1, 101, None, error, 5, None, request=exclude)
    victim = RankTrace(0, 100, None, None, None, None, request=stop)
    facts = AttemptFacts(attempt=0, node="n", exits=exits, traces={0: victim, 1: culprit}, ended_by=EndedBy.RANKS)
    first = first_death(facts)
    assert first.culprits == (1,)
    assert attempt_end(facts, first).requested == exclude
    silent = attrs.evolve(facts, traces={0: victim, 1: attrs.evolve(culprit, request=None)})
    assert attempt_end(silent, first).requested == stop
    both = attrs.evolve(facts, traces={0: victim, 1: culprit})
    assert attempt_end(both, attrs.evolve(first, culprits=())).requested == stop
