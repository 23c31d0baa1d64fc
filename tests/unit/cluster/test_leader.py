"""The rule for whoever does alone what every node of a job could do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.cluster import leader
from resilience_sdk.cluster.leader import SignedLead


def test_node_0_leads_and_the_next_one_takes_over_when_it_is_silent():
    """And gives it back when node 0 signs again."""
    first, second, third = (SignedLead(node, 1.0, 0.0) for node in range(3))
    assert first.poll("0:1", 100.0)
    now, word = 0.0, "0:1"
    while now < 20.0:
        now += 1.0
        word = f"0:{int(now)}"
        assert not second.poll(word, now)
        assert not third.poll(word, now)
    while not second.poll(word, now):
        assert not third.poll(word, now)
        now += 0.25
    assert 25.0 <= now <= 26.0
    for count in range(20):
        assert second.poll(f"1:{count}", now)
        assert not third.poll(f"1:{count}", now)
        now += 1.0
    assert not second.poll("0:21", now)


NODES = st.dictionaries(st.integers(0, 5), st.sets(st.integers(0, 20), min_size=1, max_size=3), min_size=1, max_size=5)


@given(NODES, st.sets(st.integers(0, 20), max_size=3), st.randoms(use_true_random=False))
def test_all_nodes_agree_on_who_reports(ranks_of, culprits, random):
    """The order is the same however the evidence was gathered; the lowest culprit's node is the first."""
    order = leader.by_culprit(tuple(culprits), {node: sorted(ranks) for node, ranks in ranks_of.items()})
    shuffled = list(ranks_of)
    random.shuffle(shuffled)
    again = {node: random.sample(sorted(ranks_of[node]), len(ranks_of[node])) for node in shuffled}
    assert leader.by_culprit(random.sample(sorted(culprits), len(culprits)), again) == order
    assert sorted(order) == sorted(ranks_of)
    known = culprits & {rank for ranks in ranks_of.values() for rank in ranks}
    lowest = min(known or {rank for ranks in ranks_of.values() for rank in ranks})
    assert lowest in ranks_of[order[0]]


@given(st.permutations(range(5)), st.floats(0.1, 10))
def test_each_node_leaves_the_lead_to_those_before_it_for_a_turn_each(order, turn_s):
    """So no two step in at the same moment of one silence."""
    waits = [leader.patience_s(order, node, turn_s) for node in order]
    assert waits == [pytest.approx(place * turn_s) for place in range(5)]


@given(st.dictionaries(st.integers(0, 8), st.floats(0, 100)), st.integers(0, 8))
def test_of_those_who_were_heard_lately_the_first_leads(heard_at_s, me):
    """Of all nodes that hear the same, one leads, and a node that nobody ever heard hinders nobody."""
    lately = {node for node, at_s in heard_at_s.items() if at_s >= 50.0}
    assert leader.leads(me, heard_at_s, 50.0) == (me <= min(lately, default=me))
