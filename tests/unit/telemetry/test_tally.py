"""Metrics are a pure function of the events, whatever these hold."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from told_run import EVENTS, ToldRun

from resilience_sdk.core.journal import Event
from resilience_sdk.telemetry.metrics import Durations
from resilience_sdk.telemetry.tally import Tally


def values(tally: Tally) -> dict[str, float | Durations]:
    """Return the values by name and labels."""
    return {" ".join((sample.family.name, *sample.labels)): sample.value for sample in tally.samples()}


def tally_of(run: ToldRun) -> dict[str, float | Durations]:
    """Return the values after everything that was told."""
    tally = Tally()
    for line in run.lines():
        tally.apply(line.event)
    return values(tally)


def test_a_run_with_a_hang(tmp_path: Path) -> None:
    """Attempts, restarts, incidents by cause, recovery and lost steps come from the events of one incident."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.fail_and_recover()
    found = tally_of(run)
    assert (found["attempts"], found["restarts"], found["attempt.number"]) == (2, 1, 1)
    assert found["incidents hang network link_down"] == 1
    assert found["lost.steps"] == 3
    recovery = found["recovery.duration"]
    assert isinstance(recovery, Durations)
    assert (recovery.count, recovery.sum_s) == (1, 4.0)
    assert found["suspects"] == 1
    assert found["run.finished"] == 0


def test_checkpoints(tmp_path: Path) -> None:
    """What became of each save, how long it took, and which one is the newest."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.tell(Event.CKPT_COMMIT, writer="rank0", step=50, seconds=2.0, stall_s=0.5, bytes=1000)
    run.tell(Event.CKPT_COMMIT, writer="rank0", step=100, seconds=3.0, stall_s=0.25, bytes=1200)
    run.tell(Event.CKPT_FAIL, writer="rank0", step=150, error="no space")
    found = tally_of(run)
    assert (found["checkpoints committed"], found["checkpoints failed"]) == (2, 1)
    assert (found["checkpoint.last_step"], found["checkpoint.size"]) == (100, 1200)
    assert found["checkpoint.stall"] == 0.75


def test_what_is_new_is_told_by_its_time(tmp_path: Path) -> None:
    """What an earlier job has counted stands there from the first scrape on; only its time tells that it is old."""
    run = ToldRun.make(tmp_path)
    run.begin()
    for event, fields in (
        (Event.INCIDENT, {"kind": "crash", "category": "process", "cause": "oom"}),
        (Event.DECISION, {"verdict": "give_up", "exit_code": 75}),
        (Event.CKPT_FAIL, {"step": 3, "error": "no space"}),
        (Event.DEGRADED, {"what": "relay", "why": "gone"}),
        (Event.HEALTH, {"what": "gpu xid GPU 0", "ok": False, "check": "xid", "status": "failed"}),
    ):
        run.tell(event, **fields)
        run.tell(event, **fields)
    old = run.lines()
    run.begin()
    tally = Tally()
    for line in reversed(old):  # several writers: an earlier line may be read later
        tally.apply(line.event)
    before = values(tally)
    for line in run.lines()[len(old) :]:
        tally.apply(line.event)
    after = values(tally)
    times = {str(line.event["event"]): line.event["t"] for line in old}
    newest = {
        "incident.last_timestamp crash process oom": "incident",
        "decision.last_timestamp give_up": "decision",
        "checkpoint.last_failure_timestamp": "ckpt_fail",
        "degraded.last_timestamp relay": "degraded",
        "health.last_finding_timestamp xid failed": "health",
    }
    for name, event in newest.items():
        assert before[name] == after[name] == times[event], name


def test_a_node_that_leaves_alone_has_ended_no_job(tmp_path: Path) -> None:
    """The others go on, and nobody is to be woken for a job that has failed."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.tell(Event.DECISION, verdict="hardware", exit_code=76, others_go_on=True)
    run.tell(Event.DECISION, verdict="stop", exit_code=77, others_go_on=False)
    found = tally_of(run)
    assert "decisions hardware" not in found
    assert found["decisions stop"] == 1


def test_a_stop_is_counted_once_however_many_ranks_tell_it(tmp_path: Path) -> None:
    """Each rank journals the agreed stop; the next attempt may have one of its own."""
    run = ToldRun.make(tmp_path)
    run.begin()
    for rank in range(4):
        run.tell(Event.STOP_AGREED, writer=f"rank{rank}")
    run.tell(Event.ATTEMPT_START, attempt=1)
    run.tell(Event.STOP_AGREED, writer="rank0", attempt=1)
    assert tally_of(run)["preemption.stops"] == 2


