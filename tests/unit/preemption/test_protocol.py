"""The agreement on a stop: explored over all interleavings, and its parts as functions."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from exploration import Job, explore

from resilience_sdk.preemption.agreement import (
    TEARDOWN,
    CoordinatorMove,
    Proposal,
    RankView,
    StopDecision,
    coordinator_move,
    lead_of,
    next_proposal,
    pace,
    pack,
    unpack,
)


@pytest.mark.parametrize(
    "job",
    [
        Job((2,), checks=3, monitors_die=True),
        Job((1, 1), checks=2),
        pytest.param(Job((2,), checks=2, rounds=2, monitors_die=True), marks=[pytest.mark.slow, pytest.mark.release]),
        pytest.param(Job((1, 1), checks=2, relays_die=2), marks=[pytest.mark.slow, pytest.mark.release]),
        pytest.param(Job((1, 1), checks=2, monitors_die=True), marks=[pytest.mark.slow, pytest.mark.release]),
    ],
    ids=str,
)
def test_no_interleaving_deadlocks_or_stops_apart(job):
    """All ranks stop at one check, or none does; only a node that was cut off, and says so, may go on by itself.

    Larger jobs, of half a million states: `python -m tests.bench --only interleavings`.
    """
    found = explore(job)
    assert not found.stuck
    assert not found.split
    assert found.stopped
    assert found.states > 10_000


@pytest.mark.parametrize(
    "job",
    [
        Job((2,), checks=2, naive="no decision"),
        Job((2,), checks=2, monitors_die=True, naive="no timeout"),
    ],
    ids=str,
)
def test_the_exploration_finds_what_is_wrong_with_simpler_protocols(job):
    """A stop without a decision, and waiting for a coordinator without ever giving up."""
    found = explore(job)
    assert found.split or found.stuck


def test_control_words_hold_a_round_and_a_check():
    """Packed into one word and back; neither nothing nor a teardown is a proposal."""
    proposal = Proposal(round=65_534, at=(1 << 48) - 1)
    assert unpack(pack(proposal)) == proposal
    assert pack(proposal) < TEARDOWN
    assert unpack(0) is unpack(TEARDOWN) is None
    assert next_proposal(65_534, [1], 2) is None


@given(st.lists(st.builds(RankView, st.integers(0, 9), st.integers(0, 3)), min_size=1), st.integers(1, 9))
def test_only_acknowledgements_of_all_ranks_make_a_stop(ranks, at):
    """Whatever else is known or not: nothing is decided for a rank that did not say that it knows."""
    move = coordinator_move(Proposal(2, at), None, ranks)
    assert (move is CoordinatorMove.COMMIT) == all(rank.acknowledged == 2 for rank in ranks)
    assert coordinator_move(Proposal(2, at), StopDecision.ALONE, ranks) is CoordinatorMove.WAIT


def test_the_first_lead_grows_with_the_rate_of_checks_and_with_the_way():
    """Slow loops stop after two more checks; a loop of 1 ms gets the time that words need, more between nodes."""
    assert lead_of(1, 0.0) == lead_of(1, 0.03) == lead_of(1, 0.03, nodes=2) == 2
    assert lead_of(1, 1000.0) == 201
    assert lead_of(1, 1000.0, nodes=2) == 1201
    assert lead_of(1, 1000.0, nodes=160) == 1 + 1200 * pace(160) == 12_001


@given(st.integers(1, 65_534), st.floats(0, 1e6), st.integers(1, 4096))
def test_each_void_round_doubles_the_lead_up_to_a_bound(round_, rate, nodes):
    """Also for a monitor that has not seen the rounds before."""
    lead, following = lead_of(round_, rate, nodes), lead_of(round_ + 1, rate, nodes)
    assert 2 <= lead <= following <= 1 << 24
    assert following == min(1 << 24, 2 * lead) or (rate > 0 and following == lead >= lead_of(5, rate, nodes))


@given(st.integers(1, 65_534), st.floats(100, 1e6))
def test_rounds_that_were_void_before_the_rate_was_known_do_not_put_off_the_stop(round_, rate):
    """A loop of microseconds passes a dozen proposals in its first moment: it stops seconds later, not minutes."""
    assert lead_of(round_, rate) <= 4.0 * rate
