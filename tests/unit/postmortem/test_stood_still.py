"""What stood still when a job was ended from outside is what its incidents, decision and exit code are about."""

from __future__ import annotations

import time

import attrs
import pytest

from resilience_sdk.attribution.exits import classification
from resilience_sdk.cluster.bus import NodeRelay
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Evidence, Incident, IncidentStore
from resilience_sdk.launcher.restart_policy import decide
from resilience_sdk.postmortem.facts import AttemptFacts, AttemptJournal, EndedBy, RankExit
from resilience_sdk.postmortem.report import Reporter
from resilience_sdk.report.why_page import render

STOOD_S = 40.0
WORDS = "rank 1 on here made no progress for 40 s at step 5 in section 'fwd'"


class Ended:
    """An attempt of two ranks in which rank 1 stood still, and was then ended: what the journal of it holds."""

    def __init__(self, tmp_path) -> None:
        self.run_dir = RunDirectory.create(tmp_path / "run")
        self.store = IncidentStore(self.run_dir.path)
        self.told = AttemptJournal(self.run_dir.journal, "job", 0)
        self.monitor, self.launcher = (
            Journal(self.run_dir.journal, writer=writer, host="here", boot_id="", job="job")
            for writer in ("monitor", "launcher")
        )
        self.began_at = time.time() - 600

    def stall(self, activity: str = "stuck") -> None:
        """Let the monitor tell of the stall."""
        rank = {"rank": 1, "node": "here", "step": 5, "step_is_global": True, "section": "fwd", "activity": activity}
        rank |= {
            "still_s": STOOD_S,
            "frame": "train.py:15 forward",
            "stack": ["train.py:15 forward"],
            "detail": "no CPU",
        }
        self.monitor.emit(Event.STALL, since=time.time() - STOOD_S, for_s=STOOD_S, ranks=[rank], waiting=[0])

    def asked(self) -> None:
        self.launcher.emit(Event.PREEMPT_NOTICE, source="SIGTERM", time_left_s=60.0)

    def conclude(self, by: EndedBy, codes: dict[int, int], **facts):
        """Conclude the attempt now, as the launcher does."""
        now_ns = time.monotonic_ns()
        exits = tuple(RankExit(rank, rank, 1, code, rank, now_ns, False) for rank, code in codes.items())
        found = AttemptFacts(
            attempt=0,
            node="here",
            exits=exits,
            traces={},
            ended_by=by,
            ending_ns=None if by is EndedBy.RANKS else now_ns,
            began_at=self.began_at,
            journal=self.told,
            **facts,
        )
        reporter = Reporter(self.run_dir, self.launcher, NodeRelay(None, self.launcher), term_grace_s=1.0)
        return reporter.conclude(found, None, now_ns)

    def incidents(self):
        return self.store.all()


@pytest.fixture
def ended(tmp_path):
    made = Ended(tmp_path)
    yield made
    made.monitor.close()
    made.launcher.close()


def test_a_job_that_stood_still_when_it_was_to_leave_hung_and_a_retry_of_it_counts(ended):
    """The hang is the first incident, the signal the second, which refers to it; exit code 1 and not 75."""
    ended.stall()
    ended.asked()
    found = ended.conclude(EndedBy.PREEMPTION, {0: -15, 1: -9})
    hang, stop = ended.incidents()
    assert (hang.kind, hang.cause, hang.action) == ("hang", "hang_rank_stuck", "restart")
    assert [culprit.rank for culprit in hang.culprits] == [1]
    assert "SIGTERM to the launcher on here" in hang.evidence[-1].text
    assert (stop.kind, stop.cause, stop.action) == ("preemption", "preemption_sigterm", "restart")
    assert stop.evidence[0] == Evidence("stall", f"{WORDS} (0001-hang: hang_rank_stuck)")
    assert "stood still" in render(stop, "incidents")[0]
    assert found.headline.startswith(
        f"{WORDS} (0001-hang: hang_rank_stuck); then the job was asked to leave by SIGTERM"
    )
    assert (found.end.cause, found.end.action) == ("hang_rank_stuck", "restart")
    decision = decide([found.end], 3)
    assert (decision.verdict.value, decision.exit_code) == ("give_up", 1)
    assert decision.reason == found.headline
    events = [event["kind"] for event in ended.told.events() if event["event"] == "incident"]
    assert events == ["hang", "preemption"]


def test_a_hang_that_was_only_reported_and_stands_is_the_one(ended):
    """No second incident of it: its own says now who ended it, and that the job has to start again."""
    ended.store.create(
        "hang", Incident(attempt=0, detected_at=time.time() - 30, cause="hang_rank_stuck", action="none")
    )
    ended.asked()
    found = ended.conclude(EndedBy.PREEMPTION, {0: -15, 1: -9})
    hang, stop = ended.incidents()
    assert (hang.kind, stop.kind, hang.action) == ("hang", "preemption", "restart")
    assert hang.evidence[-1].source == "ending"
    assert decide([found.end], 3).exit_code == 1


