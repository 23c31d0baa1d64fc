"""When an incident is over, also where the job that had it is not the one that runs."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.postmortem.recovery import RecoveryWatch, close_warnings
from resilience_sdk.recorder.page_reader import LaneView, OpenSection


@pytest.fixture
def store(tmp_path):
    """An empty store of incidents."""
    (tmp_path / "incidents").mkdir()
    return IncidentStore(tmp_path)


def beating(*ranks: int, step: int = 1, step_is_global: bool = False) -> list[SimpleNamespace]:
    """Pages of a world of two, of ranks that have completed their first beats, the last one of them `step`."""
    lane = LaneView(thread_id=1, last_ns=0, beats=1, step=step, step_is_global=step_is_global, stack=())
    common = {"pid": 1, "world_size": 2, "first_beat_ns": time.monotonic_ns(), "step": step}
    common |= {"step_is_global": step_is_global, "trains": True, "beat_source": "user"}
    return [SimpleNamespace(rank=rank, main_lane=lane, **common) for rank in ranks]


@pytest.mark.parametrize("attempt", [0, 1])
def test_an_incident_of_an_earlier_job_is_over_when_this_one_runs(store, journal, attempt):
    """Attempts count from 0 in each job: what stayed open closes with the first attempt of which all ranks beat."""
    store.create("crash", Incident(attempt=0, detected_at=time.time() - 100), {}, {})
    watch = RecoveryWatch(store, journal, began=time.time() - 10)
    watch.look(attempt, beating(0), None)
    assert store.open_recoveries(), "rank 1 has not beaten yet"
    watch.look(attempt, beating(0, 1), None)
    assert not store.open_recoveries()
    assert store.all()[0].recovery_s == pytest.approx(100, abs=5)


def test_an_incident_of_this_attempt_stays_open(store, journal):
    """The attempt in which it happened cannot end it."""
    store.create("hang", Incident(attempt=0, detected_at=time.time()), {}, {})
    RecoveryWatch(store, journal, began=time.time() - 10).look(0, beating(0, 1), None)
    assert store.open_recoveries()


def test_first_beats_are_journalled_under_their_rank(store, journal):
    """The key of the rank that an event is about is `rank`, whoever writes it."""
    RecoveryWatch(store, journal).look(0, beating(0, 1), None)
    found = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [event["rank"] for event in found if event["event"] == "first_beat"] == [0, 1]


def test_a_first_beat_is_that_of_the_first_step_however_late_it_is_seen(store, journal):
    """Many steps may fit between two looks; where steps are not seen, none is told."""
    lane = LaneView(1, 0, beats=6, step=6, step_is_global=False, stack=(OpenSection("step", "pulse", 0, None, 6),))
    late, unseen = beating(0, 1)
    late.main_lane, late.step = lane, 6
    unseen.step = None
    RecoveryWatch(store, journal).look(0, [late, unseen], None)
    found = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert [event["step"] for event in found if event["event"] == "first_beat"] == [0, None]


def test_pulses_of_a_load_are_not_where_a_run_resumed(store, journal):
    """To load its state, an optimizer may make a step, which is a pulse; a look may fall between it and step 20."""
    store.create("crash", Incident(attempt=0, detected_at=time.time()), {}, {})
    watch = RecoveryWatch(store, journal)
    watch.look(1, beating(0), None)
    watch.look(1, beating(0, 1, step=20, step_is_global=True), None)
    (event,) = [json.loads(line) for line in journal.path.read_text().splitlines() if "recovered" in line]
    assert event["resumed_at"] == 20


def test_collectives_of_a_preparation_are_no_recovery(store, journal):
    """To wrap a model (DDP, DeepSpeed) takes some; an optimizer was made, whose steps are still to come."""
    store.create("crash", Incident(attempt=0, detected_at=time.time()), {}, {})
    watch = RecoveryWatch(store, journal)
    preparing = beating(0, 1)
    for one in preparing:
        one.beat_source = "collectives"
    watch.look(1, preparing, None)
    assert store.open_recoveries()
    watch.look(1, beating(0, 1, step=20, step_is_global=True), None)
    (event,) = recovered(journal)
    assert event["resumed_at"] == 20


def page(rank: int, beats: int, *, done: bool = False, exit_state: str = "running") -> SimpleNamespace:
    """A page of a world of two that shows so many completed heartbeats."""
    now_ns = time.monotonic_ns()
    lane = LaneView(1, now_ns, beats, beats, step_is_global=False, stack=(), beat_ns=now_ns)
    common = {"pid": 10 + rank, "world_size": 2, "first_beat_ns": 1, "step": beats, "step_is_global": False}
    common |= {"trains": True, "beat_source": "user"}
    return SimpleNamespace(
        rank=rank, beats=beats, main_lane=lane, done=done, exit_state=exit_state, **common
    )  # fmt: skip


def reported(store, **facts) -> Incident:
    """A hang of attempt 0 that was only reported, with the pages of then."""
    facts = {"attempt": 0, "detected_at": time.time() - 20, "action": "none"} | facts
    pages = {rank: {"rank": rank, "pid": 10 + rank, "beats": 5} for rank in (0, 1)}
    return store.create("hang", Incident(**facts), {}, pages)


def recovered(journal) -> list[dict]:
    """The journal's events of recoveries."""
    lines = journal.path.read_text().splitlines() if journal.path.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == "recovered"]


