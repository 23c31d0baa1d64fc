"""A small version of the simulated fleet of `tests/bench/straggler_fleet.py`: few false flags, most are found."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.bench import straggler_fleet as fleet


@pytest.mark.parametrize("model", fleet.MODELS)
@pytest.mark.parametrize("ranks", [2, 12])
def test_a_healthy_fleet_is_left_in_peace(model: str, ranks: int):
    """No flag in 200 windows."""
    tallies = fleet.clean_windows(model, ranks, 200, np.random.default_rng(3))
    assert tallies["ours"].false == 0


@pytest.mark.parametrize("model", [model for model in fleet.MODELS if not model.startswith(fleet.TOLD)])
@pytest.mark.parametrize(("scope", "ranks"), [("rank", 8), ("node", 24)])
def test_one_that_is_ten_percent_slower_is_found(model: str, scope: str, ranks: int):
    """All of five, most within 24 steps; the reference's rule finds none of them, or flags innocents all the time."""
    tallies = fleet.cell(model, ranks, scope, 0.10, 5, np.random.default_rng(4))
    assert tallies["ours"].recall == 1.0
    assert np.median(tallies["ours"].delays) <= 24
    assert min(tallies["NVRx 0.75"].recall, tallies["NVRx 0.75"].precision) <= 0.2


@pytest.mark.parametrize("scope", ["rank", "node", "all"])
def test_five_percent_is_found_in_time(scope: str):
    """At least eight of ten within 100 steps."""
    tally = fleet.cell("student-t", 16, scope, 0.05, 10, np.random.default_rng(5))["ours"]
    assert tally.recall >= 0.8
    assert tally.wrong == 0


def test_everybody_ten_percent_slower_is_a_global_regression():
    """Named as such, and nobody is blamed."""
    tally = fleet.cell("lognormal", 12, "all", 0.10, 5, np.random.default_rng(6))["ours"]
    assert (tally.recall, tally.wrong) == (1.0, 0)


@pytest.mark.parametrize(("told", "recall"), [(fleet.TOLD, 1.0), ("", 0.0)])
def test_among_lengths_that_vary_it_takes_their_telling_to_see_that(told: str, recall: float):
    """On the same traces: with the lengths told all of five, else none."""
    tally = fleet.cell(f"{told}lengths", 12, "all", 0.10, 5, np.random.default_rng(6))["ours"]
    assert (tally.recall, tally.wrong) == (recall, 0)


def test_the_rules_of_others_are_applied_as_they_are_written():
    """Relative to the fastest, to the own best, and to mean and deviation."""
    durations = np.full((16, 12), 0.1)
    durations[8:, 3] = 0.14  # score 0.714
    flags = fleet.peers(durations)
    assert np.argwhere(flags["NVRx 0.75"]).tolist() == [[1, 3]]
    assert not flags["NVRx 0.7"].any()
    assert np.argwhere(flags["mean + 3 sigma"]).tolist() == [[1, 3]]
    assert not fleet.peers(durations[:, :10])["mean + 3 sigma"].any()  # of ten, none can be three deviations out
