"""What nodes tell one another, how fresh it is, and who reports: properties, and the files between them."""

import collections.abc
import enum
import json
import time
import typing
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.settings import Settings
from resilience_sdk.hang.detect import Confirmation, Judgement
from resilience_sdk.hang.evidence import FlightRecord
from resilience_sdk.hang.timers import HangRules, RankState
from resilience_sdk.monitor.evidence import CloseLook
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.node_summary import (
    FRESH_S,
    VERSION,
    HangVerdict,
    NodeSummary,
    RankSummary,
    age_bound_s,
    decode,
    digest,
    encode,
    is_fresh,
    states_of_peers,
)
from resilience_sdk.monitor.nodes import OWN, PEERS, Nodes

PLAIN = {
    int: st.integers(-(1 << 62), 1 << 62),
    float: st.floats(-1e9, 1e9),
    str: st.text(max_size=8),
    bool: st.booleans(),
    type(None): st.none(),
}
RANK = st.integers(0, 1 << 20)
NS = st.integers(0, (1 << 63) - 1)
TEXT = PLAIN[str]


def values_of(kind):
    """Any value of the type of a field."""
    of = typing.get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if typing.get_origin(kind) is tuple:
        return st.lists(values_of(of[0]), max_size=2).map(tuple)
    if typing.get_origin(kind) is collections.abc.Mapping:
        return st.dictionaries(values_of(of[0]), values_of(of[1]), max_size=2)
    return records_of(kind) if attrs.has(kind) else st.one_of(*map(values_of, of))


def records_of(cls, /, **fields):
    """Any record of that class, with these fields drawn so."""
    hints = typing.get_type_hints(cls)
    drawn = {name: values_of(hints[name]) for name in attrs.fields_dict(cls) if name not in fields}
    return st.builds(cls, **drawn, **fields)


