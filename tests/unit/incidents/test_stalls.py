"""The stall that stood when somebody ended a job: which notices count, what they are taken for, how it is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.taxonomy import causes
from resilience_sdk.incidents import stall_at, standing_words

STUCK = {
    "rank": 1,
    "node": "n0",
    "step": 40,
    "step_is_global": True,
    "section": "fwd",
    "activity": "stuck",
    "still_s": 41.0,
    "frame": "train.py:15 forward",
    "stack": ["threading.py:320 wait", "train.py:15 forward"],
    "detail": "its thread has used no CPU and made no context switch for 41 s, blocked in futex",
}
IN_ALL_REDUCE = ["/lib/torch/distributed/distributed_c10d.py:9 all_reduce", "train.py:16 step"]


def stall(*ranks, t=141.0, since=100.0, waiting=(0,), host="n0"):
    event = {"event": "stall", "t": t, "host": host, "attempt": 0, "since": since, "for_s": t - since}
    return {**event, "ranks": list(ranks or (STUCK,)), "waiting": list(waiting), "verdict_in_s": 19.0, "text": "..."}


def over(why, t, after_s=None, host="n0"):
    return {"event": "stall_end", "t": t, "host": host, "attempt": 0, "why": why, "after_s": after_s}


def awaited(rank, activity, **facts):
    return {**STUCK, "rank": rank, "activity": activity, **facts}


def hang_at(at, *told, **facts):
    """The incident of the stall that stood at that time; None where none did."""
    found = stall_at(told, at, **facts)
    return None if found is None else found.hang(0, at, "SIGTERM to the launcher on n0")


PROOF = {
    "category": "user",
    "cause": "user_collective_mismatch",
    "confidence": 0.8,
    "culprits": [0, 1],
    "evidence": [{"source": "flight", "text": "at number 26 the ranks disagree"}],
}


def test_what_was_proven_while_it_stood_is_the_cause_however_it_was_ended():
    """The library's time-out comes before any verdict; nothing of the proof fades with time, or is needed twice."""
    both = [awaited(rank, "waiting", stack=IN_ALL_REDUCE) for rank in (0, 1)]
    found = hang_at(142.0, {**stall(*both, waiting=()), "proof": PROOF}, stall(*both, t=141.5, waiting=()))
    assert (found.category, found.cause, found.confidence) == ("user", "user_collective_mismatch", 0.8)
    assert [culprit.rank for culprit in found.culprits] == [0, 1]
    assert found.evidence[0].text == "at number 26 the ranks disagree"
    for wrong in ({}, [], {**PROOF, "confidence": "sure"}, {**PROOF, "cause": None}):
        assert hang_at(142.0, {**stall(*both, waiting=()), "proof": wrong}).cause == "network_partition"


def test_a_proof_stands_though_a_new_monitor_has_not_watched_for_long():
    """Its first notice knows no more than that somebody waits."""
    both = [awaited(rank, "waiting", stack=IN_ALL_REDUCE) for rank in (0, 1)]
    fresh = stall(awaited(1, "unknown", still_s=1.0), t=500.0)
    assert hang_at(501.0, fresh) is None
    found = hang_at(501.0, {**stall(*both, waiting=()), "proof": PROOF}, fresh)
    assert (found.cause, [culprit.rank for culprit in found.culprits]) == ("user_collective_mismatch", [1])


def test_who_was_busy_while_others_gave_up_on_it_was_late():
    """Only where nobody ended the job from outside: the time-out of a library, which names the network."""
    busy = awaited(1, "busy", detail="it sleeps for 12 s")
    assert hang_at(142.0, stall(busy)) is None
    late = hang_at(142.0, stall(busy), late_counts=True)
    assert (late.category, late.cause, [culprit.rank for culprit in late.culprits]) == ("hang", "hang_rank_late", [1])
    assert late.confidence <= 0.6
    assert late.victims == (0,)
    assert hang_at(142.0, stall(busy, waiting=()), late_counts=True) is None
    both = hang_at(142.0, stall(STUCK | {"rank": 2}, busy), late_counts=True)
    assert [culprit.rank for culprit in both.culprits] == [2]


