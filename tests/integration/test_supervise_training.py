"""The supervisor around our launcher and around torchrun, with a training that is ended from outside."""

from __future__ import annotations

import email.utils
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from test_supervise import supervised

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "preemption"))
from metadata_services import Azure, serving

from resilience_sdk.core.journal import Event, Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory

OURS = (sys.executable, "-m", "resilience_sdk", "run", "supervised_training.py")
TORCHRUN = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=1",
    "supervised_training.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_run_of_the_launcher_goes_on_from_the_last_checkpoint(tmp_path, number):
    """The launcher is killed, or told to leave, behind the supervisor's back: the next one resumes and finishes.

    The rank sits in a step and cannot stop at an agreed one; what it had saved before is what counts.
    """
    with supervised(tmp_path, *OURS, env={"RESILIENCE_PREEMPT_TIME": "1"}) as job:
        job.wait((job.told / "waiting").exists, "step 12")
        events = read_journal(job.run_dir / "journal").events
        (launcher,) = [event["pid"] for event in events if event["event"] == "run_start"]
        os.kill(launcher, number)
        assert job.finish() == 0, job.screen
        assert job.runs() == 2
        assert [event["verdict"] for event in job.decisions()] == ["restart", "finished"]
        assert job.decisions()[0]["code"] == (-9 if number == signal.SIGKILL else 75)
        steps = [int(line) for line in (job.told / "steps").read_text().split()]
        second = steps[13:]
        assert second[0] in range(10, 14)
        assert second[-1] == 29
        assert len(second) == 30 - second[0]
        assert (job.run_dir / "finished").exists()


def test_a_job_that_comes_back_is_not_taken_for_the_one_that_stopped(tmp_path):
    """A requeued job has the key of the one before: that one's agreed stop does not keep this one from finishing."""
    journal = RunDirectory.create(tmp_path / "run").journal
    before = Journal(journal, writer="monitor", host="node", boot_id="b", job="slurm-7")
    before.emit(Event.STOP_AGREED, step=3)
    before.close()
    command = (sys.executable, "-m", "resilience_sdk", "run", "--no-python", "true")
    with supervised(tmp_path, *command, env={"RESILIENCE_JOB_ID": "slurm-7"}) as job:
        assert job.finish() == 0, job.screen
        assert [event["verdict"] for event in job.decisions()] == ["finished"]
        assert (job.run_dir / "finished").exists()


@pytest.mark.slow
def test_a_notice_that_stays_listed_stops_the_job_once(tmp_path):
    """Maintenance lies half an hour ahead: the run that hears of it saves and stops, the next one trains to its end."""
    at = email.utils.formatdate(time.time() + 1800, usegmt=True)
    command = (*OURS[:-1], "noticed_training.py", "60")
    with serving(Azure()) as azure:
        azure.events = [
            {
                "EventId": "f020",
                "EventType": "Reboot",
                "Resources": [azure.name],
                "NotBefore": at,
                "EventStatus": "Scheduled",
            }
        ]
        env = {"RESILIENCE_CLOUD_NOTICES": "azure", "RESILIENCE_CLOUD_ENDPOINT": azure.url}
        with supervised(tmp_path, *command, env=env) as job:
            assert job.finish() == 0, job.screen
            assert [(event["code"], event["verdict"]) for event in job.decisions()] == [
                (75, "restart"),
                (0, "finished"),
            ]
            assert [int(line) for line in (job.told / "steps").read_text().split()] == list(range(60))
            assert "azure reboot: scheduled event Reboot f020: an earlier start has stopped for this" in job.screen
        assert {method for method, *_ in azure.asked} == {"GET"}


@pytest.mark.slow
def test_a_launcher_of_somebody_else_resumes_too(tmp_path):
    """torchrun is killed; its ranks follow, and the next torchrun's ranks find the same directory."""
    with supervised(tmp_path, *TORCHRUN) as job:
        job.wait((job.told / "waiting").exists, "step 12")
        ranks = [e["pid"] for e in read_journal(job.run_dir / "journal").events if e["event"] == "rank_start"]
        assert len(ranks) == 1
        os.kill(ranks[0], signal.SIGKILL)
        assert job.finish() == 0, job.screen
        assert job.runs() == 2
        steps = [int(line) for line in (job.told / "steps").read_text().split()]
        assert steps[13] in range(10, 14)
        assert steps[-1] == 29
