"""Heartbeats: steps, pulses, pauses and the end, in every form in which they are written."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy
import pytest
from recording import Recording

from resilience_sdk import faults, heartbeat
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup, page_layout
from resilience_sdk.straggler import section


def test_steps_are_counted_where_nobody_numbers_them(recording):
    """The step is the number of completed heartbeats while one is open, and that of the last one after it."""
    for step in range(20):
        with heartbeat():
            assert (recording.snapshot().step, recording.snapshot().beats) == (step, step)
        assert (recording.snapshot().step, recording.snapshot().beats) == (step, step + 1)
    assert not recording.snapshot().step_is_global


def test_a_given_step_is_the_step(recording):
    """The argument names the step, on entry and after the exit, and makes it comparable between attempts."""
    for step in (0, 7, 8, 3, 1 << 40):
        with heartbeat(step=step):
            assert recording.snapshot().step == step
        assert recording.snapshot().step == step
    assert recording.snapshot().step_is_global
    assert recording.snapshot().beats == 5


def test_steps_may_be_given_late_and_stop_again(recording):
    """A loop that begins to number its steps, or ends to, is followed at once."""
    for _ in range(20):
        with heartbeat():
            pass
    with heartbeat(step=500):
        assert recording.snapshot().step == 500
    with heartbeat():
        assert recording.snapshot().step == 21
        assert not recording.snapshot().step_is_global


def test_a_numpy_integer_is_a_step(recording):
    """Counters of numpy are accepted."""
    with heartbeat(step=numpy.int64(12)):
        assert recording.snapshot().step == 12


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("step", ["3", 2.0, -1, 1 << 80, object()])
def test_a_step_that_is_none_is_refused(recording, warm, step):
    """The error names the value, at the first call as at any other, and leaves the heartbeat usable."""
    if warm:
        with heartbeat():
            pass
    with pytest.raises(ConfigError, match=r"heartbeat\(step="):
        heartbeat(step=step)
    with pytest.raises(ConfigError, match=r"heartbeat\(step="):
        heartbeat.beat(step)
    with heartbeat():
        assert recording.stack() == ["step"]


@pytest.mark.parametrize("name", ["", 3, None, ["a"]])
def test_a_name_that_is_none_is_refused(recording, name):
    """The error names the value."""
    with pytest.raises(ConfigError, match=r"takes a string"):
        heartbeat(name)


def test_names_are_counted_apart(recording):
    """Two heartbeats of two names have their own durations; the rank's beats are those of both."""
    for _ in range(3):
        with heartbeat("generator"):
            pass
        with heartbeat("critic"):
            pass
    assert {name: len(samples) for name, samples in recording.harvest().items()} == {"generator": 3, "critic": 3}


class Provisional:
    """A rank whose identity is final from the third time on that it is asked, or never."""

    def __init__(self, settles_at: int | None = None) -> None:
        self.asked = 0
        self._settles_at = settles_at

    def settle(self) -> bool:
        self.asked += 1
        return self.asked == self._settles_at


@pytest.mark.parametrize("settles_at", [3, None])
def test_early_beats_ask_for_the_identity(tmp_path, settles_at):
    """Until it is final, and not for ever: a process without a process group never gets one."""
    rank = Provisional(settles_at)
    with Recording(tmp_path, rank) as recording:
        assert recording.snapshot().first_beat_ns is None
        with heartbeat():
            pass
        first = recording.snapshot().first_beat_ns
        for _ in range(99):
            with heartbeat():
                pass
        assert rank.asked == settles_at if settles_at else 1 < rank.asked < 50
        assert recording.snapshot().first_beat_ns == first is not None
        assert recording.snapshot().beats == 100


# -- decorators


def test_decorated_with_and_without_parentheses(recording):
    """Both forms keep the function's name and result, and record."""

    @heartbeat
    def plain(x: int) -> int:
        """Adds one."""
        assert recording.stack() == ["step"]
        return x + 1

    @heartbeat()
    def called(x: int) -> int:
        assert recording.stack() == ["step"]
        return x

    @heartbeat("tick")
    def named() -> list[str]:
        return recording.stack()

    assert (plain(1), plain.__name__, plain.__doc__) == (2, "plain", "Adds one.")
    assert called(2) == 2
    assert named() == ["tick"]
    assert recording.snapshot().beats == 3


def test_a_decorated_method(recording):
    """A method is bound as ever."""

    class Trainer:
        steps = 0

        @heartbeat
        def train_step(self, batch: int) -> int:
            self.steps += batch
            return self.steps

    trainer = Trainer()
    assert [trainer.train_step(2), trainer.train_step(batch=3)] == [2, 5]
    assert recording.snapshot().beats == 2


def test_a_decorated_coroutine_function(recording):
    """What is timed is the whole awaited duration, not the making of the coroutine."""

    @heartbeat()
    async def step() -> list[str]:
        await asyncio.sleep(0.01)
        return recording.stack()

    assert asyncio.iscoroutinefunction(step)
    assert asyncio.run(step()) == ["step"]
    assert recording.harvest()["step"][0] >= 10_000_000


