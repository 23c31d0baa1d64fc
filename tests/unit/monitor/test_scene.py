"""Whose movements are watched, and whose stack is its own."""

from __future__ import annotations

import os
import threading
import time

import pytest

from resilience_sdk.monitor.evidence import CloseLook, RankEvidence, beating_thread
from resilience_sdk.monitor.ranks import RankTable
from resilience_sdk.recorder import page_layout
from resilience_sdk.recorder.page_directory import page_stem
from resilience_sdk.recorder.page_writer import RankPage
from resilience_sdk.recorder.recorder import Recorder
from resilience_sdk.system.hostinfo import process_start_ticks

STACKS = """Thread 0x00007f0000000001 (most recent call first):
  File "/home/me/train.py", line 7 in main
"""


@pytest.fixture
def beaten_in_a_thread(tmp_path):
    """A rank whose beats come from a thread that is not its main one: `(watched, thread id)`, by what makes them."""

    def make(source):
        pid = os.getpid()
        identity = {"rank": 0, "local_rank": 0, "world_size": 1, "attempt": 0, "created_ns": time.monotonic_ns()}
        path = tmp_path / f"{page_stem(0, 0, pid)}.page"
        page = RankPage.create(path, pid=pid, start_ticks=process_start_ticks(pid), facts={}, **identity)
        recorder = Recorder(page)
        beats = threading.Thread(target=lambda: [recorder.pulse(None) for _ in range(3)])
        beats.start()
        beats.join()
        page.words[page_layout.W_BEAT_SOURCE] = source
        (watched,) = RankTable(tmp_path).scan()
        return watched, beats.native_id

    return make


def test_completed_collectives_are_beats_of_the_main_thread(beaten_in_a_thread):
    """A helper tells them, which does this and that all the time: a rank that is stuck would look busy for ever."""
    watched, _ = beaten_in_a_thread(page_layout.BEATS_COLLECTIVES)
    assert beating_thread(watched) == os.getpid()
    look = CloseLook.of([watched], {0: RankEvidence(0, STACKS, "{}", ())})
    assert look.frames[0] == ("/home/me/train.py:7 main",)


def test_the_stack_of_the_main_thread_is_not_that_of_another_that_beats(beaten_in_a_thread):
    """It waits in a join for ever, which says nothing about the training; the dump itself is kept.

    A signal's dump does not tell which of its threads is which; that of the helper thread does.
    """
    watched, thread = beaten_in_a_thread(page_layout.BEATS_OPTIMIZER)
    assert beating_thread(watched) == thread != os.getpid()
    look = CloseLook.of([watched], {0: RankEvidence(0, STACKS, "{}", (), signalled=True)})
    assert look.frames == {}
    assert look.texts == {0: STACKS}
    assert look.signalled == {0}


def test_the_helper_thread_tells_whose_stack_is_whose(beaten_in_a_thread):
    """Trainers that run the loop in a thread, as Ray Train does, are judged and named by that thread's stack."""
    watched, thread = beaten_in_a_thread(page_layout.BEATS_OPTIMIZER)
    header = f"Thread 0x00007f0000000002 [trainer [2]] [{thread}] (most recent call first):"
    told = f'{header}\n  File "/home/me/train.py", line 30 in loop\n\n{STACKS}'
    look = CloseLook.of([watched], {0: RankEvidence(0, told, "{}", ())})
    assert look.frames[0] == ("/home/me/train.py:30 loop",)