def test_attempts_under_a_foreign_launcher(tmp_path: Path) -> None:
    """Where nobody tells of attempts, the first rank of each does."""
    run = ToldRun.make(tmp_path)
    for attempt in (0, 1):
        for rank in (0, 1):
            run.tell(Event.RANK_START, writer=f"rank{rank}", attempt=attempt)
    found = tally_of(run)
    assert (found["attempts"], found["restarts"]) == (2, 1)


def test_the_health_of_a_node(tmp_path: Path) -> None:
    """What was looked at last decides; how often it was not well is counted."""
    run = ToldRun.make(tmp_path)
    for ok, status in ((False, "failed"), (False, "degraded"), (True, "ok")):
        run.tell(Event.HEALTH, writer="health", what="gpu ecc GPU 0", ok=ok, check="ecc", status=status)
    run.tell(Event.HEALTH, what="storage", ok=False)
    found = tally_of(run)
    assert (found["health.ok gpu ecc GPU 0"], found["health.ok storage"]) == (1, 0)
    assert {name: value for name, value in found.items() if name.startswith("health.findings")} == {
        "health.findings ecc failed": 1,
        "health.findings ecc degraded": 1,
    }


def test_what_happened_and_is_over_is_no_state(tmp_path: Path) -> None:
    """An Xid is counted; a gauge of it would say for ever that the node is not well."""
    run = ToldRun.make(tmp_path)
    run.tell(Event.HEALTH, writer="health", what="gpu xid GPU 0", ok=False, check="xid", status="failed", lasts=False)
    run.tell(Event.HEALTH, writer="health", what="gpu ecc GPU 0", ok=False, check="ecc", status="failed", lasts=True)
    found = tally_of(run)
    assert {name for name in found if name.startswith("health.ok")} == {"health.ok gpu ecc GPU 0"}
    assert found["health.findings xid failed"] == 1


def test_the_health_of_an_earlier_job_is_none_of_this_one(tmp_path: Path) -> None:
    """It may be another time or a repaired node: before the first look nothing is said, neither good nor bad."""
    run = ToldRun.make(tmp_path)
    run.begin()
    run.tell(Event.HEALTH, writer="health", what="gpu ecc GPU 0", ok=False, check="ecc", status="failed", lasts=True)
    run.begin()
    found = tally_of(run)
    assert not [name for name in found if name.startswith("health.ok")]
    assert found["health.findings ecc failed"] == 1


def test_who_is_slow_now(tmp_path: Path) -> None:
    """A finding lasts until it is over, also where its ranks have changed; a new attempt begins without any."""
    run = ToldRun.make(tmp_path)
    run.begin()
    fwd = {"section": "fwd", "section_kind": "compute", "role": "", "kind": "transient"}
    run.tell(Event.STRAGGLER, what="found", ranks=[1], **fwd)
    run.tell(Event.STRAGGLER, what="found", ranks=[7], **fwd)
    run.tell(Event.STRAGGLER, what="still", ranks=[1, 2], **fwd)
    assert tally_of(run)["stragglers"] == 2
    run.tell(Event.STRAGGLER, what="over", ranks=[2], **fwd)
    found = tally_of(run)
    assert (found["stragglers"], found["straggler.findings"]) == (1, 2)
    run.tell(Event.ATTEMPT_START, attempt=1)
    assert tally_of(run)["stragglers"] == 0


@given(st.lists(EVENTS, max_size=12))
@settings(max_examples=15, deadline=None)
def test_no_event_breaks_it_and_no_counter_goes_back(events: list[dict[str, object]]) -> None:
    """A journal may hold anything that is JSON: counters only grow, and two folds of it are equal."""
    tally, again, before = Tally(), Tally(), {}
    for event in events:
        tally.apply(event)
        after = {
            (sample.family.name, sample.labels): sample.value.count
            if isinstance(sample.value, Durations)
            else sample.value
            for sample in tally.samples()
            if sample.family.kind != "gauge"
        }
        assert all(after[series] >= value for series, value in before.items())
        before = after
        again.apply(event)
    assert values(tally) == values(again)
    assert values(tally)["journal.lines"] == len(events)


def test_a_journal_cannot_flood_a_database() -> None:
    """Beyond some hundred label values everything is counted together; texts are cut and lose control characters."""
    tally = Tally()
    for number in range(1000):
        tally.apply({"event": "degraded", "t": 1.0, "what": f"thing {number}\n{'x' * 1000}"})
    series = [sample for sample in tally.samples() if sample.family.name == "degraded"]
    assert len(series) <= 201
    assert sum(sample.value for sample in series) == 1000  # type: ignore[misc]
    assert all(len(sample.labels[0]) <= 64 and sample.labels[0].isprintable() for sample in series)
