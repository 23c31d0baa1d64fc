"""Deaths under a foreign launcher: who is named, and who is not."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from checkpoint_files import leave_checkpoint as saved

from resilience_sdk.checkpoint.history import PRIOR_MTTF_S, mean_time_to_failure_s
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.monitor.other_launchers import DeathWatch, resume_command
from resilience_sdk.monitor.ranks import WatchedRank
from resilience_sdk.recorder import page_layout
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.system.hostinfo import process_start_ticks

LOST_PEER = {"type": "RuntimeError", "message": "[gloo] Connection closed by peer [127.0.0.1]:4242", "frames": []}


@pytest.fixture
def watch(tmp_path, journal):
    """A watch over the deaths of a job without a launcher of ours."""
    (tmp_path / "incidents").mkdir()
    config = JobConfig("job", str(tmp_path), True, {}, "report", "train.py", None, None, 1, 1, 1, 1)
    return SimpleNamespace(deaths=DeathWatch(config, IncidentStore(tmp_path), journal, "here"), journal=journal)


@pytest.fixture
def dead_rank(tmp_path):
    """Make ranks that died at a time, with a wait status and perhaps an exception."""
    made = []

    def make(
        rank: int, died_ns: int, status: int | None, exception: dict | None = None, checks: int = 0
    ) -> WatchedRank:
        stem = tmp_path / f"a0-r{rank}-{os.getpid()}"
        page = RankPage.create(
            stem.with_suffix(".page"),
            pid=os.getpid(),
            start_ticks=1,
            rank=rank,
            local_rank=rank,
            world_size=2,
            attempt=0,
            created_ns=1,
            facts={"host": "here", "script": "train.py"},
        )
        page.words[page_layout.W_CHECKS] = checks
        reader = PageReader(page.path)
        watched = WatchedRank(stem, reader, reader.snapshot(), None)
        watched.died_ns, watched.wait_status = died_ns, status
        if exception is not None:
            stem.with_suffix(".error.json").write_text(json.dumps(exception))
        made.append(watched)
        return watched

    yield make
    for watched in made:
        watched.close()


def outcome(run_dir) -> dict:
    """What `outcome.json` says."""
    return json.loads((run_dir / "outcome.json").read_text())


def events(journal, name: str) -> list[dict]:
    """The journal's events of one name."""
    found = [json.loads(line) for line in journal.path.read_text().splitlines()]
    return [event for event in found if event["event"] == name]


def test_who_is_ended_after_a_symptom_is_no_culprit(watch, dead_rank, tmp_path):
    """A rank that lost its peer dies first, torchrun ends the other: the fault is with neither of the two."""
    ranks = [dead_rank(0, 1000, 1 << 8, LOST_PEER), dead_rank(1, 2000, signal.SIGTERM)]
    watch.deaths.conclude(ranks)
    (incident,) = IncidentStore(tmp_path).all()
    assert incident.culprits == ()
    assert incident.cause != "preemption_sigterm"
    assert incident.action != "requeue"


def test_who_died_first_of_its_own_stays_the_culprit(watch, dead_rank, tmp_path):
    """The end of the others by the launcher changes nothing for the rank that was killed before."""
    ranks = [dead_rank(0, 2000, signal.SIGTERM), dead_rank(1, 1000, signal.SIGKILL)]
    watch.deaths.conclude(ranks)
    (incident,) = IncidentStore(tmp_path).all()
    assert [culprit.rank for culprit in incident.culprits] == [1]


def test_an_exit_is_journalled_as_our_launcher_does(watch, dead_rank):
    """`rank` is the rank that ended; a signal is named and is no exit code."""
    watch.deaths.note([dead_rank(0, 1000, 3 << 8), dead_rank(1, 2000, signal.SIGTERM)])
    found = [(e["rank"], e["exit_code"], e["signal"]) for e in events(watch.journal, "rank_exit")]
    assert found == [(0, 3, None), (1, None, "SIGTERM")]


@pytest.mark.parametrize(
    "other", [75 << 8, signal.SIGTERM, 1 << 8], ids=["left too", "ended by torchrun", "failed at exit"]
)
def test_ranks_that_leave_as_they_were_asked_are_a_preemption(watch, dead_rank, tmp_path, capfd, other):
    """Exit code 75 is nobody's fault, whatever the launcher does to the rest, and no failure in the time to one."""
    watch.journal.emit(Event.PREEMPT_NOTICE, source="SIGTERM", attempt=0)
    saved(tmp_path, 8)
    watch.journal.emit(Event.STOP_AGREED, step=10, attempt=0)
    watch.deaths.conclude([dead_rank(1, 2000, other), dead_rank(0, 1000, 75 << 8)])
    (incident,) = IncidentStore(tmp_path).all()
    assert (incident.kind, incident.culprits, incident.victims) == ("preemption", (), ())
    assert (incident.cause, incident.action, incident.lost_steps) == ("preemption_sigterm", "requeue", 2)
    newest = "the newest was saved after 8 steps; all ranks stopped after 10 steps, 2 steps lost"
    assert [item.text for item in incident.evidence[:2]] == ["SIGTERM to the launcher on h", newest]
    said = capfd.readouterr().err
    assert "CRASH" not in said
    assert f"incidents/{incident.id}/report.md" in said
    (told,) = events(watch.journal, "incident")
    assert told["kind"] == "preemption"
    assert mean_time_to_failure_s([told]) == PRIOR_MTTF_S


