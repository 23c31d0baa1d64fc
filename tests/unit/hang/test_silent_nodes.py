"""A hang in which a whole node is silent: the judge's and the ladder's part in it."""

import attrs

from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.culprit import find_culprits
from resilience_sdk.hang.detect import judge
from resilience_sdk.hang.timeouts import LearnedTimeouts
from resilience_sdk.hang.timers import HangRules, RankState
from resilience_sdk.monitor.node_summary import NodeSummary, RankSummary, lost_states

NOW = 1_000_000_000_000_000


def away(rank, node="host1"):
    """A rank of a lost node."""
    return RankState(rank, node=node, process_state="", silent_s=20.0)


def decide(*states):
    """Judge with nothing learned."""
    return judge(states, LearnedTimeouts(Settings()), NOW, HangRules())


def test_ranks_that_wait_for_a_lost_node_are_hung(make):
    """Only where those here are late; and not where somebody who is heard may be the one that is waited for."""
    waiting = [make.rank(r, make.beat(4000), world_size=3) for r in (0, 1)]
    assert decide(*waiting).kind == "slow"
    assert decide(*waiting, RankState(2)).kind == "slow"
    found = decide(*waiting, away(2))
    assert (found.kind, found.waited_for) == ("confirmed", (2,))
    assert decide(*[make.rank(r, make.beat(4), world_size=3) for r in (0, 1)], away(2)).kind == "quiet"
    busy = make.rank(0, make.section("eval", 5, timeout=9000), world_size=3)
    assert decide(busy, waiting[1], away(2)).kind == "slow"
    four = [attrs.evolve(state, snapshot=attrs.evolve(state.snapshot, world_size=4)) for state in waiting]
    assert decide(*four, away(2)).kind == "slow"  # rank 3 is unseen and not lost


def test_whose_page_says_that_it_may_take_any_time(make):
    """It pauses, or its loop is over: its node may be silent for any reason."""
    for facts in ({"paused": "lunch"}, {"done": True}, {"exit_state": "clean"}):
        page = attrs.evolve(make.rank(1).snapshot, **facts)
        summary = NodeSummary(0, 1, "host1", now_ns=0, ranks=(RankSummary(1, snapshot=page),))
        assert lost_states({1: summary}, {1: 0}, 0, 2, NOW, [0]) == []


def test_who_is_blamed(make):
    """The nodes that are silent; the one that hears nobody; a dead rank before both."""
    here = [make.rank(r, make.beat(40), world_size=3, node=f"host{r}") for r in (0, 1)]
    finding = find_culprits([*here, away(2, "host2")], {}, {}, False)
    assert (finding.culprits, finding.victims, finding.cause) == ((2,), (0, 1), "network_node_unreachable")
    assert "host2 (rank 2)" in finding.evidence[0].text
    finding = find_culprits([here[0], away(1), away(2, "host2")], {}, {}, False)
    assert (finding.culprits, finding.victims) == ((0,), ())
    assert "cut off" in finding.evidence[0].text
    finding = find_culprits([here[0], away(1)], {}, {}, False)
    assert finding.culprits == (1,)
    assert finding.confidence < 0.8
    dead = attrs.evolve(here[1], alive=False)
    assert find_culprits([here[0], dead, away(2, "host2")], {}, {}, False).culprits == (1,)
