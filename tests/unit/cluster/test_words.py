"""Words between nodes through a real store: the first wish wins everywhere, and a node that is cut off goes alone."""

import json
import os
import threading
import uuid

import pytest
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.bus import Board, Exchange
from resilience_sdk.cluster.membership import Channel
from resilience_sdk.preemption.agreement import FileCell, Proposal, StopDecision


@pytest.fixture(scope="module")
def server():
    """A store's server."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def store(server):
    """A store that nobody else uses."""
    return PrefixStore(uuid.uuid4().hex, server)


def arrived(store):
    """Return when all that was sent over this connection is in the store: `append` waits for no answer."""
    store.check(["anything"])


class Node:
    """One node's words, and what carries them."""

    def __init__(self, folder, store):
        folder.mkdir()
        (folder / "attempt-0.json").write_text(json.dumps({"nodes": 8}))
        self.folder, self.store = folder, store.clone()
        self.words, self.board = FileCell(folder, 0), Board(folder, 0, "resilience/0")

    def publish(self):
        published = self.board.publish(self.store)
        arrived(self.store)
        return published

    def fetch(self):
        self.board.fetch(self.store)


def test_of_wishes_at_once_one_becomes_the_word_of_all(tmp_path, store):
    """Eight nodes wish at the same moment, half of them the one, half the other."""
    nodes = [Node(tmp_path / str(number), store) for number in range(8)]
    together = threading.Barrier(8)

    def wish(number):
        nodes[number].words.decide(1, (StopDecision.COMMIT, StopDecision.VOID)[number % 2])
        nodes[number].words.propose(Proposal(1, 100 + number))
        together.wait()
        assert nodes[number].publish()

    threads = [threading.Thread(target=wish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({node.words.decision(1) for node in nodes}) == 1
    assert len({node.words.proposal(1) for node in nodes}) == 1
    assert nodes[0].words.decision(1) in (StopDecision.COMMIT, StopDecision.VOID)
    assert not nodes[0].publish()


def test_a_word_reaches_who_did_not_wish_it(tmp_path, store):
    """With one question; a wish that comes later is told what stands."""
    first, second = Node(tmp_path / "a", store), Node(tmp_path / "b", store)
    second.fetch()
    assert second.words.proposal(1) is None
    first.words.propose(Proposal(1, 7))
    first.publish()
    second.words.propose(Proposal(1, 9))
    second.fetch()
    assert first.words.proposal(1) == second.words.proposal(1) == Proposal(1, 7)
    assert not second.publish()


@pytest.mark.parametrize(
    ("others", "known"), [(StopDecision.VOID, StopDecision.VOID), (StopDecision.COMMIT, StopDecision.ALONE)]
)
def test_what_a_node_decided_alone_stands_there(tmp_path, store, others, known):
    """Its ranks went on: only when all went on, too, it is as if the node had known."""
    first, second = Node(tmp_path / "a", store), Node(tmp_path / "b", store)
    second.words.decide(1, StopDecision.VOID)
    second.words.decide_alone(1)
    first.words.decide(1, others)
    first.publish()
    second.publish()
    assert second.words.decision(1) is known


def test_strange_words_in_the_store_make_no_files(tmp_path, store):
    """What another process wrote there is distrusted."""
    node = Node(tmp_path / "a", store)
    store.append("resilience/0/words", "../../evil=commit\nstop-1=../x\nstop-2\n\nstop-3=commit\n\xff")
    arrived(store)
    before = set(os.listdir(node.folder))
    node.fetch()
    assert set(os.listdir(node.folder)) - before == {"word-a0-stop-3"}


def test_what_nodes_tell_is_gathered_by_node(tmp_path, store):
    """Whole files only, of this attempt; nothing is published twice, and what stood there before is removed."""
    keys = {node: f"stop/{node}" for node in range(3)}
    (tmp_path / "peers").write_text("of an attempt before")
    one = Exchange(tmp_path, Channel("own", "peers"), attempt=1, keys=keys, node=0)
    assert not (tmp_path / "peers").exists()
    for text in ("", "[]", '{"attempt": 0, "urgent": true}'):
        (tmp_path / "own").write_text(text)
        assert not one.publish(store)
    assert not one.has_told
    (tmp_path / "own").write_text('{"attempt": 1, "urgent": true}')
    assert one.publish(store)
    assert one.has_told
    assert not one.publish(store)
    (tmp_path / "2").mkdir()
    two = Exchange(tmp_path / "2", Channel("own", "peers"), attempt=1, keys=keys, node=2)
    two.fetch(store)
    told = json.loads((tmp_path / "2" / "peers").read_text())
    assert told["attempt"] == 1
    assert {node: json.loads(text)["attempt"] for node, text in told["nodes"].items()} == {"0": 1}
