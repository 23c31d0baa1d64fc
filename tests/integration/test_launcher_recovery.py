"""Restart and orderly leaving, with real signals to real processes."""

import json
import signal
import time

import pytest
from launcher_runs import end, is_gone, launch

TWO = ("--nproc-per-node", "2")
# Scripts without torch start sooner when no server loads it first.
EXEC = ("--start-method", "exec")


def test_a_killed_rank_is_replaced_and_the_job_finishes(tmp_path):
    """SIGKILL of one rank: both ranks step again in a new attempt, and the killed one is named."""
    run = launch(tmp_path, *TWO, "job.py", "kill")
    assert run.finish() == 0, run.err
    (incident,) = run.incidents()
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
    assert (incident["kind"], incident["cause"], incident["attempt"]) == ("crash", "rank_killed_sigkill", 0)
    assert [event["attempt"] for event in run.events("attempt_start")] == [0, 1]
    assert all((tmp_path / f"step-1-{rank}").exists() for rank in (0, 1))
    died = json.loads((tmp_path / "killed-0-1").read_text())
    seen = next(e for e in run.events("rank_exit") if e["signal"] == "SIGKILL")
    assert seen["order"] == 0
    assert seen["mono_ns"] / 1e9 - died < 5.0  # measured: about 15 ms on an idle machine
    assert "nothing saved by the SDK" in run.err


@pytest.mark.parametrize("stubborn", [[], ["stubborn"]])
def test_sigterm_ends_everything_and_is_no_crash(tmp_path, stubborn):
    """Ranks are asked once and, after the time they have, killed with all that they started; exit 75."""
    run = launch(tmp_path, *TWO, *EXEC, "--preempt-time", "0.5", "job.py", "stay", *stubborn)
    pids = [int(run.wait_for(tmp_path / f"{name}-0-{rank}")) for name in ("pid", "child") for rank in (0, 1)]
    began = time.monotonic()
    end(run)
    assert run.finish() == 75, run.err
    assert time.monotonic() - began < 30  # less than the `term_grace` and the `preempt_time` of the defaults
    assert all(is_gone(pid) for pid in pids)
    assert {incident["kind"] for incident in run.incidents()} == {"preemption"}
    assert run.outcome()["verdict"] == "preempted"
    assert not run.left_pages()


def test_ranks_that_save_on_sigterm_get_the_time_to_do_so(tmp_path):
    """The signal reaches the ranks once; their 75 is the launcher's."""
    run = launch(tmp_path, *TWO, *EXEC, "job.py", "save")
    for rank in (0, 1):
        run.wait_for(tmp_path / f"ready-0-{rank}")
    end(run)
    assert run.finish() == 75, run.err
    assert all((tmp_path / f"saved-0-{rank}").exists() for rank in (0, 1))
    assert [e["exit_code"] for e in run.events("rank_exit")] == [75, 75]


def test_ctrl_c_is_130(tmp_path):
    """Interrupted by a person: no incident, everything ended, not to be requeued."""
    run = launch(tmp_path, *TWO, *EXEC, "--term-grace", "30", "job.py", "stay", "stubborn")
    pids = [int(run.wait_for(tmp_path / f"child-0-{rank}")) for rank in (0, 1)]
    end(run, signal.SIGINT)
    assert run.finish() == 130, run.err
    assert all(is_gone(pid) for pid in pids)
    assert not run.incidents()
    assert run.outcome()["verdict"] == "interrupted"


def test_a_confirmed_hang_is_restarted_as_a_hang_and_not_as_a_crash(tmp_path):
    """The monitor ends the stuck rank; the launcher takes its verdict over and starts the ranks again."""
    run = launch(tmp_path, *TWO, *EXEC, "--heartbeat-timeout", "3", "job.py", "hang")
    assert run.finish() == 0, run.err
    (incident,) = run.incidents()
    assert incident["kind"] == "hang"
    assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
    assert [event["ended_by"] for event in run.events("attempt_end")] == ["hang", "ranks"]
    assert "the job hung (rank 1" in run.err
    assert not run.left_pages()


def test_nothing_survives_a_killed_launcher(tmp_path):
    """SIGKILL of the launcher: its ranks die with it, and the monitor leaves last and clears the pages."""
    run = launch(tmp_path, *TWO, *EXEC, "job.py", "stay", "stubborn")
    pids = [int(run.wait_for(tmp_path / f"{name}-0-{rank}")) for name in ("pid", "child") for rank in (0, 1)]
    end(run, signal.SIGKILL)
    assert run.finish() == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while (run.left_pages() or not all(map(is_gone, pids))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(is_gone(pid) for pid in pids)
    assert not run.left_pages()