def test_deaths_of_one_look_hide_no_preemption(watch, dead_rank, tmp_path):
    """A look late enough to see the rank that left and the one that was ended for it at once."""
    watch.deaths.conclude([dead_rank(0, 1000, signal.SIGTERM), dead_rank(1, 1000, 75 << 8)])
    (incident,) = IncidentStore(tmp_path).all()
    assert (incident.kind, incident.culprits) == ("preemption", ())


def test_a_rank_that_fails_while_another_leaves_is_a_crash(watch, dead_rank, tmp_path):
    """An exception of its own stays one."""
    own = {"type": "ValueError", "message": "no such layer", "frames": ["train.py:1 save"]}
    watch.deaths.conclude([dead_rank(0, 1000, 75 << 8), dead_rank(1, 1001, 1 << 8, own)])
    (incident,) = IncidentStore(tmp_path).all()
    assert (incident.kind, [culprit.rank for culprit in incident.culprits]) == ("crash", [1])


@pytest.mark.parametrize(
    "status",
    [signal.SIGTERM, signal.SIGKILL, None],
    ids=["at its own deadline", "at the launcher's", "nobody can tell how"],
)
def test_ranks_that_are_ended_because_no_stop_was_agreed_are_a_preemption_too(watch, dead_rank, tmp_path, status):
    """The incident names who hindered it and the cure, and the outcome says preempted and how to go on."""
    watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=0.5)
    ranks = [dead_rank(0, time.monotonic_ns(), status, checks=9), dead_rank(1, time.monotonic_ns(), status)]
    saved(tmp_path, 8)
    watch.deaths.conclude(ranks, everything=True)
    (incident,) = IncidentStore(tmp_path).all()
    assert (incident.kind, incident.cause, incident.action) == ("preemption", "preemption_sigterm", "requeue")
    assert [(culprit.rank, culprit.node) for culprit in incident.culprits] == [(1, "here")]
    assert "call preemption.check() in the loop of rank 1" in str(incident.advice)
    told = outcome(tmp_path)
    assert (told["verdict"], told["exit_code"], told["checkpoint"]) == ("preempted", 75, 8)
    assert "SIGTERM to rank 0 on" in told["reason"]
    assert "rank 1 on here never calls preemption.check()" in told["reason"]


@pytest.mark.parametrize(("status", "asked"), [(signal.SIGKILL, True), (signal.SIGTERM, False), (1 << 8, True)])
def test_who_dies_for_another_reason_was_not_preempted(watch, dead_rank, tmp_path, status, asked):
    """Killed long before the time was over, ended by a signal that nobody heard, or failed by itself."""
    if asked:
        watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=60.0)
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), status, checks=9)], everything=True)
    assert [i.kind for i in IncidentStore(tmp_path).all()] == ([] if status == signal.SIGTERM else ["crash"])
    assert outcome(tmp_path)["verdict"] == "give_up"


def test_the_signal_by_which_a_failed_attempt_is_ended_is_no_preemption(watch, dead_rank, tmp_path):
    """torchrun ends the others by SIGTERM, which they hear as any other; the first has died before that."""
    died = dead_rank(1, time.monotonic_ns(), signal.SIGKILL)
    watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=0.5)
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), signal.SIGTERM), died], everything=True)
    assert [i.kind for i in IncidentStore(tmp_path).all()] == ["crash"]
    assert outcome(tmp_path)["verdict"] == "give_up"


def test_a_signal_at_the_time_of_a_death_that_nobody_can_explain_is_told(watch, dead_rank, tmp_path):
    """Where the launcher collects its children at once, a rank without a handler and one that was killed look alike."""
    died = dead_rank(1, time.monotonic_ns(), None)
    watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=60.0)
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), None), died], everything=True)
    (incident,) = IncidentStore(tmp_path).all()
    assert incident.kind == "crash"
    assert "SIGTERM to rank 0" in incident.evidence[-1].text


def stall(journal, activity: str = "stuck", node: str = "here") -> None:
    """Let a monitor tell that everybody has waited for rank 1 for 40 s."""
    rank = {"rank": 1, "node": node, "step": 5, "section": "fwd", "activity": activity, "still_s": 40.0, "stack": []}
    journal.emit(Event.STALL, since=time.time() - 40, for_s=40.0, ranks=[rank], waiting=[0])


WORDS = "rank 1 on here made no progress for 40 s at step 5 in section 'fwd' (0001-hang: hang_rank_stuck)"