RECORDS = records_of(FlightRecord)
RANKS = records_of(RankSummary, rank=RANK)
SUMMARIES = records_of(
    NodeSummary,
    attempt=st.integers(0, 2),
    node=st.integers(0, 3),
    ranks=st.lists(RANKS, max_size=2).map(tuple),
    heard=st.dictionaries(st.integers(0, 3), NS, max_size=4),
    version=st.just(VERSION),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(SUMMARIES)
def test_a_summary_arrives_as_it_was_sent(summary):
    """Nothing is lost or changes its type on the way."""
    assert decode(encode(summary)) == summary


@given(SUMMARIES, st.data())
def test_a_summary_with_anything_wrong_in_it_is_none_at_all(summary, data):
    """Whatever stands in place of a field, decoding returns a valid summary or None, and never raises."""
    told = json.loads(encode(summary))
    told[data.draw(st.sampled_from(sorted(told)))] = data.draw(JSON)
    read = decode(json.dumps(told))
    assert read is None or decode(encode(read)) is not None or read != read  # NaN is a number like others


@given(st.text(max_size=30) | JSON.map(json.dumps))
def test_anything_else_is_no_summary(text):
    """Text from elsewhere does not raise."""
    assert decode(text) is None


@given(RECORDS)
def test_a_digest_keeps_where_every_rank_stands(record):
    """Positions stay what they were; entries only get fewer."""
    short = digest(record)
    assert all(short.groups[name].position == record.groups[name].position for name in short.groups)
    assert all(group.entries.items() <= record.groups[name].entries.items() for name, group in short.groups.items())


@given(st.lists(SUMMARIES, max_size=4), st.integers(0, 3), st.integers(0, 2), NS, st.sets(RANK, max_size=2))
def test_only_what_is_provably_recent_counts(summaries, me, attempt, now_ns, own):
    """No rank is taken from a summary that is stale, of another attempt, of us, ending, or without a close look."""
    states = states_of_peers(summaries, me, attempt, now_ns, own)
    assert len({state.rank for state in states}) == len(states)
    assert not own & {state.rank for state in states}
    good = [s for s in summaries if is_fresh(s, me, attempt, now_ns)]
    assert {state.rank for state in states} == {rank.rank for s in good for rank in s.ranks} - own
    for summary in good:
        assert summary.attempt == attempt
        assert summary.node != me
        assert summary.looked
        assert 0 <= now_ns - summary.heard[me] <= FRESH_S * 1e9


@given(SUMMARIES, st.integers(0, 3), NS, st.integers(1, 1 << 40))
def test_what_is_stale_stays_so(summary, me, now_ns, later_ns):
    """The bound of an age grows with our clock, whatever the other clock says."""
    assert age_bound_s(summary, me, now_ns + later_ns) >= age_bound_s(summary, me, now_ns) or (
        summary.heard.get(me, 0) > now_ns
    )
    moved = attrs.evolve(summary, now_ns=summary.now_ns // 2)
    assert age_bound_s(moved, me, now_ns) == age_bound_s(summary, me, now_ns)


def test_one_word_of_another_node_is_one_look_however_often_it_is_read():
    """A hang is confirmed only when the other node has looked a second time."""
    confirmation = Confirmation()
    judgement = Judgement("confirmed", waited_for=(1,))
    assert not confirmation.agrees(judgement, [RankState(1, now_ns=5)])
    assert not confirmation.agrees(judgement, [RankState(1, now_ns=5)])
    assert confirmation.agrees(judgement, [RankState(1, now_ns=6)])


# -- the files


LOOK = CloseLook(places={}, frames={}, flight={}, positions={}, texts={}, facts=(), cpu={})


def learner(folder):
    """Return what has learned nothing yet."""
    return Learner(folder / "timeouts.json", Settings(), "train.py")


class Pair:
    """Two nodes, and a relay between them that carries when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.pages, self.nodes = [], []
        for node in (0, 1):
            self.pages.append(folder / str(node))
            self.pages[node].mkdir()
            self.nodes.append(Nodes(self.pages[node], learner(folder), HangRules(), "host"))
            self.nodes[node].begin(0, {"node": node, "nodes": 2, "node_name": f"host#{node}"})

    def carry(self, sender: int) -> None:
        """Bring what one node has told to the other."""
        text = (self.pages[sender] / OWN).read_text()
        peers = self.pages[1 - sender] / PEERS
        peers.with_suffix(".new").write_text(json.dumps({"attempt": 0, "nodes": {str(sender): text}}))
        peers.with_suffix(".new").replace(peers)
        self.nodes[1 - sender].read()

    def tell(self, sender: int, *, look=LOOK, wants=False) -> None:
        self.nodes[sender].tell_closely([RankState(sender)], look, 0.0, wants=wants)

    def ranks_seen(self, node: int) -> list[int]:
        return [state.rank for state in self.nodes[node].states([RankState(node)], time.monotonic_ns())]


@pytest.fixture
def pair(tmp_path):
    """Two nodes that have not heard of each other."""
    return Pair(tmp_path)


def test_a_rank_elsewhere_is_seen_once_its_node_has_heard_us_and_looked(pair):
    """Not by a word from before we spoke, nor by one without evidence."""
    pair.tell(1)
    pair.carry(1)
    assert pair.ranks_seen(0) == []  # who knows how long it lay there
    assert not pair.nodes[0].asked()
    pair.tell(0, wants=True)
    pair.carry(0)
    assert pair.nodes[1].asked()
    pair.tell(1, look=None)
    pair.carry(1)
    assert pair.ranks_seen(0) == []
    pair.tell(1)
    pair.carry(1)
    assert pair.ranks_seen(0) == [1]
    assert pair.nodes[0].all_heard()


def test_a_node_that_says_nothing_any_more_is_unseen_again(pair):
    """Its last word wears off by our own clock."""
    pair.tell(0)
    pair.carry(0)
    pair.tell(1)
    pair.carry(1)
    assert pair.ranks_seen(0) == [1]
    now_ns = time.monotonic_ns()
    later = now_ns + int((FRESH_S + 1) * 1e9)
    assert pair.nodes[0].states([RankState(0)], later) == []


def test_words_of_an_earlier_attempt_are_not_heard(pair):
    """Neither its ranks nor its verdict."""
    pair.nodes[1].pass_on(HangVerdict("0001-hang", (1,), "hang_rank_stopped", "rank 1"), [RankState(1)])
    pair.nodes[0].begin(1, {"node": 0, "nodes": 2})
    pair.carry(1)
    assert pair.nodes[0].verdict() is None
    pair.nodes[0].begin(0, {"node": 0, "nodes": 2})
    pair.carry(1)
    assert pair.nodes[0].verdict() == ("host#1", HangVerdict("0001-hang", (1,), "hang_rank_stopped", "rank 1"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"attempt": 0, "nodes": 3}', '{"attempt": 0, "nodes": {"1": 5}}'])
def test_a_garbled_file_is_as_none(pair, text):
    """Nothing is heard, nothing is raised."""
    (pair.pages[0] / PEERS).write_text(text)
    pair.nodes[0].read()
    assert pair.ranks_seen(0) == []


def test_a_job_of_one_node_tells_nobody_anything(tmp_path):
    """No file, and no other pace."""
    nodes = Nodes(tmp_path, learner(tmp_path), HangRules(), "host")
    nodes.begin(0, {})
    nodes.tell_calmly([RankState(0)], ending=False)
    nodes.tell_closely([RankState(0)], LOOK, 0.0, wants=True)
    assert list(tmp_path.iterdir()) == []
    assert nodes.wait_s(0.25) == 0.25
    assert nodes.pages() is None
