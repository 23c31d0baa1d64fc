"""How a job ends whose attempts never begin."""

import signal
from types import SimpleNamespace

import pytest

from resilience_sdk.core.journal import Journal, read_journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.launcher.attempt import AttemptFiles
from resilience_sdk.launcher.job import Job
from resilience_sdk.launcher.restart_policy import Decision
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.facts import RankExit
from resilience_sdk.postmortem.outcome import Outcome, write_outcome


@pytest.fixture
def run_dir(tmp_path):
    """An empty run directory."""
    return RunDirectory.create(tmp_path / "run")


def ended(run_dir, agent, ready=True, inboxes=None):
    """Return the decision that ended a job, and the decisions that its journal tells."""
    agent = agent if isinstance(agent, SimpleNamespace) else SimpleNamespace(meet=agent)
    journal = Journal(run_dir.journal, writer="launcher", host="a", boot_id="", job="job")
    with SignalInbox(["SIGTERM"]) as inbox:
        if inboxes is not None:
            inboxes.append(inbox)
        job = Job(
            agent,
            key="job",
            settings=Settings(),
            run_dir=run_dir,
            journal=journal,
            files=AttemptFiles(None),
            inbox=inbox,
            housekeeping=SimpleNamespace(tend=lambda: None),
            logs=SimpleNamespace(error_files={}, log_files={}),
            preflight=SimpleNamespace(hold=lambda: ready),
        )
        decision = job.run().decision
    events = read_journal(run_dir.journal).events
    return decision, [(event["verdict"], event["others_go_on"]) for event in events if event["event"] == "decision"]


def no_store(_):
    """Fail to meet."""
    raise RuntimeError("no store")


def test_nodes_that_never_met_are_told(run_dir):
    """To the journal, too: whoever watches it is to learn that the job has ended."""
    decision, told = ended(run_dir, no_store)
    assert decision.reason == "the nodes did not meet (RuntimeError: no store)"
    assert told == [("give_up", False)]


def test_what_nodes_found_of_one_another_is_told(run_dir):
    """And whether the job goes on without this one."""
    out = Decision(JobVerdict.HARDWARE, "it is slow", others_go_on=True)
    assert ended(run_dir, lambda number: number, out) == (out, [("hardware", True)])


def test_what_leaving_loses_once_ranks_have_run_is_no_longer_nothing(run_dir):
    """Ranks failed; then the process does not come back to its next attempt, and whoever ends it has the words."""
    ranks = SimpleNamespace(
        exits=[RankExit(0, 0, 100, 1, 0, 1, False)],
        exit_codes={0: 1},
        running=(),
        pids={0: 100},
        unkillable=(),
        server_end=None,
        wait=lambda _: [],
        kill=lambda: None,
        close=lambda: None,
    )
    seen = []

    def meet(number):
        seen.append(inboxes[0].stage)
        if number:
            signal.raise_signal(signal.SIGTERM)
        return number

    agent = SimpleNamespace(
        meet=meet,
        start=lambda *_: ranks,
        ranks={0: 0},
        world_size=1,
        node=0,
        nodes=1,
        node_name="a",
        rendezvous_s=0.0,
        store=None,
        elastic=False,
        peers=(),
        store_host="",
        own_port=None,
        spare_nodes=0,
        holds_store=True,
    )
    inboxes = []
    decision, told = ended(run_dir, agent, inboxes=inboxes)
    again = "before its ranks started again after a fault; the SDK saved nothing, what the script saved itself is kept"
    assert seen == ["before its ranks started; nothing is lost", again]
    assert decision.reason.endswith(again)
    assert told[-1] == ("preempted", False)


def test_what_another_node_has_decided_is_told_by_that(run_dir):
    """It is one decision."""
    outcome = Outcome(
        verdict=JobVerdict.PREEMPTED,
        exit_code=EXIT_PREEMPTED,
        reason="asked to leave",
        job="job",
        run_dir=str(run_dir.path),
        node="b",
        started_at=1.0,
        ended_at=2.0,
        attempts=1,
        what=None,
        incidents=(),
        checkpoint=None,
        resume=None,
    )
    write_outcome(run_dir.outcome, outcome)
    decision, told = ended(run_dir, no_store)
    assert (decision.exit_code, decision.elsewhere, told) == (EXIT_PREEMPTED, True, [])
