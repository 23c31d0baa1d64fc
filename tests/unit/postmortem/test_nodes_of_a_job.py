"""Between the launchers of a job: words through a real store, and which of them writes the crash incident."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.bus import NodeRelay
from resilience_sdk.core.journal import Journal
from resilience_sdk.monitor.nodes import OWN, PEERS
from resilience_sdk.postmortem.collect import NodeEnd, read_end, reporter, reporter_at_last


@st.composite
def endings(draw):
    """How an attempt ended on every node: some saw a rank die of its own, in an order without ties."""
    nodes = draw(st.integers(1, 5))
    real = draw(st.permutations(range(nodes)))[: draw(st.integers(0, nodes))]
    return {
        node: NodeEnd(
            node, culprits=(node,) if node in real else (), order=real.index(node) + 1 if node in real else None
        )
        for node in range(nodes)
    }


@given(endings(), st.data())
def test_exactly_one_node_reports_whoever_has_heard_what(ends, data):
    """Nodes that decide early, on part of the words, decide as those that know all."""
    final = reporter(ends, len(ends))
    assert final == reporter_at_last(ends)
    known = {node: ends[node] for node in data.draw(st.sets(st.sampled_from(sorted(ends)), min_size=1))}
    assert reporter(known, len(ends)) in (None, final)
    real = [end for end in ends.values() if end.culprits]
    assert not real or ends[final].order == 1


@given(
    st.dictionaries(st.sampled_from(["culprits", "order", "headline", "incident", "hang", "x"]), st.none() | st.text())
)
def test_an_end_that_makes_no_sense_is_read_as_one_without_a_culprit(data):
    """What another node wrote is distrusted."""
    assert read_end(1, data).culprits == ()


def test_the_monitors_verdict_comes_before_any_death():
    """Deaths that follow a hang are its end."""
    ends = {0: NodeEnd(0, culprits=(0,), order=1), 1: NodeEnd(1, hang=True, incident="0001-hang")}
    assert reporter(ends, 2) == 1


@pytest.fixture
def store():
    """The store of a rendezvous."""
    return PrefixStore("rendezvous", TCPStore("localhost", 0, is_master=True, wait_for_workers=False))


@pytest.fixture
def relays(tmp_path, store):
    """Two nodes' relays in attempt 0, and their page directories."""
    journal = Journal(tmp_path / "journal", writer="launcher", host="h", boot_id="b", job="j")
    (tmp_path / "journal").mkdir()
    relays = []
    for node in (0, 1):
        (tmp_path / str(node)).mkdir()
        relays.append(NodeRelay(tmp_path / str(node), journal))
        relays[node].start(store, 0, node, 2)
    yield relays
    for relay in relays:
        relay.stop()
    journal.close()


def await_text(path, part, timeout_s=10.0):
    """Wait until a file holds a text and return all of it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.exists() and part in (text := path.read_text()):
            return text
        time.sleep(0.005)
    raise AssertionError(f"{part} did not come")


def tell(folder, **facts):
    """Write what a monitor tells."""
    (folder / "new").write_text(json.dumps({"attempt": 0, "urgent": True, **facts}))
    (folder / "new").replace(folder / OWN)


def test_what_one_monitor_tells_reaches_the_other(tmp_path, relays, monkeypatch):
    """At once, when it is urgent; what is of another attempt does not travel."""
    monkeypatch.setattr("resilience_sdk.cluster.bus._CALM_S", 3600.0)  # what is not urgent is read that rarely
    tell(tmp_path / "0", attempt=7, words="old")
    tell(tmp_path / "1", words="new")
    told = json.loads(await_text(tmp_path / "0" / PEERS, "new"))
    assert told["attempt"] == 0
    assert json.loads(told["nodes"]["1"])["words"] == "new"
    tell(tmp_path / "1", words="newer")
    await_text(tmp_path / "0" / PEERS, "newer")
    assert not (tmp_path / "1" / PEERS).exists()


def test_ends_are_told_with_the_order_of_the_faults(relays):
    """Who saw a rank fail first has number 1, on both nodes."""
    relays[1].note_fault()
    relays[1].tell_end(NodeEnd(1, culprits=(3,)).to_json())
    first = relays[0].wait_for_ends(lambda ends, faults, waited: 1 in ends and faults == 1, 10.0)
    assert read_end(1, first[1]) == NodeEnd(1, culprits=(3,), order=1)
    relays[0].note_fault()
    relays[0].tell_end(NodeEnd(0, culprits=(0,)).to_json())
    both = relays[1].wait_for_ends(lambda ends, faults, waited: len(ends) == 2, 10.0)
    assert read_end(0, both[0]).order == 2


def test_a_lost_store_is_said_once_and_blocks_nobody(tmp_path, store, capfd):
    """The journal has one line about it, and ending takes no longer than it should."""
    (tmp_path / "journal").mkdir()
    journal = Journal(tmp_path / "journal", writer="launcher", host="h", boot_id="b", job="j")
    relay = NodeRelay(tmp_path, journal)

    class Gone:
        def clone(self):
            raise ConnectionError("refused")

    relay.start(Gone(), 0, 0, 2)
    began = time.monotonic()
    assert relay.wait_for_ends(lambda *_: False, 0.2) == {}
    relay.tell_end({})
    relay.stop()
    assert time.monotonic() - began < 5.0  # the pause before the store is tried again
    journal.close()
    (line,) = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert (line["event"], line["what"]) == ("degraded", "relay")


def test_a_node_that_wants_to_join_is_no_fault():
    """Ranks that only lost their peers lost them to it; one that died of its own comes before."""
    joins = NodeEnd(1, headline="another node wants to join", joins=True)
    assert reporter({0: NodeEnd(0), 1: joins}, 3) == reporter_at_last({0: NodeEnd(0), 1: joins}) == 1
    died = NodeEnd(2, culprits=(2,), order=1)
    assert reporter_at_last({0: NodeEnd(0), 1: joins, 2: died}) == 2
    assert read_end(1, joins.to_json()) == joins
