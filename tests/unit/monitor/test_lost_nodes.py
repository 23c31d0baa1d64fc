"""Nodes that are not heard any more: when their ranks may be blamed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.hang.timeouts import Limit
from resilience_sdk.hang.timers import RunningTimer
from resilience_sdk.monitor.node_summary import SILENT_S, NodeSummary, RankSummary, lost_states

S = 1_000_000_000


def timer(limit_s, elapsed_s=2.0, *, first=False):
    """A step that was entered so long before its node was last heard."""
    return RunningTimer("step", "heartbeat", elapsed_s, Limit(limit_s, "learned"), first)


def heard(*ranks, node=1, attempt=0, ending=False):
    """What a node said last."""
    return NodeSummary(attempt, node, f"host{node}", now_ns=0, ranks=ranks, ending=ending)


def lost(summary, silent_s, *, attempt=0, nodes=2, known=(0,)):
    """Ranks that are lost so long after that."""
    return lost_states({summary.node: summary}, {summary.node: 0}, attempt, nodes, int(silent_s * S), known)


def test_a_silent_node_is_lost_when_its_ranks_would_be_late():
    """Not before the silence is longer than any slow turn, nor before the deadline of what they were busy with."""
    assert lost(heard(RankSummary(1, timers=(timer(3600.0, 0.1),))), SILENT_S + 0.1)  # it was passing through
    summary = heard(RankSummary(1, timers=(timer(20.0),)))
    assert lost(summary, SILENT_S - 0.1) == []
    assert lost(summary, 17.9) == []
    (state,) = lost(summary, 18.1)
    assert (state.rank, state.node, state.snapshot) == (1, "host1", None)
    assert state.silent_s == pytest.approx(18.1)


@pytest.mark.parametrize(
    "summary",
    [
        heard(RankSummary(1, timers=(timer(3600.0),))),
        heard(RankSummary(1, timers=(timer(1.0), timer(3600.0, first=True)))),
        heard(RankSummary(1), RankSummary(2, timers=(timer(3600.0),))),
        heard(RankSummary(1), attempt=1),
        heard(RankSummary(1), ending=True),
        heard(RankSummary(0)),
    ],
    ids=["in time", "first occurrence", "another rank in time", "another attempt", "ending", "known better"],
)
def test_whom_silence_does_not_blame(summary):
    """It may evaluate, compile, or have been told to end."""
    assert lost(summary, 600.0) == []


def test_in_a_large_job_words_come_less_often():
    """As the relay reads less often."""
    assert lost(heard(RankSummary(1)), 40.0, nodes=128) == []
    assert lost(heard(RankSummary(1)), 61.0, nodes=128)


@given(st.floats(0.0, 1e4), st.floats(0.1, 1e4), st.floats(0.0, 1e4))
def test_longer_silence_never_clears(elapsed_s, limit_s, silent_s):
    """Who is lost stays lost while nothing is heard."""
    summary = heard(RankSummary(1, timers=(timer(limit_s, elapsed_s),)))
    if lost(summary, silent_s):
        assert lost(summary, silent_s * 1.5)
