"""Which of several heartbeats tells the steps of a rank, and what a node tells at all."""

from __future__ import annotations

import pytest

from resilience_sdk.straggler.window_messages import Collector

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
