"""One node gathers for all, through a real store."""

import json
import uuid

import pytest
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.bus import Gathering
from resilience_sdk.monitor.stragglers import OWN, PEERS
from resilience_sdk.straggler.window_messages import NodePieces


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
