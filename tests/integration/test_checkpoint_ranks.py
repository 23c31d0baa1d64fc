import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What two ranks report: `(results, what was said)`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RESIL"))}
    env["PYTHONPATH"] = str(HERE.parents[1])
    program = [sys.executable, str(HERE / "checkpointing_ranks.py"), str(tmp_path_factory.mktemp("ranks"))]
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_one_rank_that_cannot_write_means_no_commit(outcome):
    """All ranks learn of the failure, nothing is left of it, and the line names the rank."""
    for report in outcome[0]["ranks"]:
        assert (report["fresh"], report["first"], report["failed"], report["second"]) == (0, True, False, True)
        assert report["last_good"] == 5
        assert report["on_disk"] == ["step-00000005"]
    assert "checkpoint at step 6 failed: rank 1: File too large" in outcome[1]


def test_every_rank_has_its_own_generators_back(outcome):
    """Each rank goes on with its own random numbers."""
    first, second = outcome[0]["ranks"]
    assert first["drawn"] == first["drawn_again"]
    assert second["drawn"] == second["drawn_again"]
    assert first["drawn"] != second["drawn"]


def test_a_time_is_decided_by_rank_0_alone(outcome):
    """Ranks whose clocks disagree save at the same steps: those that are right by rank 0's."""
    first, second = outcome[0]["ranks"]
    assert first["resumed"] == second["resumed"] == 7
    assert first["timed"] == second["timed"] == [17, 27, 37, 47, 57]


def test_ranks_meet_in_the_background(outcome):
    """Each rank's thread writes its part, and each learns whether it was committed; a rank that fails is named."""
    for report in outcome[0]["ranks"]:
        assert report["behind"] == [True, True, 70, True, True, 70]
    assert "checkpoint at step 71 failed: rank 1: File too large" in outcome[1]


def test_nobody_waits_for_a_rank_that_was_killed_before_its_part_was_written(outcome):
    """A save that waits for the one in the background, or a resume, would wait with it."""
    survivor = outcome[0]["ranks"][0]
    assert survivor["killed"] == [True, 70]
    assert survivor["killed_s"] < 20
    assert "checkpoint at step 300 failed: rank 1: has ended before it had written its part" in outcome[1]


def test_ranks_that_disagree_are_told(outcome):
    """A save at different steps is refused on all ranks; a state that does not fit on one is raised on both."""
    first, second = outcome[0]["ranks"]
    assert first["differing"] is second["differing"] is False
    assert "rank 1 saves step 101, rank 0 step 100" in outcome[1]
    assert first["misfit"].startswith("rank 1: the checkpoint does not fit")
    assert second["misfit"].startswith("the checkpoint does not fit")


def test_a_ddp_checkpoint_loads_without_ddp(outcome):
    """One process resumes what two DDP ranks saved, and says what cannot be restored."""
    assert outcome[0]["alone"] == 70
    assert outcome[0]["same_weights"]
    assert "saved by 2 ranks, resumed by 1" in outcome[1]
