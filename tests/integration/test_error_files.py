"""The exception of the first rank to fail, with real ranks: in the incident, and last on the screen."""

import json
import os
import subprocess
import sys
import time

import pytest
from launcher_runs import PROJECT, SCRIPTS, launch

TWO = ("--nproc-per-node", "2", "--max-restarts", "0")
HOWS = {
    "main": ("ValueError: step 3 does not like this batch", "train", "user_code_error"),
    "worker": ("ValueError: sample 6 has a negative length", "__getitem__", "dataloader_exception"),
    "thread": ("ValueError: the background thread has lost its queue", "background", "user_code_error"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_the_first_ranks_own_traceback_is_the_last_on_the_screen(tmp_path, how):
    """Raised in the loop, in a DataLoader worker or in a thread: named, shown, and soon over."""
    last, function, cause = HOWS[how]
    run = launch(tmp_path, *TWO, "raising.py", how)
    assert run.finish() == 1, run.err
    (incident,) = run.incidents()
    (culprit,) = incident["culprits"]
    assert (culprit["rank"], incident["cause"], incident["action"]) == (1, cause, "stop")
    assert culprit["stack"][0].endswith(f" {function}")
    shown = run.err.rpartition("the first to fail was rank 1:")[2]
    assert f"resilience: {last}" in shown
    assert "Connection closed" not in shown
    died = next(event["t"] for event in run.events("rank_exit") if event["rank"] == 1)
    assert run.events("decision")[0]["t"] - died < 5.0  # measured: 0.3 s


@pytest.mark.slow
def test_under_torchrun_the_exception_is_in_the_incident_and_in_torchruns_own_words(tmp_path):
    """Without `@record` torchrun would know an exit code; our error file tells it what was raised."""
    env = {**os.environ, "PYTHONPATH": str(PROJECT), "RESILIENCE_RUN_DIR": str(tmp_path / "run")}
    env["RESILIENCE_PAGE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "raising.py", "main"], cwd=SCRIPTS, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    cause = done.stderr.rpartition("Root Cause")[2]
    assert "rank      : 1" in cause
    assert "ValueError: step 3 does not like this batch" in cause
    deadline = time.monotonic() + 20
    while not (reports := list((tmp_path / "run" / "incidents").glob("[0-9]*/report.json"))):
        assert time.monotonic() < deadline, done.stderr
        time.sleep(0.05)
    report = json.loads(reports[0].read_text())
    assert [culprit["rank"] for culprit in report["culprits"]] == [1]
    assert any("step 3 does not like this batch" in item["text"] for item in report["evidence"])
