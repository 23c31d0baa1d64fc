"""Where a `Checkpointer` without a `Run` journals, as real processes of a job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.journal import read_journal

RANK = {"RANK": "1", "WORLD_SIZE": "2", "RESILIENCE_JOB_ID": "job"}
BEGIN = """
import os, subprocess, sys
from resilience_sdk import heartbeat
from resilience_sdk.checkpoint.record import Record
from resilience_sdk.events import Event
from resilience_sdk.run_directory import RunDirectory

record = Record(RunDirectory.create(sys.argv[1]), None)
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


@pytest.mark.parametrize(
    ("rest", "env"),
    [(SAVES, {"RESILIENCE_DISABLE": "1"}), (FORKS, {}), (RUNS, {})],
    ids=["switched off", "forked by a rank", "run by a rank"],
)
def test_who_is_no_rank_journals_nothing(tmp_path, rest, env):
    """What a helper saves or loads is not the job's; it would be taken for a resume of the rank."""
    run_script(tmp_path, "run", rest, **RANK | env)
    assert commits(tmp_path / "run") == []