@pytest.mark.parametrize("decorator", [heartbeat, heartbeat(), heartbeat("other")])
def test_generators_are_refused(decorator):
    """A generator's body does not run in the call; decorating one is an error that says what to do."""

    def batches():
        yield 1

    async def tokens():
        yield 1

    for function in (batches, tokens):
        with pytest.raises(TypeError, match=r"is a generator.*with"):
            decorator(function)


def test_generators_are_refused_once_recording(recording):
    """The same where the heartbeat exists already."""
    with heartbeat():
        pass

    def batches():
        yield 1

    with pytest.raises(TypeError, match="is a generator"):
        heartbeat()(batches)


def test_decorating_starts_nothing():
    """A decorator runs at import, in processes that are no ranks, too: it must not start the recording."""
    from resilience_sdk.recorder import lookup

    before = lookup.starter()
    started = []
    lookup.set_starter(lambda: started.append(1))
    lookup.forget()
    try:
        heartbeat(lambda: None)
        heartbeat()(lambda: None)
        heartbeat("other")(lambda: None)
        assert not started
    finally:
        lookup.set_starter(before)
        lookup.forget()


# -- pulses


def test_pulses_count_and_time_what_is_between_them(recording):
    """Each pulse is a step; the running interval is open on the page."""
    for count in range(4):
        heartbeat.beat()
        (opened,) = recording.lane().stack
        assert (opened.name, opened.kind, opened.occurrences) == ("step", "pulse", count)
        assert recording.snapshot().beats == count + 1
        time.sleep(0.005)
    assert [sample >= 5_000_000 for sample in recording.harvest()["step"]] == [False, True, True, True]


def test_a_pulse_may_carry_its_step(recording):
    """The argument is the global step that ends with it: the rank is in the next one, until the loop is over."""
    heartbeat.beat(41)
    assert (recording.snapshot().step, recording.snapshot().step_is_global) == (42, True)
    heartbeat.beat(step=42)
    assert (recording.snapshot().step, recording.snapshot().last_step) == (43, 42)
    heartbeat.done()
    assert (recording.snapshot().step, recording.snapshot().last_step) == (42, 42)


# -- the step that is told


def told(recording) -> tuple[int | None, int]:
    """The step as reports say it, and as faults and exceptions do."""
    return recording.snapshot().step, recording.recorder.owner.current_step()


def test_the_step_told_is_that_of_the_loop(recording):
    """In the block of a step it is its number, from 0; between two blocks the step that was completed last."""
    assert told(recording) == (None, -1)
    for step in range(3):
        with heartbeat():
            assert told(recording) == (step, step)
        assert told(recording) == (step, step)


def test_a_wait_for_data_between_two_steps_is_for_the_next(recording):
    """`section=data,step=N` strikes in the wait for the batch of step N, and N is told; a save belongs to its step."""
    for step in range(3):
        with section("data", kind="io"):
            assert told(recording) == ((step, step) if step else (None, -1))
        with heartbeat():
            pass
        with section("checkpoint", kind="io"):
            assert told(recording) == (step, step)


def test_a_pulse_ends_a_step(recording):
    """What comes behind it is in the next step: a rank that stands still there stands in that one."""
    for step in range(3):
        assert told(recording) == ((step, step) if step else (None, -1))
        heartbeat.beat()
    assert told(recording) == (3, 3)
    assert recording.snapshot().last_step == 2
    heartbeat.done()
    assert told(recording) == (2, 2)


def test_an_inner_heartbeat_counts_the_steps(recording):
    """With one around each epoch, the step is the one inside."""
    for epoch in range(2):
        with heartbeat("epoch"):
            for step in range(3):
                with heartbeat():
                    assert told(recording) == (3 * epoch + step,) * 2


@pytest.mark.parametrize("by", ["block", "pulse"])
def test_pulses_made_for_a_script_are_no_steps_of_its_own(recording, by):
    """The steps of an optimizer before the first heartbeat (a warm-up, the load of its state) are not counted on."""
    for _ in range(3):
        recording.recorder.pulse(None)
    assert told(recording) == (3, 3)
    for step in range(3):
        if by == "block":
            with heartbeat():
                assert told(recording) == (step, step)
        else:
            heartbeat.beat()
            assert told(recording) == (step + 1, step + 1)
        assert recording.snapshot().beats == step + 1


@pytest.mark.parametrize("planned", [0, 2])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_fault_at_a_pulse_strikes_in_the_step_that_ends_with_it(recording, monkeypatch, numbered, planned):
    """The plan, the loop and the report give one number; the first step can be struck too."""
    monkeypatch.setattr(faults, "_injector", faults.Injector())
    faults.load(f"kill:how=exception,step={planned}", 0, 0)
    lookup.forget()
    for step in range(planned):
        heartbeat.beat(step if numbered else None)
    with pytest.raises(faults.InjectedError):
        heartbeat.beat(planned if numbered else None)
    assert told(recording) == (planned, planned)


def test_how_often_collectives_were_seen_is_no_step(recording):
    """They are looked at every 2 s, so their number says nothing about the loop."""
    recording.page.words[page_layout.W_BEAT_SOURCE] = page_layout.BEATS_COLLECTIVES
    recording.recorder.pulse(None)
    assert recording.snapshot().beats == 1
    assert recording.snapshot().step is None