def test_a_job_that_stood_still_when_it_was_to_leave_hung(watch, dead_rank, tmp_path, capfd):
    """The hang first, the signal second; the outcome says 1 and not 75, so that a supervisor counts the retry."""
    stall(watch.journal)
    watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=30.0)
    ranks = [dead_rank(rank, time.monotonic_ns(), signal.SIGTERM, checks=9) for rank in (0, 1)]
    watch.deaths.conclude(ranks, everything=True)
    hang, stop = IncidentStore(tmp_path).all()
    assert (hang.kind, hang.cause, hang.action) == ("hang", "hang_rank_stuck", "restart")
    assert (stop.kind, stop.cause, stop.action) == ("preemption", "preemption_sigterm", "restart")
    assert stop.evidence[0].text == WORDS
    told = outcome(tmp_path)
    assert (told["verdict"], told["exit_code"], told["stood"]) == ("give_up", 1, WORDS)
    assert told["reason"].startswith(f"{WORDS}; then the job was asked to leave by SIGTERM to rank 0")
    assert capfd.readouterr().err.count(WORDS) == 1


@pytest.mark.parametrize("status", [signal.SIGTERM, signal.SIGKILL, None])
def test_ranks_without_our_handlers_that_are_ended_while_nothing_moves_hung(watch, dead_rank, tmp_path, status):
    """By whoever runs the launcher, or by hand: nobody hears the signal, and the stall is told all the same."""
    stall(watch.journal)
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), status)], everything=True)
    hang, *rest = IncidentStore(tmp_path).all()
    assert (hang.kind, [culprit.rank for culprit in hang.culprits]) == ("hang", [1])
    assert [incident.kind for incident in rest] == ([] if status == signal.SIGTERM else ["crash"])
    told = outcome(tmp_path)
    assert (told["exit_code"], told["stood"]) == (1, WORDS)
    assert told["reason"].startswith(f"{WORDS}; then it was ended")


def test_a_hang_that_stands_reported_when_the_job_is_to_leave_is_the_first_thing(watch, dead_rank, tmp_path):
    """It was left alone until somebody ended the job; after that it has to start again."""
    hang = Incident(attempt=0, detected_at=time.time(), cause="hang_rank_stuck", category="hang", action="none")
    IncidentStore(tmp_path).create("hang", hang)
    watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=30.0)
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), signal.SIGTERM, checks=9)], everything=True)
    first, second = IncidentStore(tmp_path).all()
    assert (first.kind, first.action, second.kind) == ("hang", "restart", "preemption")
    assert "SIGTERM" in first.evidence[-1].text
    assert outcome(tmp_path)["exit_code"] == 1


def test_a_stall_that_somebody_waits_out_is_no_hang(watch, dead_rank, tmp_path):
    """A busy rank, and one that failed by itself."""
    stall(watch.journal, "busy")
    watch.journal.emit(Event.PREEMPT_NOTICE, source="rank 0: SIGTERM", kind="signal", rank=0, time_left_s=30.0)
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), signal.SIGTERM, checks=9)], everything=True)
    assert [incident.kind for incident in IncidentStore(tmp_path).all()] == ["preemption"]
    assert (outcome(tmp_path)["exit_code"], outcome(tmp_path)["stood"]) == (75, None)


def test_a_rank_that_raises_while_another_stands_still_is_a_crash(watch, dead_rank, tmp_path):
    """What it raised is its own."""
    stall(watch.journal)
    own = {"type": "ValueError", "message": "no such layer", "frames": ["train.py:1 save"]}
    watch.deaths.conclude([dead_rank(0, time.monotonic_ns(), 1 << 8, own)])
    assert [incident.kind for incident in IncidentStore(tmp_path).all()] == ["crash"]


def test_the_outcome_says_whether_an_ending_for_a_hang_counts(watch, dead_rank, tmp_path):
    """A supervisor counts no retry after a free one, and makes none after the last."""
    rank = dead_rank(0, time.monotonic_ns(), signal.SIGKILL)
    watch.deaths.explained(0, free=True)
    watch.deaths.conclude([rank], everything=True)
    assert (outcome(tmp_path)["exit_code"], outcome(tmp_path)["free"]) == (1, True)
    watch.deaths.explained(0, final="it hung at train.py:15 for the third time")
    watch.deaths.conclude([rank], everything=True)
    told = outcome(tmp_path)
    assert (told["verdict"], told["exit_code"], told["free"]) == ("stop", 77, False)
    assert told["reason"] == "it hung at train.py:15 for the third time"


def test_how_to_resume_is_the_command_of_who_started_the_ranks(tmp_path):
    """That of a Python launcher with its words quoted and its secrets gone; of another program nobody knows it."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, "--run name", "--api-key", "hunter2"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()  # Linux lets the starter go on before the new command line can be read
        ticks = process_start_ticks(parent.pid)
        config = JobConfig("job", str(tmp_path), True, {}, "report", "t.py", None, None, 1, 1, parent.pid, ticks)
        told = resume_command(config)
        parent.stdin.close()
    assert told == f"RESILIENCE_RUN_DIR={tmp_path} {shlex.join([*words[:-1], '[redacted]'])}"
    assert resume_command(config) == f"RESILIENCE_RUN_DIR={tmp_path} <the same command>"
