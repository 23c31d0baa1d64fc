"""Blocks that hooks begin and end, on whatever thread they run."""

from __future__ import annotations

import threading
from time import monotonic_ns

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resilience_sdk import faults, heartbeat
from resilience_sdk.recorder import lookup
from resilience_sdk.straggler import section


@pytest.fixture
def block(recording):
    """A block of the calling thread."""
    found = lookup.find_own_block("bwd", "compute")
    assert found is not None
    return found


def test_what_is_begun_is_open_and_what_is_ended_counts(recording, block):
    """With the duration between the two, less what is to be left out of it, and never below nothing."""
    assert block.begin(1_000)
    assert recording.stack() == ["bwd"]
    block.end(9_000)
    assert block.begin(10_000)
    block.end(15_000, 1_000)
    assert block.begin(20_000)
    block.end(21_000, -4_000)
    assert block.begin(30_000)
    block.end(31_000, 5_000)
    assert recording.harvest() == {"bwd": [8_000, 4_000, 5_000, 0]}
    assert recording.stack() == []


def test_what_is_dropped_does_not_count(recording, block):
    """It is closed, and can be begun again."""
    block.begin(1)
    block.drop(2)
    block.drop(3)
    block.end(4)
    assert recording.stack() == []
    assert recording.harvest() == {}
    assert block.begin(5)


def test_the_same_name_with_a_block_counts_in_one_row(recording, block):
    """Where the block is open, it is its own to close; after it the hook may begin."""
    with section("bwd"):
        assert not block.begin(1)
    assert block.begin(2)
    block.end(3)
    assert len(recording.harvest()["bwd"]) == 2


def test_an_exception_through_a_heartbeat_closes_it(recording, block):
    """As it does with every block that was entered inside."""
    with pytest.raises(OSError, match="x"), heartbeat():
        block.begin(heartbeat().t0 + 1)
        raise OSError("x")
    assert recording.stack() == []
    block.end(10**18)
    assert "bwd" not in recording.harvest()


def test_another_thread_may_end_what_this_one_began(recording, block):
    """Autograd runs its callbacks on threads of its own, while this one waits."""
    block.begin(1_000)
    thread = threading.Thread(target=block.end, args=(4_000,))
    thread.start()
    thread.join()
    assert recording.harvest() == {"bwd": [3_000]}
    assert len(recording.snapshot().lanes) == 1


def test_another_thread_finds_a_block_of_its_own(recording, block):
    """On its own lane."""
    found = []
    thread = threading.Thread(target=lambda: found.append(lookup.find_own_block("bwd", "compute")))
    thread.start()
    thread.join()
    assert found[0] is not block
    assert found[0].lane is not block.lane
    assert lookup.find_own_block("bwd", "compute") is block


def test_a_forked_child_begins_nothing(recording, block):
    """What it inherits writes into its parent's page no more."""
    recording.recorder.orphan()
    assert not block.begin(1)
    block.end(2)
    block.drop(3)
    assert recording.harvest() == {}


def test_where_nothing_is_recorded_there_is_no_block(recording):
    """With the SDK switched off."""
    lookup.disable()
    assert lookup.find_own_block("bwd", "compute") is None


def test_a_fault_strikes_where_a_hook_begins(recording, monkeypatch):
    """As it does in a `with` block, and only if the block was begun."""
    monkeypatch.setattr(faults, "_injector", faults.Injector())
    faults.load("kill:how=exception,section=bwd,step=any", 0, 0)
    lookup.forget()
    block = lookup.find_own_block("bwd", "compute")
    with pytest.raises(faults.InjectedError):
        block.begin(1)
    assert not block.begin(2)


def test_a_heartbeat_that_hooks_begin_is_progress(recording):
    """In the step that they name; one that is open already is another's to end."""
    beat = lookup.find_own_beat("step")
    assert beat.begin(1_000, 41)
    assert not beat.begin(2_000, 42)
    assert (recording.lane().step, recording.lane().step_is_global) == (41, True)
    beat.end(4_000)
    beat.end(5_000)
    assert recording.harvest() == {"step": [3_000]}
    assert recording.snapshot().first_beat_ns
    with heartbeat():
        assert not recording.lane().step_is_global


def test_a_heartbeat_of_hooks_begins_the_deadlines_anew(recording):
    """Behind a loop that has ended them."""
    heartbeat.done()
    lookup.find_own_beat("step").begin(1_000)
    assert not recording.snapshot().done


def test_a_heartbeat_that_the_script_enters_inside_keeps_its_levels(recording):
    """Whichever ends first: both are closed behind the second."""
    beat = lookup.find_own_beat("step")
    beat.begin(1_000)
    with heartbeat():
        beat.end(2_000)
        assert recording.stack() == ["step"]
    assert recording.stack() == []
    assert recording.snapshot().beats == 1
    with heartbeat():
        pass
    assert recording.snapshot().beats == 2


