"""What our launcher brings from other nodes is read once, whole, and with distrust."""

import json

import pytest

from resilience_sdk.cluster.membership import NodePlace, PeerFile
from resilience_sdk.core.atomic_write import write_whole


def test_each_replacement_is_news_once(tmp_path):
    """No file is no news, and the same file neither; another attempt's words are none of ours."""
    path = tmp_path / "peers.json"
    file = PeerFile(path)
    assert file.news(1) is None
    write_whole(path, json.dumps({"attempt": 1, "nodes": {"0": "a", "2": "b", "3": 7}, "gathers": True}))
    heard = file.news(1)
    assert heard is not None
    assert (list(heard.texts), heard.gathers) == (["a", "b"], True)
    assert file.news(1) is None
    write_whole(path, json.dumps({"attempt": 0, "nodes": {"0": "c"}}))
    heard = file.news(1)
    assert heard is not None
    assert not heard.texts


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"attempt": 1}', '{"attempt": 1, "nodes": 3}'])
def test_what_is_torn_or_strange_is_no_news(tmp_path, text):
    """And what comes after it is."""
    path = tmp_path / "peers.json"
    file = PeerFile(path)
    path.write_text(text)
    assert file.news(1) is None
    write_whole(path, json.dumps({"attempt": 1, "nodes": {"0": "a"}}))
    assert file.news(1) is not None


def test_a_place_that_nobody_announced_or_announced_strangely_is_that_of_a_single_node():
    """Named by its host."""
    assert NodePlace.of({}, "host7") == NodePlace(0, 1, "host7")
    assert NodePlace.of({"node": True, "nodes": "3", "node_name": ""}, "host7") == NodePlace(0, 1, "host7")
    assert NodePlace.of({"node": 2, "nodes": 3, "node_name": "host7#2"}, "host7") == NodePlace(2, 3, "host7#2")
