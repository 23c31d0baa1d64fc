"""One process writes the checkpoints of a directory, and its job is found there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.system.hostinfo import host_name

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the processes saw."""
    root = tmp_path_factory.mktemp("writers")
    (root / "pages").mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD_SIZE", "RESILIENCE"))}
    env = kept | {"PYTHONPATH": str(HERE.parents[1]), "RESILIENCE_PAGE_DIR": str(root / "pages")}
    program = [sys.executable, str(HERE / "one_writer.py"), str(root)]
    done = subprocess.run(program, capture_output=True, text=True, env=env, cwd=root, timeout=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"said": done.stderr}


pytestmark = pytest.mark.slow


def test_a_second_process_is_refused_before_it_trains(report):
    """By its first resume or save, with directory, host and process of the one that writes there, and the cure."""
    pid, first = report["holder"]
    assert first == "0"
    for what in ("second resumes", "second saves"):
        assert report[what].startswith("DirectoryInUseError: "), report
        for word in ("writers", f"(host {host_name()}, pid {pid})", "end that"):
            assert word in report[what]
    assert report["said"].count("resumed from") == 3  # the reader, and who came when the way was free


def test_a_reader_is_let_in(report):
    """It reads the newest checkpoint beside the writer, and cannot save."""
    assert report["reads"].startswith("2, "), report
    assert "read_only" in report["reads"]


def test_other_directories_are_free(report):
    """The hold is on one directory."""
    assert report["elsewhere"] == "True"


def test_a_job_that_names_no_other_directory_is_found_in_that_of_its_checkpoints(report):
    """Status, live ranks and requests to leave: one directory for all, and no second one is made."""
    assert report["status"] == ["running", 2, [report["holder"][0]]]
    assert report["preempt"] == [True, "asked"]
    assert report["directories"] == ["named", "other", "pages", "run"]


def test_a_writer_that_was_killed_or_has_ended_is_no_obstacle(report):
    """The next process goes on at once, from what was saved last."""
    assert report["after a kill"] == "2"
    assert report["ended"] == [0]
    assert report["after an end"] == "3"


def test_one_job_key_for_two_processes_makes_them_no_job(report):
    """Two plain processes in one allocation, or under one RESILIENCE_JOB_ID."""
    pid, refusal = report["namesake"]
    assert refusal.startswith("DirectoryInUseError: the checkpoints in "), report
    assert f"job one name for two (host {host_name()}, pid {pid})" in refusal
