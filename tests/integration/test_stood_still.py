"""Somebody ends a job that stands still, or it goes on by itself: what incidents, outcome and exit code then say."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from harness import job
from two_launchers import two_launchers

from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Incident
from resilience_sdk.incidents.record import went_on_words
from resilience_sdk.report.read import read_run
from resilience_sdk.report.run_watch import RunWatch

DEADLINE = {"RESILIENCE_HEARTBEAT_TIMEOUT": "1.5", "RESILIENCE_ON_HANG": "report"}
TWO = (sys.executable, "ranks.py", "2", "torch")


def rank_pid(run, rank: int) -> int:
    """The process of a rank."""
    (event,) = run.wait_event("rank_start", rank=rank)
    return int(event["pid"])


def tell_stall(run) -> None:
    """Tell that rank 1 stands still, as the monitor of this host tells it."""
    (began,) = run.wait_event("rank_start", rank=1)
    told = Journal(run.run_dir / "journal", writer="watch", host=began["host"], boot_id="", job=began["job"])
    rank = {"rank": 1, "node": began["host"], "step": 25, "activity": "stuck", "still_s": 40.0, "stack": ["a.py:1 f"]}
    told.emit(Event.STALL, since=time.time() - 40, for_s=40.0, ranks=[rank], waiting=[0], verdict_in_s=20.0, text="...")
    told.close()


@pytest.mark.parametrize("how", ["notice", "report"])
def test_sigterm_to_a_job_that_stands_still(tmp_path, how):
    """It is a hang first and a preemption second; exit code 1, so that a retry of it counts."""
    deadline = ("--heartbeat-timeout", "1.5", "--on-hang", "report") if how == "report" else ()
    words = ("--nproc-per-node", "2", "--preempt-time", "2", "--term-grace", "1", *deadline, "light.py", "hang")
    with job(tmp_path, *words) as run:
        if how == "report":
            run.wait_event("incident", kind="hang")
        else:
            run.wait(lambda: "begin hang 1" in run.out, "the hang")
            tell_stall(run)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 1, run.screen
        hang, stop = run.incidents()
        assert [culprit["rank"] for culprit in hang["culprits"]] == [1]
        assert (hang["kind"], hang["action"]) == ("hang", "restart")
        assert "SIGTERM to the launcher" in hang["evidence"][-1]["text"]
        assert (stop["kind"], stop["cause"], stop["action"]) == ("preemption", "preemption_sigterm", "restart")
        assert hang["id"] in stop["evidence"][0]["text"]
        outcome = run.outcome()
        assert (outcome["verdict"], outcome["exit_code"]) == ("give_up", 1)
        assert outcome["stood"] in outcome["reason"]
        assert outcome["incidents"] == [hang["id"], stop["id"]]
        assert f"incidents/{hang['id']}/report.md" in run.last_lines()
        assert "made no progress" in run.last_lines()
        assert run.left_behind() == []


@pytest.mark.slow
def test_two_nodes_that_stand_still_say_the_same(tmp_path):
    """One of them is asked to leave: one hang, one preemption, and no launcher calls for a free requeue."""
    words = ("--preempt-time", "2", "--term-grace", "1", "light.py", "hang")
    with two_launchers(tmp_path, *words) as nodes:
        nodes[0].wait(lambda: any("begin hang 1" in node.out for node in nodes), "the hang")
        tell_stall(nodes[0])
        for node in nodes:
            node.process.send_signal(signal.SIGTERM)
        assert [node.finish() for node in nodes] == [1, 1], [node.screen for node in nodes]
        assert [found["kind"] for found in nodes[0].incidents()] == ["hang", "preemption"]
        assert nodes[0].outcome()["exit_code"] == 1
        for node in nodes:
            assert "made no progress" in node.last_lines()


def test_a_rank_that_is_killed_while_nothing_moves(tmp_path):
    """All ranks start again, for the hang; the kill is told beside it."""
    with job(tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", "light.py", "hang") as run:
        run.wait(lambda: "begin hang 1" in run.out, "the hang")
        tell_stall(run)
        os.kill(rank_pid(run, 1), signal.SIGKILL)
        run.wait_event("attempt_start", attempt=1)
        (run.folder / "told" / "go").touch()
        assert run.finish() == 0, run.screen
        hang, crash = run.incidents()
        assert (hang["cause"], crash["cause"]) == ("hang_rank_stuck", "rank_killed_sigkill")
        assert hang["recovered_at"] is not None
        (decision,) = run.events("decision", verdict="restart")
        assert decision["cause"] == "hang_rank_stuck"


def test_sigterm_under_another_launcher_while_a_reported_hang_stands(tmp_path):
    """The monitor writes it: the hang, who ended it, and an outcome that is no free requeue."""
    with job(tmp_path, command=(*TWO, "light.py", "hang"), env=DEADLINE) as run:
        run.wait_event("incident", kind="hang")
        for rank in (0, 1):
            os.kill(rank_pid(run, rank), signal.SIGTERM)
        run.finish()
        assert run.left_behind() == []
        hang = run.incidents()[0]
        assert (hang["kind"], hang["action"]) == ("hang", "restart")
        assert "SIGTERM" in hang["evidence"][-1]["text"] or "ended in an unknown way" in hang["evidence"][-1]["text"]
        assert run.outcome()["exit_code"] == 1
        assert "made no progress" in run.outcome()["reason"]


@pytest.mark.parametrize("command", [TWO, (sys.executable,)], ids=["two ranks", "plain python"])
def test_a_reported_hang_that_goes_on_by_itself_is_closed(tmp_path, command):
    """SIGSTOP, the report, SIGCONT: it is over while the job runs on, and nothing says that it did not recover."""
    with job(tmp_path, command=(*command, "light.py", "--steps", "100000", "upload"), env=DEADLINE) as run:
        rank = len(command) > 1
        run.wait_event("first_beat", count=1 + rank)
        pid = rank_pid(run, int(rank))
        os.kill(pid, signal.SIGSTOP)
        run.wait_event("incident", kind="hang")
        assert [found["recovered_at"] for found in run.incidents()] == [None]
        os.kill(pid, signal.SIGCONT)
        (event,) = run.wait_event("recovered")
        assert event["why"] == "went on"
        assert run.process.poll() is None
        (hang,) = run.incidents()
        assert hang["recovery_s"] == event["recovery_s"]
        assert hang["recovered_at"] > hang["detected_at"]
        assert str(went_on_words(Incident.from_json(hang))).startswith("went on by itself after")
        for rank_here in range(1 + rank):
            os.kill(rank_pid(run, rank_here), signal.SIGKILL)
        run.finish()
        assert run.left_behind() == []
        assert (run.incidents()[0]["kind"], run.incidents()[0]["action"]) == ("hang", "none")


def test_a_stop_that_goes_on_by_itself_is_told_and_is_no_time_of_a_step(tmp_path, monkeypatch):
    """Page and `top` have one goodput while it lasts; then it has a sentence and a pin, and steps are not longer."""
    words = ("--nproc-per-node", "2", "--stuck-after", "24", "slow_steps.py", "--seconds", "20")
    with job(tmp_path, *words) as run:
        run.wait_event("first_beat", count=2)
        run.wait_event("progress")
        monkeypatch.setenv("RESILIENCE_PAGE_DIR", str(run.pages))
        watch, directory, pid = RunWatch(RunDirectory(run.run_dir)), RunDirectory(run.run_dir), rank_pid(run, 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            run.wait(lambda: watch.look().standing_s > 11.0, "the stop")
            view, facts = watch.look(), read_run(directory)
        finally:
            os.kill(pid, signal.SIGCONT)
            watch.close()
        assert facts.goodput["goodput"] == pytest.approx(view.goodput, abs=0.03)
        assert facts.goodput["buckets"]["standing"] == pytest.approx(view.standing_s, abs=1.0)
        assert run.finish() == 0, run.screen
        assert [event["why"] for event in run.events("stall_end")] == ["went on"]
        facts = read_run(directory)
        assert facts.stood is not None
        assert facts.stood.startswith("Rank 0 on ")
        assert " was stopped for 1" in facts.stood
        assert [pin.kind for pin in facts.pins] == ["hang"]
        (attempt,) = facts.attempts
        assert {rank.step for rank in facts.ranks} == {f"{attempt.completed} steps of this attempt"}
        assert max(value for curve in facts.step_time for value in curve.values if value is not None) < 5.0
        shares = {name: (least, most) for name, _, _, least, most in facts.shares}
        assert shares["grads"][1] < 0.3  # of the rank that waited; with the stop it is more than half
        assert shares["fwd"][1] - shares["fwd"][0] < 0.2
