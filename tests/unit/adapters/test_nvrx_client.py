"""NVRx's client: what it writes into the page, what it keeps, and what it raises."""

from __future__ import annotations

import json
import os
import threading

import pytest

from resilience_sdk.adapters.nvrx.client import (
    BETWEEN,
    FIRST,
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from resilience_sdk.core import environ


@pytest.fixture
def configured(monkeypatch):
    """A configuration as the launcher hands it down."""

    def configure(**values):
        monkeypatch.setenv(environ.INTERNAL_NVRX, json.dumps(values))

    return configure


@pytest.fixture
def client(recording, configured):
    """A client in a process that records, with a timeout for everything."""
    configured(
        initial_rank_heartbeat_timeout=50,
        rank_heartbeat_timeout="20",
        rank_section_timeouts="step:7,setup:null",
        rank_out_of_section_timeout=9,
    )
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def deadlines(recording):
    return {section.name: section.timeout_s for section in recording.snapshot().main_lane.stack}


def test_each_configured_timeout_is_the_deadline_of_a_block(client, recording):
    """First heartbeat, the next one, a section, and the time between sections."""
    assert deadlines(recording) == {FIRST: 50, BETWEEN: 9}
    client.send_heartbeat()
    assert deadlines(recording) == {BETWEEN: 9, "step": 20}
    client.start_section("step")
    client.start_section("setup")
    assert BETWEEN not in deadlines(recording)
    client.end_section("step")  # they may overlap
    client.end_section("setup")
    assert deadlines(recording) == {BETWEEN: 9, "step": 20}
    assert recording.snapshot().beats == 1


def test_a_section_without_a_timeout_leaves_it_to_the_heartbeats(client, recording):
    """In its first pass neither that of the first heartbeat nor of the others is its own; later passes are learned."""
    client.start_section("setup")
    assert deadlines(recording)["setup"] > 1e6
    client.send_heartbeat()
    client.start_section("other")
    assert deadlines(recording)["other"] > 1e6
    client.end_section("setup")
    client.start_section("setup")
    assert deadlines(recording)["setup"] is None


def test_what_nobody_has_set_is_learned(recording):
    """The defaults of the original are shown, and are no deadlines: those of the SDK hold."""
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (3600, 2700)
    assert not client.hb_timeouts.were_calculated
    assert deadlines(recording) == {}
    client.send_heartbeat()
    client.start_section("anything")
    assert deadlines(recording) == {"step": None, "anything": None}


def test_calculated_timeouts_hold_at_once_and_are_not_below_the_interval(client, recording):
    """NVRx looks every 5 s, so that is what a calculated one comes to at least."""
    client.send_heartbeat()
    client.send_heartbeat()
    client.start_section("step")
    client.end_section("step")
    assert client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_section_timeouts(selected_sections=["step"])
    assert client.hb_timeouts.were_calculated
    assert client.hb_timeouts.subsequent < 5
    assert deadlines(recording) == {BETWEEN: 5, "step": 5}
    client.start_section("step")
    assert deadlines(recording)["step"] == 5


def test_too_few_measurements_are_an_error_or_false(client):
    """As the caller wants it."""
    with pytest.raises(RankMonitorClientError, match="Not enough data"):
        client.calculate_and_set_hb_timeouts()
    assert not client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    assert not client.calculate_and_set_section_timeouts(skip_if_not_ready=True)


@pytest.mark.parametrize("is_before", [True, False])
def test_calculated_timeouts_are_kept_and_win(client, recording, configured, is_before):
    """Over configured ones, shorter or longer, loaded before the start or after it; as JSON values."""
    client.send_heartbeat()
    client.send_heartbeat()
    client.start_section("step")
    client.end_section("step")
    assert client.state_dict() == {"current_timeouts": {}}
    client.calculate_and_set_hb_timeouts()
    client.calculate_and_set_section_timeouts(selected_sections=["step"], calc_out_of_section=False)
    state = json.loads(json.dumps(client.state_dict()))
    client.shutdown_workload_monitoring()
    state["current_timeouts"]["heartbeat"] |= {"initial": 70, "subsequent": 80}
    configured(initial_rank_heartbeat_timeout=1, rank_heartbeat_timeout=999, rank_section_timeouts={"step": 1})
    other = RankMonitorClient()
    if is_before:
        other.load_state_dict(state)
    other.init_workload_monitoring()
    other.load_state_dict(state)
    assert deadlines(recording)[FIRST] == 70
    assert other.state_dict() == state
    other.send_heartbeat()
    other.start_section("step")
    assert [(s.name, s.timeout_s) for s in recording.snapshot().main_lane.stack] == [("step", 80), ("step", 5)]


def test_no_section_may_be_selected(client):
    """Then the time between them is calculated alone, as there; None means all of them."""
    for name in ("step", "setup"):
        client.start_section(name)
        client.end_section(name)
    client.calculate_and_set_section_timeouts([])
    assert client.section_timeouts.is_out_of_section_calculated
    assert client.section_timeouts.section == {"step": 7, "setup": None}
    client.calculate_and_set_section_timeouts()
    assert client.section_timeouts.were_calculated


def test_end_all_sections_closes_each(client, recording):
    """And none is no fault."""
    client.end_all_sections()
    for name in ("a", "b", "step"):
        client.start_section(name)
    client.end_all_sections()
    assert set(deadlines(recording)) == {FIRST, BETWEEN}
    client.start_section("a")


def test_wrong_use_raises_what_the_original_raises(recording):
    """Before the start, twice started, opened twice, closed without being open."""
    client = RankMonitorClient()
    for call in (client.send_heartbeat, client.end_all_sections, client.calculate_and_set_hb_timeouts):
        with pytest.raises(RankMonitorClientError, match="not initialized"):
            call()
    client.shutdown_workload_monitoring()  # nothing
    client.init_workload_monitoring(num_warmup_iters=3)
    with pytest.raises(RankMonitorClientError, match="already initialized"):
        client.init_workload_monitoring()
    client.start_section("one")
    with pytest.raises(RankMonitorClientError, match="one is open already"):
        client.start_section("one")
    with pytest.raises(RankMonitorClientError, match="two is not open"):
        client.end_section("two")
    for name in ("", None):
        with pytest.raises(RankMonitorClientError, match="a section has a name"):
            client.start_section(name)
    client.end_all_sections()
    assert not recording.snapshot().main_lane.stack


def test_after_the_shutdown_nothing_is_watched_and_it_may_begin_again(client, recording):
    """No deadline is left behind, of whatever was open."""
    client.start_section("step")
    client.shutdown_workload_monitoring()
    snapshot = recording.snapshot()
    assert snapshot.done
    assert deadlines(recording) == {}
    client.init_workload_monitoring()
    assert not recording.snapshot().done
    assert deadlines(recording) == {FIRST: 50, BETWEEN: 9}


def test_without_a_page_everything_works_and_nothing_is_watched():
    """A script runs under any launcher, and its timeouts are calculated."""
    client = RankMonitorClient()
    client.init_workload_monitoring()
    for _ in range(2):
        client.send_heartbeat()
        client.start_section("step")
        client.end_all_sections()
    assert client.calculate_and_set_hb_timeouts()
    assert client.calculate_and_set_section_timeouts()
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "x"))
    client.shutdown_workload_monitoring()


