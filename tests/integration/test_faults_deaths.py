"""Ranks and launchers die: who went first is named, the job goes on or ends as it should, nothing is left."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from accounts import account_of
from harness import job

pytestmark = pytest.mark.slow  # jobs of four ranks, started again and again

TWO = ("--nproc-per-node", "2")
# What happens in which attempt; the exception comes again, and the second time in a row is once too often.
WAYS = ("one", "other", "all", "exit", "raise", "again")
FAULTS = """
    kill:rank=1,step=3,attempt=0; kill:rank=0,step=3,attempt=1; kill:step=3,attempt=2;
    kill:how=exit,code=3,rank=0,step=3,attempt=3; kill:how=exception,rank=1,step=6,attempt=any
"""


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """One job that loses ranks in every attempt until it is stopped, over now, and what was left of it."""
    options = (*TWO, "--max-restarts", "9")
    with job(tmp_path_factory.mktemp("died"), *options, "training.py", env={"RESILIENCE_FAULT": FAULTS}) as run:
        code = run.finish()
        yield run, code, run.left_behind()


def test_the_same_exception_twice_ends_the_job_with_77(died):
    """It is restarted once, not again: the last lines say why and what to do. All before it are recovered from."""
    run, code, left = died
    assert code == 77, run.screen
    assert [found["attempt"] for found in run.incidents()] == list(range(len(WAYS)))
    assert [event["verdict"] for event in run.events("decision")] == ["restart"] * 5 + ["stop"]
    assert all(found["recovered_at"] > found["detected_at"] for found in run.incidents()[:-1])
    assert run.incidents()[-1]["recovered_at"] is None
    assert not left
    assert not run.events("degraded")
    assert not run.events("confirmed")
    last = run.last_lines()
    assert "the same error ended two attempts in a row" in last
    assert "(exit code 77)" in last
    assert "InjectedError" in last
    assert "fix the program" in last
    assert run.outcome()["verdict"] == "stop"


@pytest.mark.parametrize(
    ("way", "culprits", "victims", "cause"),
    [
        ("one", [1], [0], "rank_killed_sigkill"),
        ("other", [0], [1], "rank_killed_sigkill"),
        ("exit", [0], [1], "unknown"),
        ("raise", [1], [0], "user_code_error"),
        ("again", [1], [0], "user_code_error"),
    ],
)
def test_the_rank_that_went_first_is_named(died, way, culprits, victims, cause):
    """Culprit, victims, cause, step; report.md and pages of both ranks."""
    run = died[0]
    incident = run.incidents()[WAYS.index(way)]
    assert incident["kind"] == "crash"
    assert [named["rank"] for named in incident["culprits"]] == culprits
    assert incident["victims"] == victims
    assert incident["cause"] == cause
    assert incident["culprits"][0]["step"] == (6 if way in ("raise", "again") else 3)
    assert f"rank {culprits[0]}" in run.incident_file(incident, "report.md")
    assert all(f'"rank": {rank}' in run.incident_file(incident, f"pages/rank-{rank}.json") for rank in (0, 1))


@pytest.mark.parametrize("way", ["one", "other", "exit", "raise"])
def test_an_incident_tells_that_its_fault_was_injected(died, way):
    """One line of evidence, from the rank's own journal, beside a verdict that knows nothing of it."""
    run = died[0]
    incident = run.incidents()[WAYS.index(way)]
    (note,) = [item["text"] for item in incident["evidence"] if item["source"] == "fault"]
    rank, step = incident["culprits"][0]["rank"], incident["culprits"][0]["step"]
    assert note.startswith("injected by RESILIENCE_FAULT=kill")
    assert note.endswith(f", which struck rank {rank} at step {step}")
    (event,) = run.events("fault_injected", attempt=WAYS.index(way))
    assert (event["rank"], event["step"]) == (rank, step)


def asked(*words):
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "resilience_sdk", *map(str, words), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("is_old", [False, True], ids=["told", "of-an-older-version"])
def test_injected_faults_count_nowhere(died, tmp_path, is_old):
    """Six deaths by hand: no fault of the run, no failure of the fleet, no suspect; nor where incidents do not tell."""
    run_dir = tmp_path / "copy"
    shutil.copytree(died[0].run_dir, run_dir)
    if is_old:
        for path in (run_dir / "journal").glob("*.jsonl"):
            path.write_text(re.sub(r'"injected":(true|false),', "", path.read_text()))
    account = asked("goodput", run_dir)
    assert (account["faults"], account["injected"], account["mttf_s"]) == (0, len(WAYS), None)
    assert account["mttr_s"] > 0
    database = ("--db", tmp_path / "history.db")
    subprocess.run(
        [sys.executable, "-m", "resilience_sdk", "history", "index", run_dir, *map(str, database)], check=True
    )
    found = asked("history", *database)
    assert (found["causes"], found["mttf_by_cause"], found["mttf"][-1]["failures"]) == ([], [], 0)
    assert found["totals"]["injected"] == len(WAYS)
    assert not [node for node in asked("nodes", *database)["nodes"] if node["failures"] or node["suspect"]]