@pytest.mark.parametrize("how", ["dropped", "unwound", "with earlier time", "as counted"])
def test_a_heartbeat_that_is_shorter_or_longer_than_counted_hides_no_section_around_it(recording, how):
    """Its ring tells another duration than that of its last pass, in which what is open would look left behind."""
    beat = lookup.find_own_beat("step")
    beat.begin(1)  # when this machine was started
    beat.end(monotonic_ns())
    with section("eval") as around:
        beat.begin(monotonic_ns())
        if how == "dropped":
            beat.drop(monotonic_ns())
        elif how == "unwound":
            around.lane.abandon_after(around.t0, monotonic_ns())
        else:
            beat.end(monotonic_ns(), -(10**12) if how == "with earlier time" else 0)
        assert recording.stack() == ["eval"]
        with heartbeat.paused("a"):
            pass
        with section("eval"):
            assert recording.stack() == ["eval"]
        assert recording.stack() == ["eval"]
    assert recording.stack() == []
    assert recording.snapshot().odd_exits == (how == "unwound")


def test_a_forked_child_beats_nothing(recording):
    """As with its blocks."""
    beat = lookup.find_own_beat("step")
    recording.recorder.orphan()
    assert not beat.begin(1, 2)
    beat.end(2)
    assert recording.snapshot().beats == 0


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_fault_strikes_where_a_hook_begins_or_ends_a_heartbeat(recording, monkeypatch, where):
    """In the step that it names, as of a `with` block."""
    monkeypatch.setattr(faults, "_injector", faults.Injector())
    faults.load(f"kill:how=exception,step=7,where={where}", 0, 0)
    lookup.forget()
    beat = lookup.find_own_beat("step")
    begun = []
    with pytest.raises(faults.InjectedError):
        for step in range(6, 9):
            beat.begin(1, step)
            begun.append(step)
            beat.end(2)
    assert begun == ([6] if where == "inside" else [6, 7])


def test_batches_of_an_evaluation_are_no_steps_to_a_fault(recording, monkeypatch):
    """Neither to one that is due nor to who hears of steps: they are progress between two of them."""
    monkeypatch.setattr(faults, "_injector", faults.Injector())
    faults.load("kill:how=exception,step=7;kill:how=exception,step=7,where=outside", 0, 0)
    heard = []
    faults.observe(heard.append)
    lookup.forget()
    lookup.find_own_beat("step").begin(1, 6)
    lookup.find_own_beat("step").end(2)
    for step in (6, 7, 8):
        evaluation = lookup.find_own_beat("eval_batch")
        evaluation.begin(3, step)
        evaluation.end(4)
    assert heard == [6]


def test_device_time_is_of_a_kind_of_its_own(recording, block):
    """Beside the section of the same name, and never open."""
    device = recording.recorder.on_device(block)
    assert recording.recorder.on_device(block) is device
    device.sample(5)
    block.begin(1)
    block.end(3)
    rows = {(name, kind): samples for name, kind, _, _, samples, *_ in recording.reader.passes()}
    assert rows == {("bwd", "compute"): [2], ("bwd", "gpu"): [5]}
    assert recording.stack() == []


MOVES = st.lists(st.sampled_from(["begin", "end", "drop", "enter", "exit"]), max_size=16)


@pytest.mark.parametrize("kind", ["section", "heartbeat"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES)
def test_in_whatever_order_hooks_and_blocks_come_what_is_open_is_right(recording, kind, moves):
    """Of one name: a script may enter inside what a hook has begun, which is ended or dropped meanwhile."""
    block = lookup.find_own_block("both", "compute") if kind == "section" else lookup.find_own_beat("both")
    is_hooks, entered = False, 0
    for move in [*moves, "drop", *["exit"] * len(moves)]:
        now = monotonic_ns()
        if move == "begin" and not is_hooks:
            is_hooks = block.begin(now)
            assert is_hooks is (entered == 0)
        elif move in ("end", "drop") and is_hooks:  # as who has begun nothing ends nothing
            getattr(block, move)(now)
            is_hooks = False
        elif move == "enter":
            block.__enter__()
            entered += 1
        elif move == "exit" and entered:
            block.__exit__(None, None, None)
            entered -= 1
        depth = entered + is_hooks
        assert recording.stack() == ["both"] * bool(depth), move
        assert len(block._levels) == max(0, depth - 1), move
        assert bool(block.t0) is bool(depth), move
    assert block.may_be_fast() == (block.owner != 0)
    assert block.begin(monotonic_ns())
    block.drop(monotonic_ns())
    assert recording.stack() == []
