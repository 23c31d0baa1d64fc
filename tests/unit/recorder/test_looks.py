"""A look between two steps: on the thread that trains, at one heartbeat, and no more until it is asked for again."""

from __future__ import annotations

import threading

import pytest
from recording import Recording

from resilience_sdk import heartbeat
from resilience_sdk.recorder import page_layout as at


class Looks:
    """A rank that notes on which thread it looks."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def settle(self) -> bool:
        return True

    def look_between_steps(self) -> None:
        self.threads.append(threading.get_ident())


def steps(recording: Recording, kind: str, count: int) -> None:
    """Make that many steps."""
    for step in range(count):
        if kind == "pulses":
            recording.recorder.pulse(step)
        elif kind == "global heartbeats":
            with heartbeat(step=step):
                pass
        else:
            with heartbeat():
                pass


@pytest.mark.parametrize("kind", ["heartbeats", "global heartbeats", "pulses"])
def test_it_looks_once_for_each_time_that_it_is_asked(recording: Recording, kind: str) -> None:
    """From another thread, as the helper does; the steps around it are counted as always."""
    rank = Looks()
    recording.recorder._rank = rank
    steps(recording, kind, 20)
    assert rank.threads == []
    for _ in range(2):
        asking = threading.Thread(target=recording.recorder.look_at_next_beat)
        asking.start()
        asking.join()
        steps(recording, kind, 5)
    assert rank.threads == [threading.get_ident()] * 2
    snapshot = recording.reader.snapshot()
    assert snapshot is not None
    assert snapshot.beats == 30


def test_the_page_says_what_the_rank_has_on_its_device(recording: Recording) -> None:
    """Nothing before somebody has looked."""
    snapshot = recording.reader.snapshot()
    assert snapshot is not None
    assert snapshot.device is None
    words = recording.page.words
    words[at.W_DEVICE_NOW], words[at.W_DEVICE_PEAK], words[at.W_DEVICE_TOTAL] = 5, 7, 9
    snapshot = recording.reader.snapshot()
    assert snapshot is not None
    assert snapshot.device is not None
    assert (snapshot.device.allocated, snapshot.device.peak, snapshot.device.total) == (5, 7, 9)
