"""A process that does not end after its training is reported with what holds it, and ended where a setting says so."""

import sys

import pytest
from harness import SCRIPTS, job

pytestmark = pytest.mark.slow
_QUICK = ("--stuck-after", "6")  # a notice after 1 s


def test_a_finished_rank_that_does_not_end_is_ended_by_the_setting(tmp_path):
    """Its finish is proven by `heartbeat.done()` of all ranks: the job counts as finished."""
    with job(tmp_path, "--nproc-per-node", 2, *_QUICK, "--exit-timeout", 8, "unended.py", "thread", "done") as run:
        assert run.finish() == 0
        told = next(event for event in run.events("stall") if event["ranks"][0]["rank"] == 1)
        assert told["kind"] == "exit"
        assert "after its training was done: its thread 'prefetch' at " in told["text"]
        assert told["text"] in run.screen
        assert "rank 1 has finished, and its process has not ended in" in run.screen
        assert run.events("rank_exit", rank=1)[0]["exit_code"] == 0
        assert run.outcome()["verdict"] == "finished"
        assert not run.incidents()
        assert not run.left_behind()


def test_a_finished_rank_that_still_saves_is_not_ended(tmp_path):
    """In a thread that outlives the script, for longer than the setting has it."""
    with job(tmp_path, "--nproc-per-node", 2, "--exit-timeout", 2, "unended.py", "saves", "done") as run:
        assert run.finish() == 0
        assert run.told("saved.json")[0].read_text() == "[0, 1, 2]"
        assert "rank 1 has finished, and still saves at unended.py:" in run.screen
        assert not run.events("signal_sent")


@pytest.mark.parametrize(
    ("how", "holder"),
    [
        ("at-exit", "an at-exit function has not returned at unended.py:"),
        ("child", "it waits for its child process {child} (sleep 1000)"),
    ],
)
def test_a_script_whose_finish_is_not_proven_is_reported_only(tmp_path, how, holder):
    """Under plain `python`, too; the setting ends nothing there."""
    command = (sys.executable, "-m", "resilience_sdk.auto", str(SCRIPTS / "unended.py"), how)
    env = {"RESILIENCE_STUCK_AFTER": "6", "RESILIENCE_EXIT_TIMEOUT": "1"}
    with job(tmp_path, command=command, env=env) as run:
        told = run.wait_event("stall", count=2)[-1]
        child = next((str(pid) for pid, words in run.processes().items() if words.startswith("sleep")), "")
        assert "rank 0 has not ended" in told["text"]
        assert "after its main thread has ended" in told["text"]
        assert holder.format(child=child) in told["text"]
        assert run.process.poll() is None
