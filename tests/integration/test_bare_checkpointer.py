"""A `Checkpointer` without a `Run` is journalled like one with it, so that all that reads the journal knows of it."""

from __future__ import annotations

import sys

import pytest
from harness import job

from resilience_sdk.cli.status import collect
from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.run_directory import RunDirectory

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "place"),
    [(None, "run"), (TORCHRUN, "run"), (None, "elsewhere")],
    ids=["resilience run", "torchrun", "a directory of its own"],
)
def test_a_checkpoint_that_kills_twice_is_passed_over(tmp_path, command, place):
    """Saves, resumes and the crashes after them are put together: the third attempt to resume takes an older one."""
    saved = tmp_path / place
    with job(tmp_path, "bare_saving.py", str(saved), command=command) as run:
        assert run.finish() == 0, run.screen
        assert (tmp_path / "told" / "resumed").read_text().split("\n") == ["0 0", "2 2", "2 2", "1 1", ""], run.screen
        assert ("name the former with --run-dir" in run.screen) == (place != "run")
        assert not run.left_behind()
    events = read_journal(saved / "journal").events
    assert [event["step"] for event in events if event["event"] == "resume"] == [2, 2, 1]
    assert [event["step"] for event in events if event["event"] == "ckpt_commit"] == [1, 2, 2, 3, 4]
    (quarantine,) = [event for event in events if event["event"] == "ckpt_quarantine"]
    assert (quarantine["step"], quarantine["attempt"], quarantine["rank"]) == (2, 3, 0)
    assert collect(RunDirectory.open(saved))["checkpoint"]["step"] == 4


@pytest.mark.slow
def test_who_waits_in_a_save_that_is_due_is_not_behind_its_loop(tmp_path):
    """Between two steps nothing else is open: the one that is waited for is named, by the time outside of sections."""
    times = ("--heartbeat-timeout", "2", "--out-of-section-timeout", "2", "--initial-heartbeat-timeout", "20")
    with job(tmp_path, "--nproc-per-node", "2", *times, "agreeing.py") as run:
        assert run.finish() == 0, run.screen
        (incident,) = run.incidents()
    assert (incident["kind"], [culprit["rank"] for culprit in incident["culprits"]]) == ("hang", [1]), run.screen
