"""A last state that cannot be saved: the job waits for what passes, and does not count as finished otherwise."""

import os
import signal
import subprocess
import sys
import time

import pytest
from harness import job
from small_disks import free, small_disk
from two_launchers import two_launchers

from resilience_sdk.incidents.stalls import EXIT

pytestmark = pytest.mark.slow

WAITS = "NOT SAVED YET, the state after 60 steps"
LOST = "steps 40 to 59 (20 steps) ARE LOST"


@pytest.fixture
def disk(tmp_path):
    """A small disk, to which the checkpoints of the run directory are linked."""
    with small_disk(tmp_path / "disk", "nr_inodes=60") as place:
        (tmp_path / "run").mkdir(mode=0o700)
        (tmp_path / "run" / "checkpoints").symlink_to(place)
        (tmp_path / "told").mkdir()
        (tmp_path / "told" / "disk").write_text(str(place))
        yield place


def said_by(command, run):
    """Return what a command prints of a run."""
    words = [sys.executable, "-m", "resilience_sdk", command, str(run.run_dir)]
    env = {**os.environ, "RESILIENCE_PAGE_DIR": str(run.pages)}
    return subprocess.run(words, capture_output=True, text=True, check=True, env=env).stdout


def test_two_nodes_wait_outside_of_collectives_until_there_is_room_and_finish(tmp_path, disk):
    """The wait is longer than the timeout of the process group, and no hang; the state is there at its end."""
    patience_s = 3
    words = ("--wait-limit", "100", "--stuck-after", "3", "last_save.py", "--patience", str(patience_s))
    with two_launchers(tmp_path, *words) as nodes:
        [first] = nodes[0].wait_event("health", ok=False)
        assert "No space left on device [ENOSPC]" in first["why"]
        nodes[0].wait(lambda: time.time() > first["t"] + 2 * patience_s, "the timeout of the group, twice")
        assert "paused (waiting for" in said_by("status", nodes[0])
        free(disk)
        assert [node.finish() for node in nodes] == [0, 0], [node.screen for node in nodes]
        assert sum(WAITS in node.screen for node in nodes) == 1
        assert (tmp_path / "run" / "finished").exists()
        assert nodes[0].incidents() == []
        told = [stall for stall in nodes[0].events("stall") if stall["t"] > first["t"]]
        assert not [stall for stall in told if stall.get("kind") != EXIT], "of the ends of processes on a busy machine"
        assert nodes[0].events("ckpt_commit")[-1]["step"] == 60


def test_without_room_it_ends_with_1_and_no_flag_and_a_rerun_goes_on(tmp_path, disk):
    """First and last it is said what is lost; no restart is tried; after that there is room, and it finishes."""
    flag = tmp_path / "their-flag"
    words = ("--wait-limit", "1", "last_save.py", "--takes", "inodes")
    with job(tmp_path, *words, env={"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}) as run:
        assert run.finish() == 1, run.screen
        assert WAITS in run.screen
        assert LOST in run.last_lines()
        assert "what to do: make room" in run.last_lines()
        assert not (run.run_dir / "finished").exists()
        assert not flag.exists()
        outcome = run.outcome()
        assert (outcome["verdict"], outcome["exit_code"], outcome["checkpoint"]) == ("give_up", 1, 40)
        assert LOST in outcome["reason"]
        assert outcome["attempts"] == 1
        assert run.incidents()[-1]["cause"] == "storage_full"
    for command in ("status", "why", "outcome"):
        assert LOST in said_by(command, run)
    free(disk)
    with job(tmp_path, *words, env={"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)}) as again:
        assert again.finish() == 0, again.screen
        assert "begins at 40" in again.out
        assert flag.exists()
        assert (again.run_dir / "finished").exists()


def test_a_stop_ends_the_wait_in_time_and_says_what_is_lost(tmp_path, disk):
    """The wait leaves the time that a save and an end need; the job is requeued, and not killed."""
    with job(tmp_path, "--preempt-time", "10", "last_save.py") as run:
        run.wait_event("health", ok=False)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.screen
        [left] = run.events("rank_exit")
        assert (left["exit_code"], left["signal"]) == (75, None)
        assert left["t"] - run.events("preempt_notice")[0]["t"] < 10
        assert "all ranks stopped after 60 steps" in run.last_lines()
        assert "20 steps lost" in run.last_lines()
        assert LOST in run.screen
        assert not (run.run_dir / "finished").exists()


@pytest.mark.parametrize(("by", "code"), [("last", 1), ("save", 1), ("torch", 0)])
def test_a_checkpointer_alone_is_no_finished_job_either(tmp_path, disk, by, code):
    """Whoever says that it is the last save has it awaited; a script that has saved by itself has lost nothing."""
    with job(tmp_path, "--wait-limit", "1", "last_save.py", "--by", by) as run:
        assert run.finish() == code, run.screen
        assert (LOST in run.last_lines()) == bool(code)
        assert (WAITS in run.screen) == (by == "last")
        assert (run.run_dir / "finished").exists() == (not code)
