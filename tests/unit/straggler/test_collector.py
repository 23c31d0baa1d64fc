"""Which of several heartbeats tells the steps of a rank, and what a node tells at all."""

from __future__ import annotations

import pytest

from resilience_sdk.straggler.window_messages import Collector, read_row

MS = 1_000_000


def pieces(beats, looks=12, sections=(("fwd", "compute"),)):
    """Return what two ranks come to that pass everything 8 times a look; `beats`: name -> (how often, ns)."""
    collector, found = Collector(1), []
    collector.present({0: "a", 1: "b"})
    for look in range(looks):
        for rank in (0, 1):
            for name, kind in sections:
                collector.add(rank, name, kind, 0, 8 * look, [10 * MS] * 8)
            for name, (count, took) in beats.items():
                collector.add(rank, name, "heartbeat", 0, count * look, [took] * count)
        found += collector.take(0, 2.0 * look)
    return found


@pytest.mark.parametrize("names", [("step", "eval"), ("eval", "step"), ("train", "eval")])
def test_one_heartbeat_tells_the_steps(names):
    """The usual one, in whatever order they come; else the first. The other one beats four times as often."""
    beats = {name: (32, 5 * MS) if name == "eval" else (8, 100 * MS) for name in names}
    found = pieces(beats)
    assert {piece.passes_per_step for piece in found} == {1.0}
    assert {piece.step_s for piece in found} == {0.1}
    assert [piece.first_step for piece in found] == [piece.index * 8 + 1 for piece in found]


def test_pulses_before_the_first_heartbeat_do_not_stay_the_steps():
    """An optimizer that loads its state may take a step, which is a pulse; a heartbeat of the same name tells more."""
    collector, found = Collector(1), []
    collector.present({0: "a"})
    collector.add(0, "step", "pulse", 0, 0, [100 * MS])
    for look in range(12):
        collector.add(0, "fwd", "compute", 0, 8 * look, [10 * MS] * 8)
        collector.add(0, "step", "heartbeat", 0, 8 * look, [100 * MS] * 8)
        found += collector.take(0, 2.0 * look)
    assert {piece.passes_per_step for piece in found} == {1.0}


def test_the_step_as_a_whole_is_told_where_nothing_else_is():
    """Beside sections that can name somebody it would only take room."""
    step = {"step": (8, 100 * MS)}
    assert {piece.name for piece in pieces(step)} == {"fwd"}
    assert {piece.name for piece in pieces(step, sections=())} == {"step"}
    assert {piece.name for piece in pieces(step, sections=(("wait", "comm"),))} == {"step", "wait"}


def look(collector, passes, take_at):
    """Give what ranks have completed, `(rank, name, kind, start, durations in ms, before)` each, and take pieces."""
    for rank, name, kind, start, took_ms, before in passes:
        collector.add(rank, name, kind, 0, start, [int(ms * MS) for ms in took_ms], before=before)
    return collector.take(50, take_at)


def test_nothing_before_the_first_completed_step_is_compared():
    """Batches are read again, one rank more slowly; the pages have no step yet, so there is no window."""
    collector = Collector(1)
    collector.present({0: "a", 1: "b"})
    found = []
    for at in range(6):
        slow_or_not = [(rank, "data", "io", 8 * at, [20 + 40 * rank] * 8, None) for rank in (0, 1)]
        found += look(collector, slow_or_not, 2.0 * at)
    assert found == []


@pytest.mark.parametrize("ahead", [(1, 1), (40, 40), (40, 23)])
@pytest.mark.parametrize("is_seen", [True, False])
def test_windows_begin_where_the_first_step_has_ended(ahead, is_seen):
    """However many batches a rank has read again, and whether anybody looked meanwhile: equal steps are compared.

    The rank's own steps give the numbers and the passes per step.
    """
    collector = Collector(1)
    collector.present({0: "a", 1: "b"})
    found = []
    if is_seen:
        found += look(collector, [(rank, "data", "io", 0, [900] * ahead[rank], None) for rank in (0, 1)], 0.0)
    for at in range(12):
        passes = []
        for rank in (0, 1):
            before = ahead[rank]
            is_first = at == 0
            lead = [900] * (0 if is_seen else before) if is_first else []
            start = before + 8 * at - len(lead)
            lengths = [10 + step for step in range(8 * at, 8 * at + 8)]
            passes.append((rank, "data", "io", start, lead + lengths, before))
            steps = [3000] * is_first + [100] * 8
            passes.append((rank, "step", "heartbeat", 8 * at + (not is_first), steps, 1))
        found += look(collector, passes, 2.0 * (at + 1))
    assert [piece.index for piece in found] == list(range(12))
    for piece in found:
        rows = [read_row(row) for row in piece.rows.values()]
        assert rows[0] == rows[1] == pytest.approx([(10 + 8 * piece.index + at) / 1000 for at in range(8)], rel=1e-3)
        assert (piece.first_step, piece.last_step) == (51 + 8 * piece.index, 58 + 8 * piece.index)
    assert {piece.passes_per_step for piece in found} == {1.0}
    assert {piece.step_s for piece in found} == {0.1}


def test_passes_before_what_turned_out_to_be_the_first_step_are_dropped():
    """Optimizers took steps while their state was loaded; then the loop begins, and windows with it."""
    collector, found = Collector(1), []
    collector.present({0: "a", 1: "b"})
    for rank in (0, 1):
        collector.add(rank, "data", "io", 0, 0, [20 * MS + 40 * MS * rank] * 4, before=0)
    for at in range(4):
        passes = [(rank, "data", "io", 4 + 8 * at, [10] * 8, 4) for rank in (0, 1)]
        found += look(collector, passes, 2.0 * at)
    assert [piece.index for piece in found] == [0, 1, 2, 3]
    assert {value for piece in found for row in piece.rows.values() for value in read_row(row)} == {0.01}
