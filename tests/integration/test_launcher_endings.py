"""How a job ends: the exit code, what is written, what is said. Real launchers, real ranks."""

import json

import pytest
from launcher_runs import launch

from resilience_sdk.cli.main import main

TWO = ("--nproc-per-node", "2")
# Scripts without torch start sooner when no server loads it first.
EXEC = ("--start-method", "exec")


def test_success_is_0_and_sets_the_finished_flag_which_the_next_start_respects(tmp_path):
    """All ranks 0: exit 0, `finished`, no incident, nothing left; started again it says so and runs no rank."""
    flag = tmp_path / "their-flag"
    run = launch(tmp_path, *TWO, *EXEC, "job.py", "finish", env={"FAULT_TOL_FINISHED_FLAG_FILE": str(flag)})
    assert run.finish() == 0, run.err
    assert sorted(run.out.splitlines()) == ["hello from 0", "hello from 1"]
    assert (run.run_dir / "finished").exists()
    assert flag.exists()
    assert run.outcome()["verdict"] == "finished"
    assert not run.incidents()
    assert not run.left_pages()
    assert [e["rank"] for e in sorted(run.events("rank_exit"), key=lambda e: e["rank"])] == [0, 1]
    (tmp_path / "pid-0-0").unlink()

    again = launch(tmp_path, *TWO, *EXEC, "job.py", "finish")
    assert again.finish() == 0
    assert "is finished" in again.err
    assert not (tmp_path / "pid-0-0").exists()


@pytest.mark.slow
def test_fresh_begins_anew_beside_what_is_finished(tmp_path):
    """The directory of before is set aside, with its flag."""
    assert launch(tmp_path, *EXEC, "job.py", "finish").finish() == 0
    (tmp_path / "pid-0-0").unlink()
    fresh = launch(tmp_path, *EXEC, "--fresh", "job.py", "finish")
    assert fresh.finish() == 0, fresh.err
    assert (tmp_path / "pid-0-0").exists()
    assert len(list(tmp_path.glob("run.before-*/finished"))) == 1


@pytest.mark.slow
def test_the_same_exception_in_two_attempts_stops_the_job_with_77(tmp_path):
    """It is retried once, the culprit is the rank that raised, the other one a victim."""
    run = launch(tmp_path, *TWO, "job.py", "raise")
    assert run.finish() == 77, run.err
    first, second = run.incidents()
    for incident in (first, second):
        assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
        assert incident["victims"] == [0]
        assert (incident["category"], incident["cause"]) == ("user", "user_code_error")
        assert any("job.py" in frame for frame in incident["culprits"][0]["stack"])
    assert [event["verdict"] for event in run.events("decision")] == ["restart", "stop"]
    assert "the same error" in run.err
    assert "ValueError: the same thing again" in run.err
    assert "torch.distributed.elastic" not in run.err
    assert f"resilience run --run-dir {run.run_dir}" in run.err


def test_a_spent_budget_is_1_and_the_exit_code_is_on_record(tmp_path):
    """--max-restarts counts restarts; the rank that exited is the culprit, the one that we ended is not."""
    run = launch(tmp_path, *TWO, *EXEC, "--max-restarts", "1", "job.py", "exit", "3")
    assert run.finish() == 1, run.err
    assert len(run.events("attempt_start")) == 2
    assert [e["exit_code"] for e in run.events("rank_exit") if e["rank"] == 1] == [3, 3]
    assert [e["ended_by_launcher"] for e in run.events("rank_exit") if e["rank"] == 0] == [True, True]
    assert [c["rank"] for i in run.incidents() for c in i["culprits"]] == [1, 1]
    assert run.outcome()["exit_code"] == 1
    assert "restart 1 of 1" in run.err


def test_the_same_death_after_a_restart_is_told_once(tmp_path, capsys):
    """`why` has the incident, that it came again, how the job ended and the command: each once, in words that fit."""
    run = launch(tmp_path, *TWO, *EXEC, "--max-restarts", "1", "job.py", "exit", "3")
    assert run.finish() == 1, run.err
    assert main(["why", str(run.run_dir)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("0001-crash  Rank 1 on ")
    assert "\n0002-crash  The same as 0001-crash, in attempt 1 at " in said
    assert "; the job ended before it recovered.\n" in said
    assert " with exit code 1: its 1 restart is spent without a new checkpoint.\n" in said
    assert said.count(f"\n  resilience run --run-dir {run.run_dir} ") == 1
    assert "yet" not in said
    lines = [line for line in said.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)) <= 8


def test_a_rank_that_leaves_with_75_is_not_restarted(tmp_path):
    """75 is the end of the job, and no crash; the rank that stays is ended."""
    run = launch(tmp_path, *TWO, *EXEC, "--preempt-time", "0.2", "job.py", "exit", "75")
    assert run.finish() == 75, run.err
    assert len(run.events("attempt_start")) == 1
    assert [incident["kind"] for incident in run.incidents()] == ["preemption"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "exec"])
def test_modules_and_redirected_streams_work_as_under_torchrun(tmp_path, method):
    """-m, --redirects and --tee: files per rank under the log directory, teed lines on the console."""
    logs = tmp_path / "logs"
    run = launch(
        tmp_path, *TWO, "--start-method", method, "--log-dir", str(logs), "-r", "1", "-t", "2", "-m", "job", "finish"
    )
    assert run.finish() == 0, run.err
    assert "hello" not in run.out
    assert sorted(path.read_text() for path in logs.rglob("stdout.log")) == ["hello from 0\n", "hello from 1\n"]
    assert "[default1]:problem of 1" in run.err


@pytest.mark.slow  # the fast form, of the same code in one process, is in test_bad_input.py
def test_mistakes_end_with_2_before_any_rank_starts(tmp_path):
    """An unknown option names its nearest match; a directory that another job uses is refused."""
    wrong = launch(tmp_path, "--max-restrats", "3", "job.py", "finish")
    lease = {"job": "another", "host": "elsewhere", "pid": 1, "boot_id": "b", "started_at": 0.0}
    used = tmp_path / "used"
    (used / "journal").mkdir(parents=True, mode=0o700)
    used.chmod(0o700)
    (used / "lease.json").write_text(json.dumps(lease))
    busy = launch(tmp_path, "job.py", "finish", run_dir=used)
    assert wrong.finish() == 2
    assert "did you mean --max-restarts?" in wrong.err
    assert busy.finish() == 2
    assert "in use by job another" in busy.err
    assert not list(tmp_path.glob("pid-*"))


@pytest.mark.slow
def test_forked_ranks_end_though_gloo_still_holds_the_work_of_a_backward_pass(tmp_path):
    """torch's reducer joins gloo's thread with the GIL held; without our pause most runs of this script never end."""
    run = launch(tmp_path, *TWO, "ddp_ends.py")
    assert run.finish() == 0, run.err
    assert run.out.splitlines() == ["ended", "ended"]
