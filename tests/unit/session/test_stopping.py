"""Who coordinates a stop, alike for all ranks of a job."""

from __future__ import annotations

import threading

import pytest

from resilience_sdk import environ
from resilience_sdk.session.stopping import has_no_peers, monitor_coordinates, signal_grace_s, signal_numbers
from resilience_sdk.settings import Settings

NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("found", [True, False])
def test_on_one_node_the_first_rank_that_knows_decides_for_all(tmp_path, found):
    """One sees the monitor, another one could not start it: both do the same. The next attempt decides anew."""
    assert monitor_coordinates(tmp_path, 0, {}, lambda: found) is found
    assert monitor_coordinates(tmp_path, 0, {}, lambda: not found) is found
    assert monitor_coordinates(tmp_path, 1, {}, lambda: not found) is not found


def test_a_monitor_that_is_about_to_come_is_waited_for(tmp_path):
    """As long as nobody knows, the word is not written."""
    asked = threading.Event()
    comes = threading.Event()

    def has_monitor():
        asked.set()
        return True if comes.is_set() else None

    def arrive():
        assert asked.wait(10)
        assert not list(tmp_path.iterdir())
        comes.set()

    arriving = threading.Thread(target=arrive)
    arriving.start()
    assert monitor_coordinates(tmp_path, 0, {}, has_monitor)
    arriving.join()


def test_on_several_nodes_it_depends_on_the_launcher_alone(tmp_path):
    """Ours carries what monitors tell one another; under others ranks with and without a monitor do the same."""
    for found in (True, False, None):
        assert not monitor_coordinates(tmp_path, 0, NODES, lambda found=found: found)
        assert monitor_coordinates(tmp_path, 0, NODES | {environ.INTERNAL_JOB: "j"}, lambda found=found: found)
    assert not list(tmp_path.iterdir())


def test_where_the_word_cannot_be_written_monitors_coordinate(tmp_path):
    """Nothing is raised into the training."""
    assert monitor_coordinates(tmp_path / "gone", 0, {}, lambda: False)


def test_only_torchruns_own_signals_have_30_seconds():
    """Our launcher has `preempt_time`, whatever it sets for scripts that look for torchrun's variables."""
    assert signal_grace_s({"TORCHELASTIC_RUN_ID": "x"}) == 30
    assert signal_grace_s({"TORCHELASTIC_RUN_ID": "x", environ.INTERNAL_JOB: "j"}) > 1e9
    assert signal_grace_s({}) > 1e9


def test_all_signals_of_the_settings_are_taken():
    """Those of real time, too."""
    numbers = signal_numbers(Settings(preempt_signals="TERM,SIGRTMIN+5"))
    assert len(numbers) == 2
    assert numbers[0] == 15


def test_a_process_is_alone_only_if_nothing_shows_others():
    """A provisional identity is a guess, so its size tells nothing."""
    assert has_no_peers(1, False, {"RANK": "0", "WORLD_SIZE": "1"})
    assert not has_no_peers(2, False, {"RANK": "0", "WORLD_SIZE": "2"})
    assert has_no_peers(1, True, {})
    assert not has_no_peers(1, True, {"RANK": "0"})
