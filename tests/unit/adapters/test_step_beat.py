"""A heartbeat that hooks begin and end."""

from __future__ import annotations

import threading

import pytest

from resilience_sdk import heartbeat, lanes
from resilience_sdk.adapters._base import StepBeat, framework
from resilience_sdk.errors import MissingExtraError


def test_a_step_is_one_beat(recording):
    """Open from its begin to its end, however often it is begun."""
    beat = StepBeat()
    for _ in range(3):
        beat.begin()
        beat.begin()
        assert recording.stack() == ["step"]
        beat.end()
    assert recording.stack() == []
    assert recording.snapshot().beats == 3


def test_it_has_the_number_of_the_global_step(recording):
    """So that the step means the same in all attempts."""
    beat = StepBeat()
    beat.begin(41)
    assert (recording.lane().step, recording.lane().step_is_global) == (41, True)
    beat.end()
    assert recording.lane().step == 41


def test_a_step_that_is_left_does_not_count(recording):
    """It is closed, and the next one begins anew."""
    beat = StepBeat()
    beat.begin()
    beat.drop()
    assert recording.stack() == []
    assert recording.snapshot().beats == 0
    beat.begin()
    beat.end()
    assert recording.snapshot().beats == 1


def test_it_keeps_away_from_a_heartbeat_of_the_script(recording):
    """The script's own begins and ends as the script says."""
    beat = StepBeat()
    with heartbeat(step=7):
        beat.begin(0)
        beat.end()
        assert recording.stack() == ["step"]
        assert recording.lane().step == 7
    assert recording.snapshot().beats == 1


def test_an_end_without_a_begin_is_nothing(recording):
    """Frameworks call hooks in orders that nobody expects."""
    beat = StepBeat()
    beat.end()
    beat.drop()
    assert recording.snapshot().beats == 0


def test_it_belongs_to_the_thread_that_trains(recording):
    """A training in a thread beats on that thread's lane."""
    seen = []

    def train():
        beat = StepBeat()
        beat.begin(3)
        seen.append(recording.stack())
        beat.end()
        seen.append(recording.stack())

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [["step"], []]
    assert recording.snapshot().beats == 1


def test_where_nothing_is_recorded_it_does_nothing(monkeypatch):
    """With the SDK switched off, each call is a no-op."""
    before = lanes.starter()
    lanes.disable()
    try:
        beat = StepBeat()
        beat.begin(1)
        beat.end()
        beat.drop()
    finally:
        lanes.set_starter(before)
        lanes.forget()


def test_a_missing_framework_is_said_with_its_cure():
    """The message is the command; a framework that is there but broken speaks for itself."""
    assert framework("json", "json").__name__ == "json"
    with pytest.raises(MissingExtraError, match="pip install lightning-of-tomorrow"):
        framework("lightning_of_tomorrow.pytorch", "lightning-of-tomorrow")


def test_a_framework_that_lacks_something_itself_speaks_for_itself(tmp_path, monkeypatch):
    """Installing it again would not help."""
    (tmp_path / "framework_with_a_hole.py").write_text("import what_it_needs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        framework("framework_with_a_hole", "framework-with-a-hole")