def test_all_ranks_killed(died):
    """Both were shot at one moment: whoever is named, nobody is called the victim of a hang, and it goes on."""
    incident = died[0].incidents()[WAYS.index("all")]
    assert incident["cause"] == "rank_killed_sigkill"
    assert {named["rank"] for named in incident["culprits"]} <= {0, 1}
    assert incident["culprits"]


def test_an_exception_leaves_its_stack(died):
    """The frames of the exception, innermost first, down to the user's line."""
    incident = died[0].incidents()[WAYS.index("raise")]
    assert any("training.py" in frame for frame in incident["culprits"][0]["stack"])
    assert "InjectedError" in str(incident["evidence"])
    assert "training.py" in died[0].incident_file(incident, "stacks/rank-1.txt")


def test_twenty_kills_in_a_row_are_recovered_from_one_by_one(tmp_path):
    """As many restarts as kills; every incident is closed by the first beats of the next attempt."""
    faults = ";".join(f"kill:rank={number % 2},step=3,attempt={number}" for number in range(20))
    with job(tmp_path, *TWO, "--max-restarts", "20", "training.py", env={"RESILIENCE_FAULT": faults}) as run:
        assert run.finish(110) == 0, run.screen
        incidents = run.incidents()
        assert [found["culprits"][0]["rank"] for found in incidents] == [0, 1] * 10
        assert all(found["recovered_at"] for found in incidents)
        assert len(run.events("attempt_start")) == 21
        assert not run.left_behind()


def test_a_data_loader_worker_that_does_not_end(tmp_path):
    """It ignores SIGTERM. When its rank is killed, it does not keep the next attempt from its start.

    When its rank raises, the rank cannot end either: the hang that this makes is named by what was raised,
    and the second time in a row ends the job.
    """
    faults = "kill:rank=1,step=3,attempt=0;kill:how=exception,rank=1,step=6,attempt=any"
    options = (*TWO, "--max-restarts", "9", "--heartbeat-timeout", "1.5")
    script = ("training.py", "--workers", "1", "--stubborn")
    with job(tmp_path, *options, *script, env={"RESILIENCE_FAULT": faults}) as run:
        assert run.finish() == 77, run.screen
        killed, raised, again = run.incidents()
        assert (killed["kind"], raised["kind"], again["kind"]) == ("crash", "hang", "hang")
        for found in (killed, raised, again):
            assert [named["rank"] for named in found["culprits"]] == [1]
            assert found["victims"] == [0]
        assert killed["recovered_at"]
        assert (raised["category"], raised["cause"]) == ("user", "user_code_error")
        assert raised["recovered_at"]
        assert "InjectedError" in raised["evidence"][0]["text"]
        assert "the same error ended two attempts in a row" in run.last_lines()
        assert len(run.told("worker-*")) == 6
        assert not run.left_behind()


def test_a_killed_launcher_leaves_nothing_behind(tmp_path):
    """SIGKILL of the launcher: ranks, DataLoader workers, fork server, monitor and pages are gone; time is counted."""
    options = (*TWO, "training.py", "--until", str(tmp_path / "end"), "--workers", "1", "--stubborn")
    with job(tmp_path, *options) as run:
        run.wait(lambda: len(run.told("step-0-*")) == 2, "the first step")
        run.monitor_pid()
        assert len(run.processes()) >= 7
        run.process.kill()
        assert not run.left_behind()
        assert not run.incidents()
        assert account_of(run.run_dir)["startup"] > 0


def test_sigterm_to_every_process_ends_the_job_within_the_grace(tmp_path):
    """As a scheduler sends it: 75, nothing left behind, no hang and no crash, and the monitor stays to the end."""
    options = (*TWO, "--heartbeat-timeout", "1", "--preempt-time", "2")
    script = ("training.py", "--until", str(tmp_path / "end"), "--workers", "1", "--stubborn")
    with job(tmp_path, *options, *script) as run:
        run.wait(lambda: len(run.told("step-0-*")) == 2, "the first step")
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert run.finish() == 75, run.screen
        assert [found["kind"] for found in run.incidents()] == ["preemption"]
        assert not run.events("confirmed")
        assert not run.left_behind()
