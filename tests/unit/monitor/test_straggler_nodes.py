"""What nodes tell one another about durations: each thing once or twice, and not all in one go."""

from __future__ import annotations

import json

import pytest

from resilience_sdk.monitor.stragglers import PEERS, KernelNews, StragglerNodes
from resilience_sdk.straggler import kernels
from resilience_sdk.straggler.window_messages import NodePieces, Piece

NODES = 300


def bring(pages, turns):
    """Write what a launcher brings: a message of each node, with its turn."""
    row = dict.fromkeys(range(2), "1,1,1,1,1,1,1,1")
    texts = {
        str(node): NodePieces(0, node, f"n{node}", turn, (Piece("fwd", "compute", 0, 1, 8, 1.0, 0.1, row),)).to_text()
        for node, turn in turns.items()
    }
    (pages / f".{PEERS}").write_text(json.dumps({"attempt": 0, "gathers": True, "nodes": texts}))
    (pages / f".{PEERS}").replace(pages / PEERS)


@pytest.fixture
def gatherer(tmp_path):
    """The node of number 0."""
    return StragglerNodes(tmp_path, 0, {"node": 0, "nodes": NODES}, "here")


def read(gatherer):
    return [(told.node, told.turn) for told in gatherer.read()]


def test_messages_of_many_nodes_are_read_in_several_goes(tmp_path, gatherer):
    """Each is read once, and those that wait are not overtaken by the news of others."""
    turns = dict.fromkeys(range(1, NODES), 1)
    bring(tmp_path, turns)
    goes = [read(gatherer)]
    turns[1] = 2
    bring(tmp_path, turns)
    goes += [read(gatherer) for _ in range(4)]
    assert max(map(len, goes)) < NODES / 2
    assert goes[-1] == []
    told = [one for go in goes for one in go]
    assert len(told) == len(set(told))
    assert set(told) == {(node, 1) for node in range(1, NODES)} | {(1, 2)}
    assert told[-1] == (1, 2)
    turns[NODES - 1] = 2
    bring(tmp_path, turns)
    assert read(gatherer) == [(NODES - 1, 2)]  # at once: what was read before is not read again


def test_what_is_replaced_before_it_was_read_is_not_read(tmp_path, gatherer):
    """The newest message of a node counts."""
    bring(tmp_path, dict.fromkeys(range(1, NODES), 1))
    read(gatherer)
    bring(tmp_path, dict.fromkeys(range(1, NODES), 2))
    told = [one for _ in range(5) for one in read(gatherer)]
    assert {turn for _, turn in told} == {2}


def test_a_window_of_kernels_is_told_twice(tmp_path):
    """One message may be lost; more would only be longer. The next window is told again."""
    stem = tmp_path / "0-3-77"

    def sample(window):
        rows = tuple(kernels.KernelTime(f"k{number}", 4, 1e-3, 4e-3) for number in range(40))
        kernels.publish(stem.with_name(stem.name + kernels.SUFFIX), kernels.KernelWindow(window, rows))

    news = KernelNews()
    assert news.of([(3, stem)]) == {}
    sample(1)
    for _ in range(2):
        assert news.of([(3, stem)])[3].window == 1
    assert news.of([(3, stem)]) == {}
    sample(2)
    found = news.of([(3, stem)])[3]
    assert (found.window, len(found.kernels)) == (2, 16)
