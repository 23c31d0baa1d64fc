"""Ranks whose program does not match end the job the second time, whether they hang or the library aborts them."""

import pytest
from harness import job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("how", ["uneven", "evaluates"])
def test_a_program_that_does_not_match_is_started_twice_and_no_more(tmp_path, how):
    """An unchanged script of two ranks that saves nothing, at default restarts: 77, and it says why."""
    with job(tmp_path, "--nproc-per-node", "2", "--stuck-after", "3", "mismatching.py", how) as run:
        assert run.finish() == 77, run.screen
        assert [incident["cause"] for incident in run.incidents()] == ["user_collective_mismatch"] * 2, run.screen
        assert "user_collective_mismatch came twice behind" in run.screen
        assert "fix the program" in run.screen