def test_a_stall_is_a_hang_with_who_where_how_long_and_who_ended_it():
    """The evidence begins with the stall, and the signal comes after it."""
    found = hang_at(150.0, stall(t=115.0), stall())
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.node, culprit.step, culprit.section) == (1, "n0", 40, "fwd")
    assert culprit.stack == tuple(STUCK["stack"])
    assert (found.kind, found.category, found.cause, found.action) == ("hang", "hang", "hang_rank_stuck", "restart")
    assert (found.victims, found.detected_at, found.detection_latency_s) == ((0,), 150.0, 50.0)
    assert [item.text for item in found.evidence] == [
        "no rank made progress for 50 s: the others waited for rank 1 on n0, which is stuck at train.py:15 forward",
        f"rank 1: {STUCK['detail']}",
        "then it was ended: SIGTERM to the launcher on n0",
    ]
    assert standing_words(found) == (
        "rank 1 on n0 made no progress for 50 s at step 40 in section 'fwd' (hang_rank_stuck)"
    )
    assert standing_words(found, 160.0).startswith("rank 1 on n0 made no progress for 60 s")


@pytest.mark.parametrize(
    ("told", "stands"),
    [
        ([stall(), over("went on", 148.0, 46.0)], False),
        ([stall(), over("went on", 150.2, 49.5)], True),  # a stopped rank goes on when it is to leave
        ([stall(), over("ended", 150.1, 50.1)], True),
        ([stall(), over("verdict", 149.0, 49.0)], False),  # that has an incident of its own
        ([stall(t=60.0, since=20.0), over("went on", 90.0, 70.0), stall()], True),
        ([stall(t=60.0, since=20.0), over("went on", 90.0, 70.0)], False),
        ([stall(t=165.0, since=155.0)], False),  # it began when the job was asked to leave already
        ([stall(t=155.0, since=120.0)], True),  # it stood, and was seen a little later
        ([stall(), {"event": "stop_agreed", "t": 151.0, "host": "n0", "rank": 1}], False),
        ([stall(), {"event": "stop_agreed", "t": 151.0, "host": "n0", "rank": 0}], True),
        ([over("went on", 148.0)], False),
        ([stall(host="n1"), over("went on", 148.0, host="n0")], True),
    ],
)
def test_a_stall_stands_unless_it_was_over_before_the_end_began(told, stands):
    """The job was asked to leave at 150. A rank that then came to the agreed stop went on."""
    assert (hang_at(150.0, *told) is not None) == stands


def test_what_a_monitor_told_that_died_is_over_where_the_page_has_moved():
    """Nobody tells the end of its stall: a step that was completed since does."""
    assert hang_at(500.0, stall(), moved={1: 480.0}) is None
    assert hang_at(500.0, stall(), moved={1: 90.0, 0: 480.0}) is not None
    assert hang_at(500.0, stall(), moved={1: 501.0}) is not None


def test_a_rank_that_was_gone_before_does_not_stand_still():
    """Its peers wait for it, and its death says why. One that was ended after the notice did stand."""
    assert hang_at(150.0, stall(awaited(1, "stopped")), ended={1: 120.0}) is None
    assert hang_at(150.0, stall(awaited(1, "stopped")), ended={1: 150.5}).cause == "hang_rank_stopped"
    told = stall(awaited(1, "stopped"), t=142.0), stall(awaited(1, "stopped"), t=160.0)
    assert hang_at(150.0, *told, ended={1: 151.0}).cause == "hang_rank_stopped", "the notice before the end counts"


