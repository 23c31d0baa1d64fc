"""Where a `Checkpointer` without a `Run` journals, as real processes of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory

RANK = {"RANK": "1", "WORLD_SIZE": "2", "RESILIENCE_JOB_ID": "job"}
BEGIN = """
import os, subprocess, sys
from resilience_sdk import heartbeat
from resilience_sdk.checkpoint.history import CheckpointRecord
from resilience_sdk.core.journal import Event
from resilience_sdk.core.run_directory import RunDirectory

record = CheckpointRecord(RunDirectory.create(sys.argv[1]), None)
with heartbeat():
    pass
"""
SAVES = "record.emit(Event.CKPT_COMMIT, 7)\n"
# What a rank forks, or runs as a program, has all that makes it a rank, and is none.
FORKS = "if os.fork() == 0:\n    record.emit(Event.CKPT_COMMIT, 7)\n    os._exit(0)\nos.wait()\n"
RUNS = "if len(sys.argv) < 3:\n    subprocess.run([*sys.orig_argv, 'again'], check=True)\nelse:\n    " + SAVES


def run_script(folder: Path, place: str, rest: str, **env: str) -> str:
    """Run a process that has a checkpointer in `folder/place`; return what it says."""
    (folder / "pages").mkdir()
    places = {"RESILIENCE_PAGE_DIR": str(folder / "pages"), "RESILIENCE_RUN_DIR": str(folder / "run")}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + rest, str(folder / place)],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **places, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def commits(folder: Path) -> list[tuple[int, int, str]]:
    """Return step, rank and job of the saves in the journal of a run directory."""
    events = read_journal(folder / "journal").events
    return [(event["step"], event["rank"], event["job"]) for event in events if event["event"] == "ckpt_commit"]


def test_in_the_directory_of_the_job_it_is_the_ranks_journal(tmp_path):
    """One file for each rank, whoever writes."""
    assert "checkpoints go to" not in run_script(tmp_path, "run", SAVES, **RANK)
    assert commits(tmp_path / "run") == [(7, 1, "job")]
    assert len(list((tmp_path / "run" / "journal").glob("*-rank1-*.jsonl"))) == 1


def test_in_another_directory_there_is_a_journal_too(tmp_path):
    """Rank 0 says what that costs, and how to have both in one place."""
    told = run_script(tmp_path, "other", SAVES, **RANK | {"RANK": "0"})
    assert told.count("name the former with RESILIENCE_RUN_DIR too") == 1
    assert commits(tmp_path / "other") == [(7, 0, "job")]
    assert commits(tmp_path / "run") == []


def test_a_rank_that_can_have_no_page_journals_its_saves(tmp_path):
    """Nobody watches it, and its checkpoints are as good as those of others."""
    run_script(tmp_path, "run", SAVES, **RANK | {"RESILIENCE_PAGE_DIR": "/dev/null/nowhere"})
    assert commits(tmp_path / "run") == [(7, 1, "job")]


ASKS = """
import sys
from resilience_sdk import heartbeat
from resilience_sdk.checkpoint.checkpointer import directory_of_job
from resilience_sdk.errors import ResilienceError

if sys.argv[1] == "beats":
    with heartbeat():
        pass
try:
    print(directory_of_job())
except ResilienceError as error:
    print(type(error).__name__, error)
"""


def ask(folder: Path, *args: str, **env: str) -> str:
    """Return what a process without a `run_dir` of its own is told."""
    places = {"RESILIENCE_PAGE_DIR": str(folder / "pages"), "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"}
    (folder / "pages").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", ASKS, *args, "."],
        env=places | env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_without_a_run_dir_it_is_the_one_of_the_job(tmp_path):
    """Of the environment, the scheduler's job, or the recording that has begun; starting none."""
    assert ask(tmp_path, RESILIENCE_RUN_DIR="mine") == str(tmp_path / "mine")
    assert ask(tmp_path, SLURM_JOB_ID="8") == str(tmp_path / "resilience-runs" / "slurm-8")
    assert [path.name for path in tmp_path.iterdir()] == ["pages"]
    recorded = ask(tmp_path, "beats")
    assert Path(recorded, "journal").is_dir()
    assert Path(recorded).parent == tmp_path / "resilience-runs"


def test_without_any_it_says_what_to_give(tmp_path):
    """Nothing could be resumed from a directory that is new in each start."""
    told = ask(tmp_path)
    assert told.startswith("RunDirectoryError Checkpointer(run_dir=...) is missing")
    assert "run_dir='runs/a'" in told
    assert "RESILIENCE_RUN_DIR" in told


def test_not_one_that_the_job_has_instead_of_another(tmp_path):
    """The job records beside a directory that is in use: what is saved there would not go on from it."""
    lease = Lease.acquire(RunDirectory.create(tmp_path / "mine"), "another")
    told = ask(tmp_path, "beats", RESILIENCE_RUN_DIR="mine")
    lease.release()
    assert told.startswith(f"DirectoryInUseError {tmp_path}/mine was in use by another job")


@pytest.mark.parametrize(
    ("rest", "env"),
    [(SAVES, {"RESILIENCE_DISABLE": "1"}), (FORKS, {}), (RUNS, {})],
    ids=["switched off", "forked by a rank", "run by a rank"],
)
def test_who_is_no_rank_journals_nothing(tmp_path, rest, env):
    """What a helper saves or loads is not the job's; it would be taken for a resume of the rank."""
    run_script(tmp_path, "run", rest, **RANK | env)
    assert commits(tmp_path / "run") == []
