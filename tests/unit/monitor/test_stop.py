"""What nodes tell one another about a stop, who coordinates, and who asked for it."""

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.json_records import to_text
from resilience_sdk.monitor.notices import LeaveRequest, Notices
from resilience_sdk.monitor.stop import OWN, PEERS, NodeStop, StopNodes, decode
from resilience_sdk.preemption.agreement import RankView
from resilience_sdk.preemption.reasons import Asker
from resilience_sdk.recorder import page_layout

VIEWS = st.dictionaries(
    st.integers(0, 9), st.builds(RankView, st.integers(0, 1 << 40), st.integers(0, 1 << 16)), max_size=3
)
STOPS = st.builds(
    NodeStop,
    attempt=st.integers(0, 2),
    node=st.integers(0, 3),
    name=st.text(max_size=5),
    turn=st.integers(0, 1 << 60),
    asked=st.text(max_size=5),
    left_s=st.floats(0, 1e6),
    ranks=VIEWS,
    is_whole=st.booleans(),
    failed=st.booleans(),
)


@given(STOPS)
def test_a_word_arrives_as_it_was_sent(stop):
    """Nothing is lost or changes its type on the way."""
    assert decode(to_text(stop)) == stop


@given(STOPS, st.data())
def test_anything_else_is_none(stop, data):
    """A word of which a part is of another kind is not read at all."""
    told = json.loads(to_text(stop))
    del told["turn" if data.draw(st.booleans()) else "ranks"]
    told[data.draw(st.sampled_from(["attempt", "turn", "left_s"]))] = data.draw(st.none() | st.text() | st.just([]))
    assert decode(json.dumps(told)) is None


class Folder:
    """The page directory of node 1 of 3."""

    def __init__(self, path):
        self.path = path
        self.nodes = StopNodes(path, 0, {"node": 1, "nodes": 3, "node_name": "host#1"}, "host")

    def hear(self, *stops):
        """Put there what other nodes told, and read it."""
        texts = {str(stop.node): to_text(stop) for stop in stops}
        (self.path / "new").write_text(json.dumps({"attempt": 0, "nodes": texts}))
        (self.path / "new").replace(self.path / PEERS)
        self.nodes.read()

    def told(self):
        """Return what was told last."""
        return decode((self.path / OWN).read_text())


@pytest.fixture
def folder(tmp_path):
    """Node 1, which has heard nothing."""
    return Folder(tmp_path)


def stop(node, turn=1, **facts):
    """Return a word of a node."""
    return NodeStop(0, node, f"host#{node}", turn, "rank 3: SIGTERM", 50.0, **facts)


def test_the_first_node_that_speaks_coordinates(folder, monkeypatch):
    """One that repeats itself says nothing new, and is replaced until it speaks again."""
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    assert folder.nodes.coordinates()
    folder.hear(stop(2))
    assert folder.nodes.coordinates()
    folder.hear(stop(0), stop(2))
    assert not folder.nodes.coordinates()
    now += 3.0
    folder.hear(stop(0), stop(2, turn=2))
    assert folder.nodes.coordinates()
    folder.hear(stop(0, turn=2))
    assert not folder.nodes.coordinates()


def test_words_of_ourselves_and_of_other_attempts_are_not_heard(folder):
    """Nor is what is no word."""
    folder.hear(stop(1), NodeStop(1, 2, "x", 1, "y", 1.0))
    assert folder.nodes.others == []
    (folder.path / PEERS).write_text('{"attempt": 0, "nodes": {"2": 5, "0": "{}"}}')
    folder.nodes.read()
    assert folder.nodes.others == []


def test_news_are_told_at_once_and_counts_at_leisure(folder, monkeypatch):
    """An acknowledgement or a failure must not wait; how far everybody is may."""
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now)
    folder.nodes.tell("somebody", 9.0, {1: RankView(5, 0)}, is_whole=True)
    first = folder.told()
    assert (first.node, first.name, first.left_s, first.ranks) == (1, "host#1", 9.0, {1: RankView(5, 0)})
    folder.nodes.tell("somebody", 8.9, {1: RankView(6, 0)}, is_whole=True)
    assert folder.told() == first
    folder.nodes.tell("somebody", 8.9, {1: RankView(6, 1)}, is_whole=True)
    assert folder.told().ranks == {1: RankView(6, 1)}
    folder.nodes.tell("somebody", 8.9, {1: RankView(6, 1)}, is_whole=True, failed=True)
    assert folder.told().failed
    now += 0.2
    folder.nodes.tell("somebody", 8.7, {1: RankView(9, 1)}, is_whole=True, failed=True)
    assert folder.told().ranks == {1: RankView(9, 1)}
    assert folder.told().turn == first.turn + 3


def test_one_node_tells_nobody(tmp_path):
    """No file is written."""
    StopNodes(tmp_path, 0, {}, "host").tell("somebody", 1.0, {}, is_whole=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("", LeaveRequest("preempt", Asker.FILE)),
        ('{"reason": "maintenance\\u001b[31m\\n at 5", "by": "root@head"}', ("maintenance", "root@head")),
        ('{"reason": 5}', LeaveRequest("preempt", Asker.FILE)),
        ("[" * 100_000, LeaveRequest("preempt", Asker.FILE)),
        ("no JSON", LeaveRequest("preempt", Asker.FILE)),
    ],
)
def test_the_file_says_why_and_who(tmp_path, text, asked):
    """Be it empty or anything else, it asks; what it says is one short line without control characters."""
    (tmp_path / "preempt").write_text(text)
    found = Notices(tmp_path, 0.0).look([(0, 0)])
    if isinstance(asked, tuple):
        assert found.reason.startswith(asked[0])
        assert found.reason.isprintable()
        assert found.by == asked[1]
    else:
        assert found == asked


@contextlib.contextmanager
def as_nobody():
    """Be a user who may not read everything, where this is root."""
    if (us := os.geteuid()) == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(us)


@pytest.mark.parametrize("has_file", [False, True])
def test_a_run_directory_that_cannot_be_searched_asks_nobody(tmp_path, has_file):
    """Its rights are lost while the job runs: that is no notice, whatever lies in it."""
    folder = tmp_path / "run"
    folder.mkdir()
    if has_file:
        (folder / "preempt").touch()
    notices = Notices(folder, 0.0)
    assert (notices.look([]) is not None) is has_file
    folder.chmod(0)
    try:
        with as_nobody():
            assert notices.look([]) is None
    finally:
        folder.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own a file of root")
def test_a_file_of_root_asks_also_where_it_cannot_be_read():
    """What it says stays unknown."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "preempt").touch(0o600)
        with as_nobody():
            assert Notices(folder, 0.0).look([]) == LeaveRequest("preempt", Asker.FILE)


def test_a_signal_to_a_rank_comes_before_the_file(tmp_path):
    """Nobody asks where nobody does."""
    notices = Notices(tmp_path, 0.0)
    assert notices.look([(0, 0)]) is None
    (tmp_path / "preempt").mkdir()
    assert notices.look([]) is None
    os.rmdir(tmp_path / "preempt")
    (tmp_path / "preempt").touch()
    assert notices.look([(0, 0), (2, 15)]) == LeaveRequest("rank 2: SIGTERM", Asker.SIGNAL, 2)
    assert notices.look([(1, page_layout.NOTICE_REQUEST)]) == LeaveRequest(
        "rank 1: preemption.request()", Asker.REQUEST, 1
    )