def test_a_damaged_configuration_is_said_and_stops_nothing(recording, monkeypatch, capsys):
    """The defaults count."""
    monkeypatch.setenv(environ.INTERNAL_NVRX, '{"rank_termination_signal": "SIGNONE"}')
    client = RankMonitorClient()
    client.init_workload_monitoring()
    assert "SIGNONE" in capsys.readouterr().err


def elsewhere(call, *args):
    """Call it in another thread."""
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


def test_a_timeout_that_is_not_watched_is_said(client, capsys):
    """Of a section in another thread than that of the heartbeats, of which the monitor follows one."""
    client.send_heartbeat()
    client.start_section("step")
    client.end_section("step")
    assert "another thread" not in capsys.readouterr().err
    elsewhere(client.send_heartbeat)
    client.start_section("step")
    assert "section step begins in another thread than heartbeats" in capsys.readouterr().err


def test_a_section_may_end_in_another_thread(client, recording):
    """As a save does that a thread finishes; one that is open for good would be a hang after its timeout."""
    client.send_heartbeat()
    client.start_section("step")
    elsewhere(client.end_section, "step")
    assert "step" not in [each.name for each in recording.snapshot().main_lane.stack if each.kind == "compute"]
    client.start_section("setup")
    elsewhere(client.end_all_sections)
    client.start_section("step")
    elsewhere(client.start_section, "setup")
    client.end_section("setup")
    client.end_section("step")
    assert [each.kind for lane in recording.snapshot().lanes for each in lane.stack] == ["pulse", "idle"]
    elsewhere(client.shutdown_workload_monitoring)


def test_two_threads_and_a_forked_child_hurt_nothing(client, recording):
    """Each thread may call it, and what a child does is not seen."""

    def work(name):
        for _ in range(200):
            client.send_heartbeat()
            client.start_section(name)
            client.end_section(name)

    threads = [threading.Thread(target=work, args=(f"of {n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.send_heartbeat()
    before = recording.snapshot()
    pid = os.fork()
    if pid == 0:
        try:
            recording.recorder.orphan()
            client.start_section("child")
            client.end_all_sections()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert recording.snapshot().main_lane == before.main_lane