def test_a_reported_hang_is_over_when_all_ranks_have_made_a_step_since(store, journal):
    """One that goes on alone proves nothing: it may be about to wait for the other."""
    watch = RecoveryWatch(store, journal, began=time.time() - 100)
    watch.look(0, [page(0, 5), page(1, 5)], None)
    hang = reported(store)
    for beats in ((5, 5), (6, 5), (9, 5)):
        watch.look(0, [page(0, beats[0]), page(1, beats[1])], None)
        assert store.get(hang.id).recovered_at is None
    watch.look(0, [page(0, 9), page(1, 6)], None)
    assert store.get(hang.id).recovery_s == pytest.approx(20, abs=2)
    (event,) = recovered(journal)
    assert (event["id"], event["why"], event["lost_steps"]) == (hang.id, "went on", None)
    watch.look(0, [page(0, 10), page(1, 7)], None)
    assert len(recovered(journal)) == 1


def test_a_second_hang_of_an_attempt_is_one_of_its_own(store, journal):
    """Each is measured from where it stood."""
    watch = RecoveryWatch(store, journal)
    first = reported(store)
    watch.look(0, [page(0, 6), page(1, 6)], None)
    assert store.get(first.id).recovered_at is not None
    second = store.create(
        "hang",
        Incident(attempt=0, detected_at=time.time(), action="none"),
        {},
        {0: {"rank": 0, "pid": 10, "beats": 8}, 1: {"rank": 1, "pid": 11, "beats": 8}},
    )
    watch.look(0, [page(0, 8), page(1, 8)], None)
    assert store.get(second.id).recovered_at is None
    watch.look(0, [page(0, 9), page(1, 9)], None)
    assert store.get(second.id).recovered_at is not None


@pytest.mark.parametrize("facts", [{"action": "restart"}, {"attempt": 1}, {"detected_at": 5.0}])
def test_what_somebody_ends_or_ended_does_not_go_on_by_itself(store, journal, facts):
    """A hang whose ranks are ended, one of another attempt, and one of an earlier job."""
    hang = reported(store, **facts)
    RecoveryWatch(store, journal, began=time.time() - 100).look(0, [page(0, 9), page(1, 9)], None)
    assert store.get(hang.id).recovered_at is None


def test_a_rank_that_is_through_went_on(store, journal):
    """A hang in what follows the last step: it ended well, or said that its training is over."""
    hang = reported(store)
    watch = RecoveryWatch(store, journal)
    watch.look(0, [page(0, 5, done=True), page(1, 5)], None)
    assert store.get(hang.id).recovered_at is None
    watch.look(0, [page(0, 5, done=True), page(1, 5, exit_state="clean")], None)
    assert store.get(hang.id).recovered_at is not None


def test_a_rank_that_is_not_seen_may_still_stand(store, journal):
    """Under a launcher that relays nothing only some ranks of the world are seen; relayed ones count."""
    hang = reported(store)
    watch = RecoveryWatch(store, journal)
    watch.look(0, [page(0, 9)], None)
    assert store.get(hang.id).recovered_at is None
    watch.look(0, [page(0, 9)], [0], [page(1, 5)])
    assert store.get(hang.id).recovered_at is None
    watch.look(0, [page(0, 9)], [0], [page(1, 6)])
    assert store.get(hang.id).recovered_at is not None


def test_the_node_without_rank_0_leaves_it_to_the_other(store, journal):
    """For some seconds, so that it is told once."""
    hang = reported(store)
    RecoveryWatch(store, journal).look(0, [page(1, 9)], [1], [page(0, 9)])
    assert store.get(hang.id).recovered_at is None


def test_a_training_that_ended_well_is_over_its_hangs(store, journal):
    """Where not all ranks were seen: when it went on is not known, that it did is."""
    earlier = reported(store, detected_at=time.time() - 500)
    hang, ended = reported(store), reported(store, action="restart")
    close_warnings(store, journal, since=time.time() - 100)
    assert store.get(earlier.id).recovered_at is None
    assert store.get(hang.id).recovered_at is not None
    assert store.get(hang.id).recovery_s is None
    assert store.get(ended.id).recovered_at is None
