"""A rank whose passes are not those of the others: it has lost one, has one more, or began anew."""

from __future__ import annotations

import math
import random

import pytest

from resilience_sdk.straggler.verdicts import Rules
from resilience_sdk.straggler.windowing import WINDOW_STEPS, SectionWindow

from .windows import Fleet


def lengths(count: int) -> list[float]:
    """Return how long each step is, the same on all ranks: sequences whose length varies fourfold."""
    chance = random.Random(7)
    return [math.exp(chance.uniform(0.0, math.log(4.0))) for _ in range(count)]


def run(ranks: int, windows: int, lag: int, slower: float = 1.0, rules: Rules | None = None) -> Fleet:
    """Let rank 1 be `lag` passes ahead of the others, and be slower."""
    fleet, length = Fleet(ranks, rules), lengths(WINDOW_STEPS * windows + 64)
    for _ in range(windows):
        factor = lambda rank, step: length[step + 32 + lag] * slower if rank == 1 else length[step + 32]  # noqa: E731
        fleet.show(SectionWindow("fwd", "compute", fleet.durations(factor)))
    return fleet


@pytest.mark.parametrize(("ranks", "lag"), [(4, 1), (8, -1), (24, 9)])
def test_who_has_lost_a_pass_is_not_blamed_for_the_lengths_of_the_sequences(ranks: int, lag: int):
    """Its ratios to the others are chance, which its own scatter shows. Without that rule it is named all the time."""
    assert run(ranks, 60, lag).changes == []
    assert run(ranks, 60, lag, rules=Rules(own_z=0.0)).changes


@pytest.mark.parametrize("ranks", [4, 8])
def test_and_is_still_found_where_it_is_slow_beyond_chance(ranks: int):
    """Two and a half times as long as the others."""
    found = {change.verdict.ranks for change in run(ranks, 20, 1, slower=2.5).changes}
    assert found == {(1,)}


def test_who_is_slow_in_every_second_step_only_is_found():
    """Its steps scatter as much, but over some windows it is sure enough."""
    fleet = Fleet(8)
    changes = fleet.run(12, lambda rank, step: 2.0 if rank == 1 and step % 2 else 1.0)
    assert {change.verdict.ranks for change in changes} == {(1,)}
