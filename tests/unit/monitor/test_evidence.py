"""Evidence comes from real processes that hang in real ways, in bounded time, and silence is said."""

import json
import os
import signal
import time

import attrs
import pytest

from resilience_sdk.core.journal import read_journal
from resilience_sdk.monitor.evidence import StackRequest, collect_evidence, proc_evidence, read_cpu

DUMP_SIGNAL = signal.SIGRTMAX - 3
LONG_S = 20.0


def texts(answer) -> str:
    """Return all evidence of a rank as one text."""
    return "\n".join(f"{e.source}: {e.text}" for e in answer.evidence)


def test_a_waiting_rank_answers_everything(start_rank, journal):
    """Stacks of all threads down to the line that waits, a flight record, and one `dump` event."""
    rank = start_rank(0)
    answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S, journal=journal)[0]
    assert "in blocked_here" in answer.stacks
    assert json.loads(answer.flight) == {}
    assert "rank 0" in texts(answer)
    (event,) = read_journal(journal.path.parent).events
    assert (event["event"], event["stacks"], event["flight_records"]) == ("dump", [0], [0])


def test_a_rank_with_threads_that_run_outlives_being_asked(start_rank):
    """The stacks of all threads, taken while one of them makes and drops frames as fast as it can.

    A dump of all threads in a signal handler ended such a process after a few times.
    """
    rank = start_rank(0, "threads")
    for _ in range(60):
        answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)[0]
        assert "in run_for_ever" in answer.stacks
        assert "in blocked_here" in answer.stacks
    assert rank.process.poll() is None


def test_a_rank_whose_gil_is_held_gives_its_stacks_and_no_flight_record(start_rank):
    """The dump is written in C, the record needs Python: the one comes, the other's absence is explained."""
    rank = start_rank(1, "gil")
    started = time.monotonic()
    answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)[1]
    assert "in blocked_here" in answer.stacks
    assert answer.flight is None
    assert answer.signalled
    assert "no flight record from rank 1" in texts(answer)
    assert "GIL" in texts(answer)
    assert time.monotonic() - started < LONG_S / 2, "having the stacks, it does not wait for the whole grace"


def test_a_stopped_rank_is_not_waited_for(start_rank):
    """State T is known at once; the other ranks' answers are not delayed."""
    stopped, other = start_rank(0), start_rank(1)
    stopped.stop()
    started = time.monotonic()
    found = collect_evidence([stopped.target, other.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)
    assert time.monotonic() - started < LONG_S / 2
    assert found[0].stacks is None
    assert "stopped by a signal (state T)" in texts(found[0])
    assert "no stacks from rank 0: it is stopped" in texts(found[0])
    assert "in blocked_here" in found[1].stacks


def test_two_dumps_are_two_answers(start_rank):
    """The second answer does not repeat the first: the file is only appended to."""
    rank = start_rank(0)
    for _ in range(2):
        answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)[0]
        assert answer.stacks.count("in blocked_here") == 1
        assert answer.flight is not None


def test_no_signal_goes_to_a_process_without_the_handler(start_rank):
    """The dump signal would kill it: it stays alive, and the report says why there are no stacks."""
    rank = start_rank(0, "gil, no-handler")
    answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=0.5)[0]
    assert answer.stacks is None
    assert "has no handler" in texts(answer)
    assert rank.process.poll() is None


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"pid": os.getpid()}])
def test_no_signal_goes_to_another_process(start_rank, change):
    """A pid whose start time differs is a different process, whatever its page said."""
    target = attrs.evolve(start_rank(0).target, **change)
    assert StackRequest(target, DUMP_SIGNAL).send() == "the process is gone"


def test_a_dead_rank_says_so(start_rank):
    """Neither request is waited for when the process has ended."""
    rank = start_rank(0)
    rank.process.kill()
    rank.process.wait(10)
    answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)[0]
    assert answer.stacks is answer.flight is None
    assert "is gone" in texts(answer)


def test_switched_off_and_replaced(start_rank):
    """Dump signal 0 sends no signal to a silent rank; a monitor that was replaced asks for nothing at all."""
    rank, silent = start_rank(0), start_rank(1, "gil")
    off = collect_evidence([rank.target, silent.target], dump_signal=0, grace_s=LONG_S)
    assert "in blocked_here" in off[0].stacks
    assert off[1].stacks is None
    assert "switched off" in texts(off[1])
    replaced = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S, may_ask=lambda: False)[0]
    assert replaced.stacks is replaced.flight is None
    assert "another monitor" in texts(replaced)


def test_cpu_time_tells_a_busy_rank_from_a_waiting_one(start_rank):
    """A loop that computes moves, one that waits stands still."""
    ranks = {0: start_rank(0, "busy"), 1: start_rank(1)}
    earlier = {number: read_cpu(rank.target.pid) for number, rank in ranks.items()}
    end = time.monotonic() + 10
    while read_cpu(ranks[0].target.pid).cpu_ns - earlier[0].cpu_ns < 50_000_000 and time.monotonic() < end:
        time.sleep(0.01)
    said = {number: proc_evidence(rank.target, earlier[number])[1].text for number, rank in ranks.items()}
    assert "CPU time of rank 0 moves" in said[0]
    assert "CPU time of rank 1 stands still" in said[1]


def test_a_busy_rank_answers_too(start_rank):
    """Endless Python code answers both: the helper gets the GIL in turn."""
    rank = start_rank(0, "busy")
    answer = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)[0]
    assert "in blocked_here" in answer.stacks
    assert answer.flight is not None


def test_a_rank_that_works_inside_a_call_that_holds_the_gil_is_spared(start_rank):
    """No signal interrupts it, and its stack, once it stands still, is still to be had."""
    rank = start_rank(1, "gil")
    spared = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S, moving={1})[1]
    assert spared.spared
    assert spared.stacks is None
    assert "who works is not interrupted" in texts(spared)
    asked = collect_evidence([rank.target], dump_signal=DUMP_SIGNAL, grace_s=LONG_S)[1]
    assert not asked.spared
    assert "in blocked_here" in asked.stacks
