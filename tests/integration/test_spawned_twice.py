"""One process starts its ranks a second time: nothing that was decided, or that happened, before counts for them."""

from __future__ import annotations

import sys

import pytest
from harness import job

PYTHON = (sys.executable,)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["asked", "dies"])
def test_the_second_start_is_a_job_of_its_own(tmp_path, ends):
    """It has the parent, the key and the attempt of the first one, whose monitor may still be there."""
    with job(tmp_path, "spawned_twice.py", "fork", ends, command=PYTHON) as run:
        assert run.finish() == 0, run.screen
        assert run.out.split("\n")[1:2] == ["start 1 ended with 75"], run.screen + run.out
        counts = [int(path.read_text()) for path in run.told("left-1-*")]
        assert len(set(counts)) == 1
        assert counts[0] >= 120  # not where the first one stopped, and not before it was asked
        assert len(counts) == 2
        kinds = {"asked": ["preemption", "preemption"], "dies": ["crash", "preemption"]}
        assert [incident["kind"] for incident in run.incidents()] == kinds[ends], run.screen
        assert not run.left_behind()
