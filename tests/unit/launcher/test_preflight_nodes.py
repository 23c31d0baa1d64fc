"""When a preflight across nodes is held, and what its verdict means for a node."""

import json
import socket
from contextlib import closing

import pytest
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.launcher.meeting import StoreLostError
from resilience_sdk.launcher.peers import Peer
from resilience_sdk.launcher.preflight_nodes import decide, give_up, meeting_place

NAMES = ("a", "b", "c", "d")


def verdict(*out, stop="", unnamed="", store=()):
    """Return a verdict that leaves out these nodes."""
    return {"leave_out": {str(n): "it is slow" for n in out}, "stop": stop, "unnamed": unnamed, "holds_store": store}


def peers(*words):
    """Return peers by their places; one with a star is cleared."""
    return [Peer(NAMES[n], (n,), word.strip("*"), word.endswith("*")) for n, word in enumerate(words)]


@pytest.mark.parametrize(
    ("told", "attempt", "place"),
    [
        (("x", "y", "z"), 0, "x"),
        (("x*", "y", "z*"), 0, "x"),  # one is new
        (("x*", "y*"), 0, None),
        (("x", "y"), 1, None),  # it runs already
        (("", ""), 0, None),
        (("x",), 0, None),
    ],
)
def test_nodes_that_are_not_known_are_tried_before_the_first_attempt(told, attempt, place):
    """All nodes see the same words, so they come to the same answer."""
    assert meeting_place(peers(*told), attempt) == place


def test_a_node_that_was_not_asked_to_takes_no_part_and_nobody_waits_for_it(capfd):
    """It is named."""
    assert meeting_place(peers("x", "", "z"), 0) is None
    assert "no preflight across nodes: b was started without --preflight" in capfd.readouterr().err


def test_sound_nodes_start():
    """At once."""
    assert decide(verdict(), 0, NAMES, least_nodes=4) is True


def test_a_node_that_can_be_spared_leaves_and_the_others_meet_again():
    """With the exit code that asks for another node."""
    assert decide(verdict(2), 0, NAMES, least_nodes=3) is False
    leaves = decide(verdict(2), 2, NAMES, least_nodes=3)
    assert (leaves.exit_code, leaves.others_go_on, leaves.ends_the_job) == (76, True, False)
    assert leaves.reason == "the preflight leaves out c: it is slow"


@pytest.mark.parametrize("node", [0, 2])
@pytest.mark.parametrize(("least", "store"), [(4, ()), (3, (2,))])
def test_where_it_cannot_be_spared_all_end(node, least, store):
    """Too few would be left, or the store of the rendezvous goes with it."""
    ends = decide(verdict(2, store=store), node, NAMES, least_nodes=least)
    assert (ends.exit_code, ends.others_go_on) == (76, False)
    assert ends.reason.endswith("the store of the rendezvous") == bool(store)


def test_where_nobody_is_named_all_end():
    """What has to be cured first, by 77; else by 76."""
    assert decide(verdict(stop="ulimit"), 0, NAMES, least_nodes=1).exit_code == 77
    assert decide(verdict(2, stop="ulimit"), 2, NAMES, least_nodes=1).exit_code == 77
    assert decide(verdict(unnamed="a and b"), 0, NAMES, least_nodes=1).exit_code == 76


def test_a_launcher_whose_process_is_gone_learns_how_the_meeting_ended():
    """From the store; where it had not ended, it ends now, for all alike."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = {"verdict": {"leave_out": {}}}
    PrefixStore("earlier", server).set("end", json.dumps(ended))
    assert give_up("127.0.0.1", server.port, "earlier", "a: it was killed") == ended
    assert give_up("127.0.0.1", server.port, "now", "a: it was killed") == {"broken": "a: it was killed"}
    assert json.loads(PrefixStore("now", server).get("end")) == {"broken": "a: it was killed"}


def test_a_store_that_is_gone_is_not_waited_for():
    """Its node has ended."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreLostError):
        give_up("127.0.0.1", port, "now", "a: it was killed", limit_s=0.2)
