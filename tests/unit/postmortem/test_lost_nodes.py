"""A whole node went away: who says so, and on what evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.attribution.exits import classification
from resilience_sdk.attribution.first_death import FirstDeath
from resilience_sdk.cluster.bus import LifeSigns
from resilience_sdk.cluster.membership import NodeMissingError, Peer, introduce
from resilience_sdk.postmortem import collect

PEERS = (Peer("host0", (0, 1)), Peer("host1", (2, 3)), Peer("host2", (4,)))
ONLY_SYMPTOMS = FirstDeath((), (0, 1), classification("network_partition", 0.3))


@given(st.sets(st.integers(0, 2)), st.dictionaries(st.integers(0, 2), st.floats(0, 60)))
def test_nobody_is_gone_who_has_told_or_gives_signs(told, silent_s):
    """With a store that answers, silence is looked at, never presumed."""
    found = collect.gone_nodes(PEERS, dict.fromkeys(told), silent_s, None)
    for node, peer in enumerate(PEERS):
        assert (peer in found) == (node not in told and silent_s.get(node, 0.0) >= collect.SILENT_S)
    assert collect.all_settled(3, dict.fromkeys(told), silent_s) == (len(told) + len(found) == 3)


def test_with_the_store_its_host_is_gone():
    """What others did not tell means nothing then; where the host is not known by that name, nobody is blamed."""
    assert collect.gone_nodes(PEERS, {1: None}, {}, "host0") == (PEERS[0],)
    assert collect.gone_nodes(PEERS, {1: None}, {}, "head.cluster") == ()
    assert collect.gone_nodes(PEERS[:2], {1: None}, {}, "head.cluster") == (PEERS[0],)
    assert collect.gone_nodes(PEERS, {0: None}, {}, "host0") == ()


def test_the_verdict_names_the_ranks_and_restarts():
    """Of the node that is gone; the ranks that only lost their peers are victims."""
    found = collect.blame(ONLY_SYMPTOMS, [PEERS[1]], None)
    assert (found.culprits, found.victims) == ((2, 3), (0, 1))
    assert (found.classification.cause, found.classification.action) == (collect.CAUSE, "restart")
    assert collect.headline_of_lost([PEERS[1]]) == "host1 (ranks 2, 3) is gone: it died, or the network to it is cut"
    by_store = collect.blame(ONLY_SYMPTOMS, [PEERS[0]], "host0")
    assert by_store.classification.confidence < found.classification.confidence
    assert "store of the rendezvous at host0" in by_store.classification.evidence[0].text


@pytest.fixture
def store():
    """The store of a rendezvous."""
    return PrefixStore("rendezvous", TCPStore("localhost", 0, is_master=True, wait_for_workers=False))


def test_a_count_that_moves_is_a_sign_of_life(store):
    """Whatever the other node's clock says."""
    signs = [LifeSigns("a", node, 3) for node in range(3)]
    assert signs[0].silent_s(0.0) == {}
    for turn in range(1, 21):
        signs[0].give(store, 0.6 * turn)
        signs[1].give(store, 0.6 * turn)
        signs[0].look(store, 0.6 * turn)
    silent = signs[0].silent_s(12.0)
    assert silent[1] <= 1.2
    assert silent[2] == pytest.approx(19 * 0.6)


def test_nodes_take_over_the_highest_number_and_know_one_another(store):
    """Two launchers on one host are told apart; one node alone asks nobody."""
    store.set("resilience/attempt/1", '[4, "a", [1], "place", true]')
    store.set("resilience/attempt/2", '[0, "b", [2], "", false]')
    number, peers = introduce(store, 0, 3, 2, Peer("a", (0,)))
    assert number == 4
    assert peers == (Peer("a#0", (0,)), Peer("a#1", (1,), "place", True), Peer("b", (2,)))
    assert introduce(None, 0, 1, 2, Peer("a", (0,))) == (2, (Peer("a", (0,)),))


def test_a_node_that_came_and_says_nothing_is_named(store, monkeypatch):
    """No attempt begins without it."""
    monkeypatch.setattr("resilience_sdk.cluster.membership._INTRODUCE_S", 0.1)
    with pytest.raises(NodeMissingError, match="node 1 of 2"):
        introduce(store, 0, 2, 0, Peer("a", (0,)))
