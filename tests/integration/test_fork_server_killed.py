"""The process that ranks are forked from is killed: nobody touched a rank."""

import os
import signal
from pathlib import Path

import pytest
from harness import job

from resilience_sdk.system.hostinfo import stat_fields


def server_of(run):
    """Return the pid of the fork server: the parent of a rank."""
    pid = run.events("rank_start", rank=0)[-1]["pid"]
    fields = stat_fields(pid)
    assert fields is not None
    return int(fields[1])


@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_a_killed_fork_server_is_told_as_that_and_the_next_attempt_starts_by_itself(tmp_path, method):
    """No rank is the culprit, the budget is untouched, a new server forks the ranks again."""
    end, hang = tmp_path / "end", tmp_path / "hang"
    options = ("--nproc-per-node", "2", "--start-method", method, "--max-restarts", "1")
    with job(tmp_path, *options, "beating.py", str(end), str(hang)) as run:
        for attempt in range(2):  # twice, with a budget of one
            run.wait(lambda attempt=attempt: len(run.told(f"step-{attempt}-*")) == 2, "the first steps")
            os.kill(server_of(run), signal.SIGKILL)
            run.wait_event("incident", attempt=attempt)
        run.wait(lambda: len(run.told("step-2-*")) == 2, "the first steps of the third attempt")
        end.touch()
        assert run.finish() == 0, run.screen
        for incident in run.incidents():
            assert (incident["kind"], incident["category"]) == ("crash", "process")
            assert (incident["cause"], incident["culprits"]) == ("fork_server_lost", [])
            assert incident["victims"] == [0, 1]
            assert "fork server" in incident["evidence"][0]["text"]
            assert "died by SIGKILL" in incident["evidence"][0]["text"]
        assert [event["ended_by"] for event in run.events("attempt_end")] == ["server", "server", "ranks"]
        decisions = run.events("decision")[:2]
        assert [event["reason"] for event in decisions] == ["restart, not counted: no rank is at fault"] * 2
        assert [event["restarts_left"] for event in decisions] == [1, 1]
        assert "rank 0 died" not in run.screen
        assert run.screen.count("the launcher's fork server") == 2
        assert not run.left_behind()


def test_a_rank_that_is_killed_is_still_the_culprit(tmp_path):
    """The server tells of its end before anything else, so the two are not mixed up."""
    end, hang = tmp_path / "end", tmp_path / "hang"
    with job(tmp_path, "--nproc-per-node", "2", "beating.py", str(end), str(hang)) as run:
        run.wait(lambda: len(run.told("step-0-*")) == 2, "the first steps")
        os.kill(run.events("rank_start", rank=1)[-1]["pid"], signal.SIGKILL)
        run.wait_event("incident")
        (incident,) = run.incidents()
        assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
        assert incident["cause"] == "rank_killed_sigkill"
        assert Path(run.run_dir).is_dir()
        end.touch()
        assert run.finish() == 0, run.screen
