"""When an incident is over, also where the job that had it is not the one that runs."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.monitor.recovery import RecoveryWatch


@pytest.fixture
def store(tmp_path):
    """An empty store of incidents."""
    (tmp_path / "incidents").mkdir()
    return IncidentStore(tmp_path)


def beating(*ranks: int, step: int = 1, step_is_global: bool = False) -> list[SimpleNamespace]:
    """Pages of a world of two, of ranks that have completed their first beats, the last one of them `step`."""
    lane = SimpleNamespace(step=step, beats=1, stack=())
    common = {"pid": 1, "world_size": 2, "first_beat_ns": time.monotonic_ns(), "step": step}
    common["step_is_global"] = step_is_global
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


def test_pulses_of_a_load_are_not_where_a_run_resumed(store, journal):
    """To load its state, an optimizer may make a step, which is a pulse; a look may fall between it and step 20."""
    store.create("crash", Incident(attempt=0, detected_at=time.time()), {}, {})
    watch = RecoveryWatch(store, journal)
    watch.look(1, beating(0), None)
    watch.look(1, beating(0, 1, step=20, step_is_global=True), None)
    (event,) = [json.loads(line) for line in journal.path.read_text().splitlines() if "recovered" in line]
    assert event["resumed_at"] == 20
