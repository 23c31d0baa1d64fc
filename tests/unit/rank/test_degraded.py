"""A rank that has no place for its page: nobody watches it, and all else is as it is elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.settings import load_settings
from resilience_sdk.rank.all_ranks import have_one_monitor
from resilience_sdk.rank.degraded import PagelessSession

NOWHERE = {"RESILIENCE_PAGE_DIR": "/dev/null/nowhere"}
TRAINS = """
import resilience_sdk
from resilience_sdk import preemption

for again in range(2):
    with resilience_sdk.start_run(state={}, checkpoint_every=2) as run:
        first = run.step
        for step, _ in run.steps(range(9), on_preempt="return"):
            if step == 4:
                preemption.request("a test")
        print(first, run.step, run.preempted, run.checkpointer.last_good.step)
"""
REFUSED = """
import resilience_sdk
with resilience_sdk.start_run(state={}) as run:
    print([step for step, _ in run.steps("ab")], run.checkpointer.last_good)
"""


def train(folder: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script where no page can be had."""
    return subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", **NOWHERE, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


OURS = {"RESILIENCE_INTERNAL_PAGES": "", "RESILIENCE_INTERNAL_JOB": "j"}


@pytest.mark.parametrize("launcher", [{}, pytest.param(OURS, marks=pytest.mark.slow)])
def test_it_saves_stops_and_resumes(tmp_path, launcher):
    """Under our launcher too, which has said that there is no place. One line tells what is missing."""
    done = train(tmp_path, TRAINS, RESILIENCE_RUN_DIR="run", **launcher)
    assert (done.returncode, done.stdout) == (0, "0 5 True 5\n5 6 True 6\n"), done.stderr
    events = [event["event"] for event in read_journal(tmp_path / "run" / "journal").events]
    assert (events.count("ckpt_commit"), events.count("stop_agreed"), events.count("resume")) == (4, 1, 1)
    said = [line for line in done.stderr.splitlines() if "page" in line]
    assert len(said) == (0 if launcher else 1), done.stderr


@pytest.mark.slow
def test_a_process_of_its_own_needs_no_name_for_its_run_directory(tmp_path):
    """A new one is made, as elsewhere."""
    done = train(tmp_path, REFUSED)
    assert "[0, 1] GoodCheckpoint(step=2" in done.stdout, done.stderr
    [run_dir] = (tmp_path / "resilience-runs").iterdir()
    assert str(run_dir) in done.stdout


@pytest.mark.slow
def test_where_its_run_directory_cannot_be_used_it_trains(tmp_path):
    """What is not saved is said."""
    done = train(tmp_path, REFUSED, RESILIENCE_RUN_DIR="/proc/none/run")
    assert (done.returncode, done.stdout) == (0, "[0, 1] None\n"), done.stderr
    assert done.stderr.count("NOTHING IS SAVED") == 1


@pytest.mark.slow
def test_a_full_place_for_pages_counts_as_none(tmp_path):
    """The directory is there, and no file of that size fits into it."""
    full = (
        "import os\ndef fail(*_): raise OSError(28, 'No space left on device')\nos.posix_fallocate = fail\n"
        "os.mkdir('pages', 0o700)\n"
    )
    done = train(tmp_path, full + TRAINS, RESILIENCE_RUN_DIR="run", RESILIENCE_PAGE_DIR="pages")
    assert (done.returncode, done.stdout) == (0, "0 5 True 5\n5 6 True 6\n"), done.stderr
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    ("named", "attempt", "in_code", "may_resume"),
    [("1", 0, False, True), ("0", 0, False, False), ("0", 1, False, True), ("0", 0, True, True)],
)
def test_a_name_that_our_launcher_made_up_is_nothing_to_resume_from(tmp_path, named, attempt, in_code, may_resume):
    """As for the ranks beside it, which have pages: alone it would wait for them in the resume. Code names one, too."""
    place = str(tmp_path / "run")
    env = {
        "RESILIENCE_RUN_DIR": place,
        "RESILIENCE_INTERNAL_RUN_NAMED": named,
        "RESILIENCE_INTERNAL_ATTEMPT": str(attempt),
        **OURS,
    }
    session = PagelessSession(load_settings(env=env, strict_env=False), env, place if in_code else None, resumes=True)
    assert session.may_resume is may_resume


@pytest.mark.parametrize(
    ("pages", "ours", "have"),
    [("aa", False, True), ("ab", False, False), ("ab", True, True), ("a-", True, False), ("--", False, False)],
)
def test_monitors_see_all_ranks_where_all_have_pages(pages, ours, have):
    """In one directory, or in several that our launcher connects."""
    told = [{"pages": None if page == "-" else page} for page in pages]
    assert have_one_monitor(told, ours=ours) is have