def test_blocks_within_the_interval_of_a_pulse(recording):
    """Sections nest in the interval."""
    from resilience_sdk.straggler import section

    heartbeat.beat()
    with section("fwd"):
        assert recording.stack() == ["step", "fwd"]
    heartbeat.beat()
    assert recording.stack() == ["step"]


def test_pulses_of_several_threads(recording):
    """Each thread has its own interval."""

    together = threading.Barrier(3)

    def pulse() -> None:
        together.wait()
        for _ in range(50):
            heartbeat.beat()
        together.wait()

    threads = [threading.Thread(target=pulse) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lane.beats for lane in recording.snapshot().lanes[1:]] == [50, 50, 50]


# -- pauses and the end


def test_a_pause_is_on_the_page_with_its_reason(recording):
    """The monitor sees that and why deadlines are suspended; pauses nest."""
    with heartbeat.paused("label by hand"):
        assert recording.snapshot().paused == "label by hand"
        with heartbeat.paused("coffee"):
            assert recording.snapshot().paused == "coffee"
        assert recording.snapshot().paused == "label by hand"
        assert recording.snapshot().resumed_ns is None
    assert recording.snapshot().paused is None
    assert recording.snapshot().resumed_ns is not None


@pytest.mark.parametrize("nested", [False, True])
def test_a_pause_does_not_count(recording, nested):
    """Neither for the open step nor for its duration, and a pause within a pause counts once."""
    began = time.monotonic_ns()
    with heartbeat():
        entered = recording.lane().stack[0].entered_ns
        with heartbeat.paused("a"):
            if nested:
                with heartbeat.paused("b"):
                    time.sleep(0.05)
            time.sleep(0.05)
        later = recording.lane().stack[0].entered_ns
        assert entered + 50_000_000 <= later <= time.monotonic_ns()
    (sample,) = recording.harvest()["step"]
    assert 0 < sample <= time.monotonic_ns() - began - (100_000_000 if nested else 50_000_000)


@pytest.mark.parametrize("inside", [False, True])
def test_a_pause_hides_no_section_around_completed_steps(recording, inside):
    """What was open before a step is still open after a pause, however its start and the step's come to lie."""
    with section("epoch"):
        if not inside:
            with heartbeat():
                time.sleep(0.05)
        with heartbeat.paused("a"):
            if inside:
                with heartbeat():
                    time.sleep(0.02)
            time.sleep(0.02)
        assert recording.stack() == ["epoch"]
        with section("epoch"):
            assert recording.stack() == ["epoch"]
        assert recording.stack() == ["epoch"]
    assert recording.snapshot().odd_exits == 0
    assert len(recording.harvest()["epoch"]) == 1


def test_a_pause_does_not_count_for_a_pulse(recording):
    """The interval is shorter by the pause."""
    began = time.monotonic_ns()
    heartbeat.beat()
    with heartbeat.paused("a"):
        time.sleep(0.05)
    heartbeat.beat()
    assert recording.harvest()["step"][1] <= time.monotonic_ns() - began - 50_000_000


def test_a_block_that_begins_in_a_pause_and_outlasts_it(recording):
    """It starts no later than now, and its duration is no wonder."""
    step = heartbeat()
    with heartbeat.paused("a"):
        began = time.monotonic_ns()
        time.sleep(0.02)
        step.__enter__()
    assert recording.lane().stack[0].entered_ns <= time.monotonic_ns()
    step.__exit__(None, None, None)
    assert 0 <= recording.harvest()["step"][0] <= time.monotonic_ns() - began - 20_000_000


def test_an_exception_ends_a_pause(recording):
    """A pause that is left by an exception is over."""
    with pytest.raises(ValueError, match="no"), heartbeat.paused("a"):
        raise ValueError("no")
    assert recording.snapshot().paused is None


def test_the_end_ends_all_deadlines(recording):
    """After `done()` the page says so, and a running interval is closed uncounted."""
    heartbeat.beat()
    heartbeat.beat()
    heartbeat.done()
    assert recording.snapshot().done
    assert recording.stack() == []
    assert recording.snapshot().beats == 2


def test_heartbeats_replace_what_was_made_for_the_script(recording):
    """A script that beats by itself closes the interval that an optimizer's step opened for it."""
    recording.recorder.pulse(None)
    assert recording.stack() == ["step"]
    with heartbeat():
        assert [s.kind for s in recording.lane().stack] == ["heartbeat"]
    assert recording.snapshot().beat_source == "user"


def test_another_loop_takes_the_deadlines_up_again(recording):
    """What lies between two loops counts for nothing: no deadline began before the second one."""
    with heartbeat():
        pass
    recording.recorder.begin()
    assert recording.snapshot().resumed_ns is None  # there was nothing to take up
    heartbeat.done()
    before = time.monotonic_ns()
    recording.recorder.begin()
    snapshot = recording.snapshot()
    assert not snapshot.done
    assert snapshot.resumed_ns is not None
    assert before <= snapshot.resumed_ns <= time.monotonic_ns()
