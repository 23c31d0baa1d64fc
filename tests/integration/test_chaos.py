"""Four episodes of random faults; `python -m tests.chaos` does forty of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.faults import KINDS, draw, jobs, most_steps


@given(st.integers(0, 1 << 32), st.integers(1, 30))
def test_faults_are_drawn_in_the_order_in_which_they_strike(seed: int, number: int) -> None:
    """As many as are asked for, each behind the effect of the one before; by job and attempt none is lost."""
    faults = draw(random.Random(seed), number)
    assert len(faults) == number
    assert faults == draw(random.Random(seed), number)
    steps = [fault.step for fault in faults]
    assert all(
        later > earlier + one.owes.settles for earlier, later, one in zip(steps, steps[1:], faults, strict=False)
    )
    assert steps[-1] <= most_steps(number)
    grouped = jobs(faults)
    assert [fault for attempts in grouped for group in attempts for fault in group] == faults
    for attempts in grouped:
        for group in attempts:
            assert all(fault.owes.ends == "nothing" for fault in group[:-1])


FAULTS = 20


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(900)
def test_random_faults_are_told_rightly_and_cost_nothing_but_time() -> None:
    """Of a fixed seed: the weights are the undisturbed training's, and nobody is blamed who did nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--faults", str(FAULTS), "--seed", "21", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["faults"], found["rightly_told"], found["wrong"]) == (FAULTS, FAULTS, [])
    assert set(found["kinds"]) <= set(KINDS)