@pytest.mark.parametrize(
    ("ranks", "named", "cause"),
    [
        ([awaited(1, "stopped")], [1], "hang_rank_stopped"),
        ([awaited(1, "stuck")], [1], "hang_rank_stuck"),
        ([awaited(1, "spinning")], [1], "hang_rank_spinning"),
        ([awaited(1, "polling")], [1], "hang_rank_spinning"),
        ([awaited(1, "stuck"), awaited(2, "stopped")], [1, 2], "hang_rank_stopped"),
        ([awaited(1, "stuck"), awaited(2, "waiting")], [1], "hang_rank_stuck"),
        ([awaited(1, "unknown")], [1], "unknown"),
        ([awaited(rank, "waiting", stack=IN_ALL_REDUCE) for rank in (0, 1)], [], "network_partition"),
        ([awaited(0, "waiting", stack=IN_ALL_REDUCE), awaited(1, "waiting")], [], "unknown"),
        ([awaited(1, "of another version")], [1], "unknown"),
        ([awaited(1, "busy")], None, None),
        ([awaited(1, "unknown", still_s=None)], None, None),
        ([awaited(1, "unknown", still_s=2.0)], None, None),
        ([awaited(1, "busy"), awaited(2, "polling")], None, None),
        ([awaited(1, "busy"), awaited(2, "waiting")], None, None),
        ([awaited(1, "busy"), awaited(2, "stopped")], [2], "hang_rank_stopped"),
    ],
)  # fmt: skip
def test_the_cause_is_what_was_seen_and_who_is_busy_hangs_not(ranks, named, cause):
    """Who polls or waits while another one is busy is a victim; where all wait for each other nobody is accused."""
    found = hang_at(150.0, stall(*ranks, waiting=()))
    if named is None:
        assert found is None
        return
    assert found.cause == cause
    assert [culprit.rank for culprit in found.culprits] == named
    assert causes()[cause].category == found.category
    assert not {culprit.rank for culprit in found.culprits} & set(found.victims)


def test_stalls_of_several_nodes_are_one():
    """Each monitor tells of its own ranks."""
    found = hang_at(150.0, stall(waiting=(0, 2)), stall(awaited(2, "stopped", node="n1"), host="n1", waiting=(0,)))
    assert [(culprit.rank, culprit.node) for culprit in found.culprits] == [(1, "n0"), (2, "n1")]
    assert found.victims == (0,)


@given(
    st.sampled_from(["stopped", "stuck", "spinning", "polling", "unknown", "waiting"]),
    st.floats(10, 1e6),
    st.floats(0, 1e6),
)
def test_the_longer_it_stands_the_surer_and_never_as_sure_as_a_verdict(activity, for_s, longer_s):
    """A stopped rank of a minute is believed more than one of ten seconds; a verdict of the same has 0.95."""
    told = stall(awaited(1, activity, still_s=1e9), t=110.0)
    short, long = hang_at(100.0 + for_s, told), hang_at(100.0 + for_s + longer_s, told)
    assert 0.1 < short.confidence <= long.confidence < 0.9


json = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner))
events = st.fixed_dictionaries(
    {"event": st.sampled_from(["stall", "stall_end", "stop_agreed", "other"]), "t": st.floats(0, 1e10)},
    optional={
        "host": json,
        "since": json,
        "why": json | st.sampled_from(["went on", "ended"]),
        "after_s": json,
        "rank": st.none() | st.integers(0, 3),
        "waiting": json,
        "ranks": json | st.lists(st.dictionaries(st.sampled_from(sorted(STUCK)), json)),
    },
)


@given(st.lists(events), st.floats(0, 1e10))
def test_whatever_a_journal_holds_is_read(told, at):
    """An event of another version or a torn one says what it says, and ends nothing."""
    found = stall_at(told, at)
    if found is not None:
        assert found.hang(0, at, "SIGKILL").to_json()


def test_a_wait_that_was_yet_to_end_is_no_hang():
    """A rank that sleeps until 200 s is told to leave at 150 s; at 210 s it would have stood."""
    sleeps = stall({**STUCK, "wait_ends": 200.0})
    assert hang_at(150.0, sleeps) is None
    assert hang_at(210.0, sleeps).cause == "hang_rank_stuck"
    assert hang_at(150.0, stall({**STUCK, "wait_ends": 200.0}, awaited(2, "stuck"))).culprits[0].rank == 2


def test_a_save_that_stalled_is_called_so_when_the_job_is_ended():
    """With its place; beside a rank that is stuck elsewhere it is a hang."""
    saves = {**STUCK, "cause": "checkpoint_stall", "storage": "/mnt/a.pt (nfs on /mnt)"}
    found = hang_at(150.0, stall(saves))
    assert (found.category, found.cause) == ("storage", "checkpoint_stall")
    assert "rank 1 saves into /mnt/a.pt (nfs on /mnt)" in [item.text for item in found.evidence]
    assert hang_at(150.0, stall(saves, awaited(2, "stuck"))).cause == "hang_rank_stuck"
