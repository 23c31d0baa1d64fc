"""One node gathers for all: the lowest-numbered that is there, through a real store."""

import json
import uuid

import pytest
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.bus import Gathering, Turn
from resilience_sdk.monitor.stragglers import OWN, PEERS
from resilience_sdk.straggler.window_messages import NodePieces


def test_node_0_gathers_and_the_next_one_takes_over_when_it_is_silent():
    """And gives it back when node 0 signs again."""
    first, second, third = (Turn(node, 1.0, 0.0) for node in range(3))
    assert first.look("0:1", 100.0)
    now, word = 0.0, "0:1"
    while now < 20.0:
        now += 1.0
        word = f"0:{int(now)}"
        assert not second.look(word, now)
        assert not third.look(word, now)
    while not second.look(word, now):
        assert not third.look(word, now)
        now += 0.25
    assert 25.0 <= now <= 26.0
    for count in range(20):
        assert second.look(f"1:{count}", now)
        assert not third.look(f"1:{count}", now)
        now += 1.0
    assert not second.look("0:21", now)


@pytest.fixture
def store():
    """A store that nobody else uses."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return PrefixStore(uuid.uuid4().hex, server)


def test_messages_of_all_nodes_come_to_the_first_and_only_there(tmp_path, store):
    """As they were written; one that has told nothing is simply not there."""
    nodes = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        nodes.append(Gathering(folder, 0, number, 4, "resilience/0"))
        if number != 2:
            (folder / OWN).write_text(NodePieces(0, number, f"n{number}", 1, ()).to_text())
    for node in reversed(nodes):
        node.look(store)
    told = json.loads((tmp_path / "0" / PEERS).read_text())
    assert (told["attempt"], told["gathers"], sorted(told["nodes"])) == (0, True, ["1", "3"])
    assert told["nodes"]["3"] == (tmp_path / "3" / OWN).read_text()
    assert not (tmp_path / "1" / PEERS).exists()


def test_a_message_of_another_attempt_is_not_carried(tmp_path, store):
    """A monitor may be late with its last word."""
    (tmp_path / OWN).write_text(NodePieces(3, 1, "n1", 1, ()).to_text())
    Gathering(tmp_path, 4, 1, 2, "resilience/4").look(store)
    assert not store.check(["resilience/4/durations/1"])
