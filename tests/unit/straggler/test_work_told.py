"""`straggler.work`: what a loop tells is what the monitor reads, step by step and pass by pass."""

from __future__ import annotations

import math
import os

import pytest
import torch

from resilience_sdk import heartbeat, straggler
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.page_layout import WORK
from resilience_sdk.straggler.windowing import ToldWork, first_pass


class Reader:
    """What the monitor knows of a recording."""

    def __init__(self, recording):
        self._recording = recording
        self.told = ToldWork()
        self.passes = {}

    def look(self):
        for new in self._recording.reader.passes():
            if new.kind == WORK:
                self.told.add(new.name, new.start, new.samples_ns)
            else:
                self.passes[new.name] = new.start + len(new.samples_ns)

    def window(self, section, index=0):
        return self.told.of(first_pass(index), self.passes[section])


@pytest.fixture
def reader(recording):
    return Reader(recording)


def passed(name):
    with straggler.section(name):
        pass


def test_an_amount_stands_beside_the_pass_of_its_step(reader):
    """Told before the step or in it, as an int, a float, of numpy or a tensor."""
    kinds = (int, float, torch.tensor, lambda n: torch.tensor([n]), lambda n: torch.tensor(n).numpy()[()])
    for step in range(20):
        amount = kinds[step % len(kinds)](100 + step)
        if step % 2:
            straggler.work(amount)
        with heartbeat():
            if not step % 2:
                straggler.work(amount)
            passed("fwd")
    reader.look()
    assert reader.window("fwd") == tuple(100.0 + step for step in range(1, 9))
    assert reader.window("fwd", 1) == tuple(100.0 + step for step in range(9, 17))


def test_micro_batches_add_up_in_a_step_and_stand_alone_in_theirs(reader):
    """The forward has the amount of its micro-batch, the optimizer that of the step."""
    for step in range(20):
        with heartbeat():
            for micro in range(4):
                straggler.work(step + micro)
                passed("fwd")
            passed("optim")
        if step == 10:
            reader.look()
    reader.look()
    first = first_pass(1)
    assert reader.window("fwd", 1) == tuple(float(n // 4 + n % 4) for n in range(first, first + 8))
    assert reader.window("optim") == tuple(4.0 * step + 6.0 for step in range(1, 9))


def test_all_micro_batches_may_be_told_before_the_first_is_passed(reader):
    """As where a step's batches are fetched together, and the monitor looks in the midst of it."""
    for step in range(20):
        for micro in range(4):
            straggler.work(10 * step + micro + 1)
        with heartbeat():
            for _ in range(4):
                passed("fwd")
                if step == 10:
                    reader.look()
                    assert reader.window("fwd", 0) == (2.0, 3.0, 4.0, 11.0, 12.0, 13.0, 14.0, 21.0)


def test_the_steps_go_on_when_names_are_looked_up_anew(reader):
    """As when a fault is armed in the middle of a step: neither its amount nor the count is lost."""
    for step in range(20):
        with heartbeat():
            straggler.work(step)
            if step == 5:
                lookup.forget()
            straggler.work(step)
            passed("optim")
    reader.look()
    assert reader.window("optim") == tuple(2.0 * step for step in range(1, 9))


@pytest.mark.parametrize("is_behind", [False, True])
def test_pulses_count_the_steps_too(reader, is_behind):
    """Whether they come before the step or behind it."""
    for step in range(20):
        if not is_behind:
            heartbeat.beat()
        straggler.work(step)
        straggler.work(step)
        passed("optim")
        if is_behind:
            heartbeat.beat()
    reader.look()
    assert reader.window("optim") == tuple(2.0 * step for step in range(1, 9))


def test_steps_that_were_told_nothing_have_no_amount(reader):
    """Neither a short while nor a long one brings the others out of step."""
    for step in range(120):
        with heartbeat():
            if step < 3 or step in (5, 7, 8) or step > 100:
                straggler.work(step)
                straggler.work(step)
            passed("optim")
        if step % 40 == 15:
            reader.look()
            assert reader.window("optim") is None or step < 100
    reader.look()
    assert reader.window("optim", 12) == (None, None, None, None, *(2.0 * step for step in range(101, 105)))


def test_a_heartbeat_that_replaces_pulses_goes_on_counting(reader):
    """As behind an optimizer that was made to take a step when its state was loaded."""
    straggler.work(1.0)
    lookup.recorder().pulse(None)
    straggler.work(1.0)
    for _ in range(20):
        with heartbeat():
            straggler.work(2.0)
            straggler.work(2.0)
            passed("optim")
    reader.look()
    assert reader.window("optim", 1) == (4.0,) * 8


def test_a_section_that_is_not_passed_as_often_has_no_amounts(reader):
    """A checkpoint every few steps, or what began later."""
    for step in range(60):
        with heartbeat():
            straggler.work(5)
            passed("fwd")
            if step % 4 == 0:
                passed("checkpoint")
            if step > 20:
                passed("late")
        if step % 30 == 29:
            reader.look()
    assert reader.window("fwd", 5) == (5.0,) * 8
    assert reader.window("checkpoint") is None
    assert reader.window("late", 2) is None
    assert reader.window("fwd", 40) is None


def test_it_is_no_section_and_has_no_deadline(recording):
    """A user's own section may have any of its names, and nothing of it is ever open."""
    with heartbeat():
        straggler.work(5)
        with straggler.section("work"), straggler.section("calls"), straggler.section("steps"):
            assert recording.stack() == ["step", "work", "calls", "steps"]
    assert recording.harvest()["work"]


class OnDevice:
    """Like a tensor on a GPU; reading it is the mistake."""

    device = torch.device("cuda", 0)

    def __float__(self):
        raise AssertionError("waited for the device")


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        (OnDevice(), r"work\(<tensor on cuda:0>\): .* on the CPU"),
        (torch.empty(1, device="meta"), r"work\(<tensor on meta>\)"),
        (torch.ones(3), r"work\(<Tensor of shape \(3,\)>\): expected a number"),
        ("12", r"work\('12'\): expected a number"),
        (True, r"work\(True\)"),
        (None, r"work\(None\)"),
        ([5], r"work\(\[5\]\)"),
        (-1, r"work\(-1\): .* from 0 up"),
        (math.nan, r"work\(nan\): "),
        (math.inf, r"work\(inf\): "),
        (10**400, r"from 0 up"),
    ],
)
def test_what_is_no_amount_is_refused(recording, amount, said):
    """In one line, with the value and the cure; nothing is recorded."""
    with pytest.raises(ConfigError, match=said) as raised:
        straggler.work(amount)
    assert "\n" not in str(raised.value)
    assert recording.harvest() == {}


def test_where_nothing_is_recorded_it_does_nothing():
    """But it refuses what it would refuse elsewhere."""
    before = lookup.starter()
    try:
        lookup.disable()
        straggler.work(5)
        with pytest.raises(ConfigError):
            straggler.work(-5)
    finally:
        lookup.set_starter(before)
        lookup.forget()


def test_a_forked_child_writes_nothing(recording):
    """The page is its parent's."""
    straggler.work(5)
    recording.harvest()
    pid = os.fork()
    if pid == 0:
        try:
            recording.recorder.orphan()
            straggler.work(7)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert recording.harvest() == {}
