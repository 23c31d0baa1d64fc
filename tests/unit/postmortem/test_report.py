"""The incident of an attempt is its own, not one that an earlier job left in the same run directory."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import attrs
import pytest
from torch.distributed import PrefixStore, TCPStore

from resilience_sdk.cluster.bus import NodeRelay
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.launcher.restart_policy import decide
from resilience_sdk.postmortem.facts import AttemptFacts, AttemptJournal, EndedBy, RankExit, RankTrace
from resilience_sdk.postmortem.report import Reporter
from resilience_sdk.recorder.page_reader import LaneView


@pytest.fixture
def run_dir(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def journal(run_dir, writer="launcher"):
    return Journal(run_dir.journal, writer=writer, host="here", boot_id="", job="job")


def conclude(run_dir, facts):
    """Return the incident of an attempt that the job was asked to leave, as the launcher of its node finds it."""
    ours = journal(run_dir)
    reporter = Reporter(run_dir, ours, NodeRelay(None, ours), term_grace_s=1.0)
    return IncidentStore(run_dir.path).get(reporter.conclude(facts, None, None).incident)


def left(began_at, told=None):
    """The end of attempt 0 of a rank without a page: nobody measures how long it lasted."""
    ended = RankExit(rank=0, local_rank=0, pid=1, exit_code=75, order=0, at_ns=1, ended_by_us=True)
    return AttemptFacts(
        attempt=0,
        node="here",
        exits=(ended,),
        traces={},
        ended_by=EndedBy.PREEMPTION,
        lasted_s=None,
        began_at=began_at,
        journal=told,
    )


def test_the_preemption_of_an_earlier_job_is_not_taken_for_this_one(run_dir):
    """A requeued job begins with attempt 0 again, and is preempted again: two incidents, each with its own story."""
    rank = journal(run_dir, "rank0")
    found = []
    for step in (71, 92):
        told = AttemptJournal(run_dir.journal, "job", 0)
        began_at = time.time()
        rank.emit(Event.STOP_AGREED, step=step, check=step)
        found.append(conclude(run_dir, left(began_at, told)))
    first, second = found
    assert (first.id, second.id) == ("0001-preemption", "0002-preemption")
    assert "after 71 steps" in str(first.evidence)
    assert "after 92 steps" in str(second.evidence)
    assert "71" not in str(second.evidence)


@pytest.mark.parametrize(
    ("code", "stopped", "is_over"), [(0, False, True), (75, True, True), (75, False, False), (1, False, False)]
)
def test_bad_numbers_that_the_training_got_over_are_closed_when_it_ends_well(run_dir, code, stopped, is_over):
    """Finished, or stopped as agreed; not where it failed or was cut off. What rolled the run back is not touched."""
    store = IncidentStore(run_dir.path)
    warned, rolled = (
        store.create("numerics", Incident(attempt=0, detected_at=5.0, action=action)) for action in ("none", "rollback")
    )
    told = AttemptJournal(run_dir.journal, "job", 0)
    if stopped:
        journal(run_dir, "rank0").emit(Event.STOP_AGREED, step=1, check=1)
    ended = RankExit(rank=0, local_rank=0, pid=1, exit_code=code, order=0, at_ns=1, ended_by_us=False)
    facts = attrs.evolve(left(time.time(), told), exits=(ended,), ended_by=EndedBy.RANKS, stop_agreed=stopped)
    ours = journal(run_dir)
    Reporter(run_dir, ours, NodeRelay(None, ours), term_grace_s=1.0).conclude(facts, None, None)
    assert (store.get(warned.id).recovered_at is not None) == is_over
    assert store.get(rolled.id).recovered_at is None
    recovered = [event["id"] for event in told.events() if event["event"] == Event.RECOVERED.value]
    assert recovered == ([warned.id] if is_over else [])


def test_an_interrupted_job_says_what_is_lost(run_dir):
    """From the pages and the newest checkpoint, in the words of a preemption."""
    page = types.SimpleNamespace(
        beat_source="heartbeat",
        step=41,
        step_is_global=True,
        beats=42,
        completed_steps=42,
        done=False,
        exit_state="running",
        main_lane=LaneView(thread_id=1, last_ns=0, beats=42, step=41, step_is_global=True, stack=()),
    )
    trace = RankTrace(0, 1, page, None, None, None)
    facts = attrs.evolve(left(time.time()), ended_by=EndedBy.INTERRUPT, traces={0: trace}, checkpoint_after=40)
    ours = journal(run_dir)
    found = Reporter(run_dir, ours, NodeRelay(None, ours), term_grace_s=1.0).conclude(facts, None, None)
    assert found.headline == found.end.leaving == "interrupted by the user; 2 steps lost"
    assert decide([found.end], 3).reason == found.headline
    closed = attrs.evolve(facts, terminal_closed=True)
    found = Reporter(run_dir, ours, NodeRelay(None, ours), term_grace_s=1.0).conclude(closed, None, None)
    assert found.headline == "interrupted by the user, whose terminal was closed (SIGHUP); 2 steps lost"


def test_a_node_that_leaves_waits_for_no_word_where_the_store_is_gone(run_dir, tmp_path, monkeypatch):
    """The node with the store has left before this one had read its word: nothing more can come."""
    monkeypatch.setattr("resilience_sdk.postmortem.report._ALL_LEFT_S", 3600.0)
    program = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('localhost', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        store = TCPStore("localhost", int(server.stdout.readline()), is_master=False)
        ours = journal(run_dir)
        relay = NodeRelay(tmp_path, ours)
        other = NodeRelay(None, ours)
        for node, one in enumerate((other, relay)):
            one.start(PrefixStore("rendezvous", store), 0, node, 2)
        relay.note_fault()
        relay.tell_end({})
        assert 1 in other.wait_for_ends(lambda ends, *_: 1 in ends, 60.0)
        server.kill()
        server.wait()
        facts = attrs.evolve(left(time.time()), nodes=2, node_number=1)
        found = Reporter(run_dir, ours, relay, term_grace_s=1.0).conclude(facts, None, None)
        assert decide([found.end], 3).exit_code == 75
        for one in (other, relay):
            one.stop()


def test_what_the_ranks_have_recorded_of_this_attempt_is_not_recorded_again(run_dir):
    """Another node, or the job itself, may have been faster."""
    began_at = time.time()
    earlier = IncidentStore(run_dir.path).create("preemption", Incident(attempt=0, detected_at=time.time()))
    assert conclude(run_dir, left(began_at)).id == earlier.id
