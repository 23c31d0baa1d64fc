"""Ranks that are aborted when their scripts are done, as torch does it to those that keep their process group."""

import sys

import pytest
from harness import job

TWO = ("--nproc-per-node", "2", "--start-method", "exec", "--max-restarts", "1")
CURE = "call torch.distributed.destroy_process_group()"


def test_ranks_that_were_done_have_finished(tmp_path):
    """Exit code 0 and `finished`, one attempt, and an incident with the cause and no word of hardware."""
    with job(tmp_path, *TWO, "aborting.py", "done", "-") as run:
        assert run.finish() == 0, run.screen
        assert run.screen.count("terminate called without an active exception") == 2  # they did abort
        assert (run.run_dir / "finished").exists()
        assert [e["signal"] for e in run.events("rank_exit")] == ["SIGABRT"] * 2
        assert [e["script_exit_code"] for e in run.events("rank_exit")] == [0, 0]
        assert len(run.events("attempt_start")) == 1
        (incident,) = run.incidents()
        assert (incident["category"], incident["cause"], incident["action"]) == ("process", "abort_at_exit", "none")
        assert [culprit["rank"] for culprit in incident["culprits"]] == [0, 1]
        assert run.outcome()["verdict"] == "finished"
        assert run.outcome()["incidents"] == [incident["id"]]
        assert CURE in run.screen
        assert "ranks 0-1, whose scripts were done, died by SIGABRT" in run.screen


def test_one_that_is_done_early_does_not_end_the_others(tmp_path):
    """Rank 1 trains on, and finishes."""
    told = tmp_path / "go"
    with job(tmp_path, *TWO, "aborting.py", "early", str(told)) as run:
        run.wait_event("rank_exit", rank=0)
        told.touch()
        assert run.finish() == 0, run.screen
        assert run.out == "trained on\n"
        assert [culprit["rank"] for incident in run.incidents() for culprit in incident["culprits"]] == [0]


@pytest.mark.parametrize(("how", "code", "attempts"), [("code", 1, 2), ("leave", 75, 1), ("middle", 1, 2)])
def test_an_abort_at_exit_hides_no_other_end(tmp_path, how, code, attempts):
    """The code that the script left with counts; one that was in the middle has been aborted, and is told as that."""
    with job(tmp_path, *TWO, "aborting.py", how, "-") as run:
        assert run.finish() == code, run.screen
        assert not (run.run_dir / "finished").exists()
        assert len(run.events("attempt_start")) == attempts
        causes = {incident["cause"] for incident in run.incidents() if incident["kind"] == "crash"}
        assert causes == {"code": {"unknown"}, "leave": {"abort_at_exit"}, "middle": {"rank_abort"}}[how]


def test_without_a_page_it_is_an_abort(tmp_path):
    """Nobody can tell that the scripts were done: exit code 1."""
    with job(tmp_path, *TWO, "aborting.py", "done", "-", env={"RESILIENCE_DISABLE": "1"}) as run:
        assert run.finish() == 1, run.screen
        assert not (run.run_dir / "finished").exists()


@pytest.mark.slow
def test_under_torchrun_it_is_the_same_cause(tmp_path):
    """torchrun ends with 1 whatever the pages say; the incident says why, and how to keep it from happening."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    with job(tmp_path, "aborting.py", "done", "-", command=command) as run:
        assert run.finish() == 1, run.screen
        run.left_behind()
        (incident,) = run.incidents()
        assert (incident["category"], incident["cause"]) == ("process", "abort_at_exit")
        assert [culprit["rank"] for culprit in incident["culprits"]] == [0]


@pytest.mark.slow
def test_gloos_own_thread_comes_too_late_and_the_ranks_have_finished_all_the_same(tmp_path):
    """The real race: without our wait at the exit every other of these ends by SIGABRT under torchrun."""
    with job(tmp_path, "--nproc-per-node", "2", "--max-restarts", "0", "group_left.py") as run:
        assert run.finish() == 0, run.screen
        assert (run.run_dir / "finished").exists()
        assert "without an active exception" not in run.screen
        assert not run.incidents()
