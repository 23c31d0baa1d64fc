"""What travels between nodes: bounded, the same windows on all nodes, and distrusted."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.straggler.window_messages import (
    MOST_BYTES,
    NodePieces,
    Piece,
    Thinning,
    chosen,
    decode,
    pace_s,
    read_row,
    write_amounts,
    write_row,
)

FWD = ("fwd", "compute")
ROWS = st.lists(st.one_of(st.none(), st.integers(0, 1 << 60)), min_size=8, max_size=8)


def piece(index=0, name="fwd", ranks=8):
    row = write_row((12_340_000,) * 8)
    return Piece(name, "compute", index, 8 * index, 8 * index + 7, 1.0, 0.1, dict.fromkeys(range(ranks), row))


@given(ROWS.map(tuple))
def test_rows_survive_the_journey(row):
    """Nanoseconds become seconds with four digits; what is missing stays so."""
    found = read_row(write_row(row))
    expected = [math.nan if value is None else value / 1e9 for value in row]
    assert list(found) == pytest.approx(expected, rel=1e-3, nan_ok=True)


@pytest.mark.parametrize("text", ["", "1,2", "a,b,c,d,e,f,g,h", "1,2,3,4,5,6,7,nan", "1,2,3,4,5,6,7,-1", "inf,,,,,,,"])
def test_what_is_no_row_is_left_out(text):
    """Of one rank; the others stay."""
    assert read_row(text) is None
    broken = attrs.evolve(piece(ranks=2), rows={0: text, 1: "1,1,1,1,1,1,1,1"})
    assert list(broken.decoded()) == [1]


def test_messages_survive_the_journey_and_nothing_else_is_taken():
    """Text of another shape, or too much of it, is no message."""
    told = NodePieces(1, 2, "n2", 7, (piece(),), roles={0: "", 1: "stage-1"})
    assert decode(told.to_text()) == told
    assert decode("{}") is None
    assert decode(told.to_text().replace('"step_s":0.1', f'"step_s":{10**400}')) is None
    assert decode(told.to_text().replace('"turn":7', '"turn":"7"')) is None
    assert decode(" " * (MOST_BYTES + 1)) is None


def test_amounts_are_told_once_for_all_ranks_that_tell_the_same():
    """In any unit; who tells nothing is left out, and so is what is no row."""
    same, other = (1.0, 2.5e-7, 9.0, 4e12, 5.0, 6.0, 7.0, 8.0), (3.0,) * 8
    work = write_amounts({0: same, 1: same, 2: None, 3: other})
    assert sorted(work.values()) == [(0, 1), (3,)]
    told = NodePieces(1, 2, "n2", 7, (attrs.evolve(piece(ranks=4), work=work),))
    heard = decode(told.to_text())
    assert heard == told
    assert heard.pieces[0].amounts() == {0: same, 1: same, 3: other}
    assert attrs.evolve(piece(), work={"1,2": (0,), "x": (1,)}).amounts() == {}
    assert decode(told.to_text().replace("[0,1]", '["0"]')) is None


@pytest.mark.parametrize("nodes", [2, 64, 2000])
def test_a_message_is_bounded_however_much_there_is_to_tell(nodes):
    """Ten sections on 16 ranks at once: the newest window of each fits before older ones; 2,000 nodes stay readable."""
    pieces = [piece(index, f"s{number}", ranks=16) for number in range(10) for index in range(40)]
    found = chosen(pieces, nodes)
    told = NodePieces(0, 1999, "x" * 64, 1, found, roles=dict.fromkeys(range(16), "stage-1")).to_text()
    assert len(told) < 30_000
    assert min(p.index for p in found) >= 37
    bytes_per_s = nodes * len(told) / pace_s(nodes)
    assert bytes_per_s < 500_000
    if nodes == 2:
        assert {p.name for p in found if p.index == 39} == {f"s{number}" for number in range(10)}


def test_a_node_with_more_ranks_than_fit_tells_one_window_at_least():
    """64 ranks are more than a message of one of 2,000 nodes should hold, but one section of them is told."""
    assert len(chosen([piece(index, ranks=128) for index in range(5)], 2000)) == 1


NAMES = ("data", "fwd", "bwd", "comm_wait", "optim", "checkpoint", "loss", "clip", "embed", "head", "log", "zero")


@pytest.mark.parametrize(("nodes", "ranks"), [(64, 8), (256, 16), (2048, 8), (2048, 16)])
def test_sections_take_turns_where_a_message_has_no_room_for_all(nodes, ranks):
    """Every one is told, all nodes tell the same windows, and what is let through fits into the message."""
    sections = [(name, "compute") for name in NAMES]
    one, other = Thinning(nodes), Thinning(nodes)
    one.share(sections, 8 * ranks)
    other.share(reversed(sections), 8 * ranks)
    more = Thinning(nodes)
    more.share([*sections, *((f"of one node {n}", "io") for n in range(20))], 8 * ranks)
    told = set()
    for index in range(128):
        now_s = index * pace_s(nodes)
        through = [section for section in sections if one.lets_through(section, index, now_s)]
        assert through == [section for section in sections if other.lets_through(section, index, now_s)]
        assert {section for section in sections if more.lets_through(section, index, now_s)} <= set(through)
        pieces = [piece(index, name, ranks) for name, _ in through]
        assert len(chosen(pieces, nodes)) == len(pieces)
        told |= set(through)
    assert told == set(sections)


def test_one_node_alone_judges_every_section_every_time():
    """It tells nobody, so nothing has to fit."""
    alone = Thinning(1)
    alone.share([(name, "compute") for name in NAMES], 8 * 4096)
    assert all(alone.lets_through((name, "compute"), 0, 0.0) for name in NAMES)


def test_one_node_alone_judges_many_ranks_half_as_often():
    """At 50 steps a second one window in eight of 4 ranks with 3 sections, one in sixteen of 8 with 4."""
    kept = {}
    for ranks, names in ((4, NAMES[:3]), (8, NAMES[:4])):
        alone = Thinning(1)
        sections = [(name, "compute") for name in names]
        alone.share(sections, 8 * ranks)
        kept[ranks] = sum(alone.lets_through(sections[0], k, k * 0.16) for k in range(4000))
    assert kept[8] == pytest.approx(kept[4] / 2, rel=0.05)
    assert kept[4] == pytest.approx(4000 / 8, rel=0.05)


@given(st.floats(0.001, 2.0), st.integers(0, 1000), st.floats(0.98, 1.02), st.integers(1, 3000))
def test_all_nodes_choose_the_same_windows_or_some_of_the_same(step_s, began, drift, nodes):
    """About one per pace, whatever the speed; a node that measures 2 % more leaves out half at most, or none."""
    one, other = Thinning(nodes), Thinning(nodes)
    window_s = 8 * step_s
    windows = began + math.ceil(40 * max(pace_s(nodes), window_s) / window_s)
    if windows - began > 20_000:
        return
    kept = [k for k in range(began, windows) if one.lets_through(FWD, k, k * window_s)]
    theirs = [k for k in range(began, windows) if other.lets_through(FWD, k, k * window_s * drift)]
    late = began + (windows - began) // 2
    kept, theirs = {k for k in kept if k > late}, {k for k in theirs if k > late}
    assert kept <= theirs or theirs <= kept
    expected = (windows - late) * window_s / max(window_s, pace_s(nodes))
    assert expected / 2.3 - 2 <= len(kept) <= 1.2 * expected + 2
