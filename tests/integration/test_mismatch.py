"""Ranks whose program does not match end the job the second time, whether they hang or the library ends them."""

import subprocess
import sys

import pytest
from harness import SCRIPTS, job

pytestmark = pytest.mark.slow


def users_lines(incident):
    """The lines of the script in the stacks of those who are named, the innermost of each."""
    own = [[frame for frame in who["stack"] if "mismatching.py:" in frame] for who in incident["culprits"]]
    return [frames[0].partition("mismatching.py:")[2] if frames else None for frames in own]


def number_of(words):
    """The number of the script's line that has these words."""
    lines = (SCRIPTS / "mismatching.py").read_text().splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if line.strip() == words]
    return found


BACKWARD = f"{number_of('loss.backward()')} train"
BARRIER = f"{number_of('dist.barrier()')} <module>"
EVALUATE = f"{number_of('dist.all_reduce(total)')} evaluate"


@pytest.mark.parametrize(
    ("how", "place", "lines"),
    [
        ("uneven", "behind 20 completed steps", [BACKWARD, BARRIER]),
        pytest.param("times_out", "behind 20 completed steps", [BACKWARD, BARRIER], marks=pytest.mark.release),
        ("unseen", "mismatching.py", [f"{number_of('dist.all_reduce(torch.ones(3))')} <module>", BARRIER]),
    ],
)
def test_a_program_that_does_not_match_is_started_twice_and_no_more(tmp_path, how, place, lines):
    """An unchanged script of two ranks that saves nothing, at default restarts: 77, and it says why and where."""
    with job(tmp_path, "--nproc-per-node", "2", "--stuck-after", "3", "mismatching.py", how) as run:
        assert run.finish() == 77, run.screen
        hangs = [one for one in run.incidents() if one["kind"] == "hang"]
        assert {incident["cause"] for incident in run.incidents()} == {"user_collective_mismatch"}, run.screen
        assert [users_lines(one) for one in hangs] == [lines] * 2
        assert "user_collective_mismatch came twice" in run.screen
        assert place in run.screen
        assert "fix the program" in run.screen
        assert len(run.events("attempt_start")) == 2


def test_who_is_late_for_the_library_is_named_and_is_no_mismatch(tmp_path):
    """Its peers give up: their words name the network, which is as it was. The same program may be in time again."""
    options = ("--nproc-per-node", "2", "--stuck-after", "3", "--max-restarts", "0")
    with job(tmp_path, *options, "mismatching.py", "late") as run:
        assert run.finish() == 1, run.screen
        incidents = run.incidents()
        assert {one["cause"] for one in incidents} == {"hang_rank_late"}, run.screen
        assert [[who["rank"] for who in one["culprits"]] for one in incidents if one["kind"] == "hang"] == [[1]]
        assert users_lines(incidents[0]) == [f"{number_of('time.sleep(12)')} train"]


def test_an_abort_of_the_library_names_the_programs_line_and_its_words_once(tmp_path):
    """gloo aborts in a thread of its own, which has no frames: the line that called it stands in the main thread."""
    with job(tmp_path, "--nproc-per-node", "2", "--stuck-after", "3", "mismatching.py", "evaluates") as run:
        assert run.finish() == 77, run.screen
        incidents = run.incidents()
        assert [one["cause"] for one in incidents] == ["user_collective_mismatch"] * 2, run.screen
        assert len(run.events("attempt_start")) == 2
        for one in incidents:
            (line,) = users_lines(one)
            assert line in (EVALUATE, BACKWARD), one["culprits"]
        command = [sys.executable, "-m", "resilience_sdk", "why", str(run.run_dir)]
        why = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert why.count("enforce fail") == 1, why
        assert "Connection reset" not in why
        assert "what():" not in why.lower()
        assert f"mismatching.py:{line}" in why