@pytest.mark.parametrize("how", ["went on", "closed", "agreed and saved", "busy", "none"])
def test_where_nothing_stood_a_stop_is_what_it_was(ended, how):
    """Requeued for nothing: nobody stood still, or all stopped as they were asked and had saved."""
    if how == "closed":
        hang = Incident(attempt=0, detected_at=time.time() - 30, cause="hang_rank_stuck", action="none")
        ended.store.mark_recovered(ended.store.create("hang", hang).id, time.time() - 10)
    elif how != "none":
        ended.stall("busy" if how == "busy" else "stuck")
    if how == "went on":
        ended.monitor.emit(Event.STALL_END, why="went on", after_s=STOOD_S)
    ended.asked()
    agreed = how == "agreed and saved"
    if agreed:
        ended.launcher.emit(Event.STOP_AGREED, step=6, check=6)
    saved = {"checkpoint_before": 3, "checkpoint_after": 6, "stop_agreed": True} if agreed else {}
    found = ended.conclude(EndedBy.PREEMPTION, {0: 75, 1: 75} if agreed else {0: -15, 1: -15}, **saved)
    newest = ended.incidents()[-1]
    assert (newest.kind, newest.action, found.end.stood) == ("preemption", "requeue", None)
    assert len(ended.incidents()) == (2 if how == "closed" else 1)
    assert decide([found.end], 3).exit_code == 75


def test_ranks_that_all_left_by_themselves_are_requeued_and_the_stall_is_told(ended):
    """A handler of the script's own may have torn the rank out and saved: nobody knows, and it left."""
    ended.stall()
    ended.asked()
    found = ended.conclude(EndedBy.PREEMPTION, {0: 0, 1: 0})
    assert [incident.kind for incident in ended.incidents()] == ["hang", "preemption"]
    assert decide([found.end], 3).exit_code == 75


@pytest.mark.parametrize(("code", "cause"), [(-9, "rank_killed_sigkill"), (-15, "preemption_sigterm")])
def test_a_rank_that_somebody_ends_while_nothing_moves_is_the_second_thing(ended, code, cause):
    """The restart is for the hang, and counts."""
    ended.stall("stopped")
    found = ended.conclude(EndedBy.RANKS, {1: code})
    hang, crash = ended.incidents()
    assert (hang.cause, crash.kind, crash.cause, crash.action) == ("hang_rank_stopped", "crash", cause, "restart")
    assert crash.evidence[0].text.startswith(WORDS)
    assert (found.end.cause, found.incident) == ("hang_rank_stopped", crash.id)
    assert found.headline.startswith(WORDS)
    assert decide([found.end], 3).restarts
    assert decide([found.end], 3).restarts_left == 2


@pytest.mark.parametrize("code", [-11, 1, -6])
def test_a_rank_that_fails_by_itself_while_another_stands_still_is_a_crash(ended, code):
    """It was nobody else's doing."""
    ended.stall()
    ended.conclude(EndedBy.RANKS, {0: code})
    assert [incident.kind for incident in ended.incidents()] == ["crash"]


def test_what_a_person_interrupts_stood_still_before(ended):
    """Ctrl-C stays 130; the hang has its incident, and is the first thing that is said."""
    ended.stall()
    found = ended.conclude(EndedBy.INTERRUPT, {0: -2, 1: -9})
    (hang,) = ended.incidents()
    assert (hang.kind, hang.evidence[-1].text) == ("hang", "then it was ended: interrupted by the user")
    decision = decide([found.end], 3)
    assert decision.exit_code == 130
    assert decision.reason.startswith(WORDS)
    assert "; then interrupted by the user; " in decision.reason


def test_a_gpu_that_is_gone_is_why_it_stood_still(ended):
    """Where nobody can tell why it does not move, the kernel is surer, and the node is to be left out."""
    ended.stall("unknown")
    ended.asked()
    lost = classification("gpu_fell_off_bus", 0.9, Evidence("kernel", "Xid 79"))
    found = ended.conclude(EndedBy.PREEMPTION, {0: -15, 1: -9}, node_told=(lost,))
    assert ended.incidents()[0].cause == "gpu_fell_off_bus"
    assert decide([found.end], 3).exit_code == 76


def test_a_full_disk_changes_the_decision_in_nothing(ended):
    """The words are the same without the incident's number."""
    ended.stall()
    ended.asked()
    ended.run_dir.incidents.rmdir()
    ended.run_dir.incidents.write_text("in the way")
    found = ended.conclude(EndedBy.PREEMPTION, {0: -15, 1: -9})
    assert found.end.stood == f"{WORDS} (hang_rank_stuck)"
    assert decide([attrs.evolve(found.end, exit_codes={0: -15})], 3).exit_code == 1
