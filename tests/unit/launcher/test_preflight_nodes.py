"""When a preflight across nodes is held, and what its verdict means for a node."""

import json
import os
import socket
from contextlib import closing
from types import SimpleNamespace

import pytest
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.membership import Peer
from resilience_sdk.core.journal import Journal
from resilience_sdk.launcher import preflight_nodes
from resilience_sdk.launcher.preflight import Look
from resilience_sdk.launcher.preflight_nodes import NodesPreflight, decide, give_up, meeting_place
from resilience_sdk.launcher.rendezvous import StoreLostError
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.system import programs

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
    assert give_up("127.0.0.1", server.port, "earlier", "a: it was killed", 20) == ended
    assert give_up("127.0.0.1", server.port, "now", "a: it was killed", 20) == {"broken": "a: it was killed"}
    assert json.loads(PrefixStore("now", server).get("end")) == {"broken": "a: it was killed"}


def test_a_store_that_is_gone_is_not_waited_for():
    """Its node has ended."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreLostError):
        give_up("127.0.0.1", port, "now", "a: it was killed", limit_s=0.2)


@pytest.fixture
def without_its_process(monkeypatch, tmp_path):
    """Return how the second of two nodes asks, whose own process dies before it says a word."""
    monkeypatch.setattr(programs, "PAIRWISE_PREFLIGHT", programs.Program("sys.exit(3)"))
    monkeypatch.setattr(preflight_nodes, "_ASK_S", 0.3)
    journal = Journal(tmp_path, writer="launcher", host="b", boot_id="", job="job")

    def made(store):
        own = {"node": 1, "node_name": "b", "store": store, "holds_store": False, "cleared": False}
        agent = SimpleNamespace(peers=peers("x", "y"), attempt=0, nodes=2, **own)
        return NodesPreflight(agent, Look(), 1, inbox, journal)

    with SignalInbox(["SIGTERM"]) as inbox:
        yield made


def test_a_node_follows_the_end_that_the_others_came_to(without_its_process):
    """Its own process died: it starts, meets again or leaves as they say, not as it thinks."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = PrefixStore("resilience/preflight/x", server)
    for out, follows in (((), True), ((0,), False)):
        place.set("end", json.dumps({"verdict": {**verdict(*out), "findings": [], "events": []}}))
        assert without_its_process(PrefixStore("run", server)).hold() is follows
    place.set("end", json.dumps({"verdict": {**verdict(1), "findings": [], "events": []}}))
    assert without_its_process(PrefixStore("run", server)).hold().exit_code == 76


def test_where_it_is_the_first_to_end_nothing_follows_for_all(without_its_process, capfd):
    """And that is said."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert without_its_process(PrefixStore("run", server)).hold() is True
    told = json.loads(PrefixStore("resilience/preflight/x", server).get("end"))
    assert told == {"broken": "b: its process left with 3 and without an answer"}
    assert "the job starts without: b: its process left with 3" in capfd.readouterr().err


def test_where_the_system_lacks_something_the_job_starts_without(without_its_process, monkeypatch, capfd):
    """A Python that knows a function less stops nobody's job."""
    monkeypatch.delattr(os, "pipe")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert without_its_process(PrefixStore("run", server)).hold() is True
    assert "the job starts without: b: module 'os' has no attribute" in capfd.readouterr().err


def test_a_node_that_cannot_ask_meets_again_once(without_its_process, capfd):
    """The others may have ended, or meet again themselves."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    asks = without_its_process(SimpleNamespace(host="127.0.0.1", port=port))
    assert (asks.hold(), asks.hold()) == (False, True)
    told = capfd.readouterr().err
    assert "how the preflight across nodes ended cannot be asked" in told
    assert "the job starts without" in told
