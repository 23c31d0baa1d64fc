"""The load of a machine: read from kernel files, and whether it explains that all ranks are slower."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.monitor.machine_load import LEAST_S, Load, LoadReader, LoadReading, LoadWatch, explains, words
from resilience_sdk.straggler.verdicts import SlowVerdict

ALL = SlowVerdict("global", "fwd", "compute", "", (), (), False, 1, 200, 1.8, 0.02, 0.2)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The kernel files of a machine, of which processors 0 and 1 are ours; `files(**contents)` writes some."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)

    def files(**contents):
        for name, text in contents.items():
            path = tmp_path / "proc" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return str(tmp_path)

    return files


STAT = """cpu  9 9 9 9 9 9 9 9 0 0
cpu0 1000 100 200 5000 50 10 20 300 0 0
cpu1 2000 0 300 5000 50 0 0 100 0 0
cpu2 90000 0 0 0 0 0 0 0 0 0
intr 1
"""


def process(pid, parent, ticks, children=0):
    """Return `stat` of a process."""
    return f"{pid} (a (b) c) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} {ticks} {children} 0 20 0 1 0 5 0 0"


def test_the_counters_of_the_processors_that_we_may_use(machine):
    """Others are none of ours. What the ranks have started is the job's, what others have is not."""
    root = machine(
        stat=STAT,
        loadavg="3.50 1 1 1/1 1",
        pressure__cpu="some avg10=1.0 avg60=1.0 avg300=1.0 total=2500000\nfull avg10=0 total=0\n",
        **{"100__stat": process(100, 1, 50, 20), "101__stat": process(101, 100, 30), "200__stat": process(200, 1, 900)},
    )
    ticks = os.sysconf("SC_CLK_TCK")
    reading = LoadReader({100}, root).read(7.0)
    assert reading == LoadReading(
        at_s=7.0,
        processors=2,
        own_s=pytest.approx(180 / ticks),
        busy_s=pytest.approx(3630 / ticks),
        stolen_s=pytest.approx(400 / ticks),
        waiting_s=2.5,
        tasks=3.5,
    )


@pytest.mark.parametrize("lacks", ["pressure", "stat", "loadavg"])
def test_each_file_may_be_missing(machine, lacks):
    """What it tells is unknown, the rest is not."""
    files = {"stat": STAT, "loadavg": "3.50 1 1 1/1 1", "pressure__cpu": "some avg10=1 total=2500000"}
    reading = LoadReader(root=machine(**{n: text for n, text in files.items() if not n.startswith(lacks)})).read(7.0)
    assert (reading.busy_s is None) is (lacks == "stat")
    assert (reading.waiting_s is None) is (lacks == "pressure")
    assert (reading.tasks is None) is (lacks == "loadavg")


@pytest.mark.parametrize("stat", ["", "cpu0\ncpu1 x\n", "cpu0 0 0 0 0\n"])
def test_nothing_to_read_is_nothing_known(machine, stat):
    """Never an exception."""
    assert LoadReader(root=machine(stat=stat)).read(7.0) is None


def test_a_program_of_others_is_seen_on_this_machine():
    """A busy loop that is not below us counts as others', one that is does not."""
    code = "import os, sys\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    pid = int(child.stdout.readline())
    child.wait()  # the loop belongs to init now
    try:
        both = []
        for own in (set(), {pid}):
            first = LoadReader(own).read(time.monotonic())
            since = time.monotonic()
            while time.monotonic() < since + 1.0:
                time.sleep(0.1)
            both.append(Load.between(first, LoadReader(own).read(time.monotonic())))
    finally:
        os.kill(pid, 9)
        child.stdout.close()
    without, known = both
    assert without.others > 0.0
    assert known.own > without.own


class Machine:
    """A clock and counters that a test moves on, and how often they were read."""

    def __init__(self, *, alone=True):
        self.now = LoadReading(0.0, 2, 0.0, 0.0, 0.0, 0.0)
        self.reads = 0
        self.watch = LoadWatch(self, 0.0, alone=alone)

    def read(self, now_s):
        self.reads += 1
        return self.now

    def go_on(self, seconds, own, others, waiting):
        """Let time pass in which the job and others use so many of two processors."""
        now = self.now
        self.now = attrs.evolve(
            now,
            at_s=now.at_s + seconds,
            own_s=now.own_s + own * 2 * seconds,
            busy_s=now.busy_s + (own + others) * 2 * seconds,
            waiting_s=now.waiting_s + waiting * seconds,
        )

    def look(self, verdict=ALL):
        return self.watch.look(verdict, self.now.at_s)


def test_nothing_is_read_while_nothing_is_slow():
    """Once in the beginning, once when all are slower, and once some seconds later: that is told from then on."""
    machine = Machine()
    machine.go_on(3600.0, 0.9, 0.02, 0.05)
    machine.watch.end(machine.now.at_s)
    assert machine.reads == 1
    machine.watch.notice(machine.now.at_s)
    machine.watch.notice(machine.now.at_s)
    machine.go_on(LEAST_S - 1.0, 0.45, 0.54, 0.9)
    assert machine.look() is None
    assert machine.reads == 2
    machine.go_on(1.0, 0.45, 0.54, 0.9)
    assert machine.look().explains
    assert machine.look() == machine.look(attrs.evolve(ALL, section="bwd"))
    assert machine.reads == 3
    assert "other programs use 54 % of the 2 processors (2 % before)" in machine.look().text


def test_a_load_that_has_gone_explains_nothing():
    """It is looked at again as long as the verdict stands."""
    machine = Machine()
    machine.go_on(600.0, 0.9, 0.02, 0.05)
    machine.watch.notice(machine.now.at_s)
    machine.go_on(LEAST_S, 0.45, 0.54, 0.9)
    assert machine.look().explains
    machine.go_on(60.0, 0.9, 0.02, 0.05)
    assert not machine.look().explains


def test_the_next_time_is_compared_with_the_time_since_the_last_one():
    """A load that came while nothing was slow, and stays, is no reason."""
    machine = Machine()
    machine.go_on(60.0, 0.9, 0.02, 0.05)
    machine.watch.notice(machine.now.at_s)
    machine.watch.end(machine.now.at_s)
    machine.go_on(60.0, 0.45, 0.54, 0.9)
    machine.watch.notice(machine.now.at_s)
    machine.go_on(LEAST_S, 0.45, 0.54, 0.9)
    assert not machine.look().explains


def test_the_load_of_one_of_several_nodes_explains_nothing():
    """All ranks of all nodes are slower; it is told beside it all the same."""
    machine = Machine(alone=False)
    machine.go_on(60.0, 0.9, 0.02, 0.05)
    machine.watch.notice(machine.now.at_s)
    machine.go_on(LEAST_S, 0.45, 0.54, 0.9)
    told = machine.look()
    assert not told.explains
    assert "54 %" in told.text


def test_a_short_section_counts_by_what_it_does_to_the_step():
    """Thirty times as long, it may take a tenth of the step: the steps of the job are that much longer."""
    machine = Machine()
    machine.go_on(600.0, 0.9, 0.02, 0.05)
    machine.watch.notice(machine.now.at_s)
    machine.go_on(LEAST_S, 0.45, 0.54, 0.9)
    assert machine.look(attrs.evolve(ALL, section="log", ratio=30.0, share=0.1)).explains
    assert not machine.look(attrs.evolve(ALL, section="fwd", ratio=30.0, share=0.9)).explains


@pytest.mark.parametrize("kind", ["gpu", "gpu_comm"])
def test_time_on_a_device_has_nothing_to_do_with_it(kind):
    """Who has the processors does not matter there."""
    machine = Machine()
    machine.watch.notice(machine.now.at_s)
    told = machine.look(attrs.evolve(ALL, section_kind=kind))
    assert (told.explains, told.text) == (False, "")


def test_where_nothing_can_be_read_the_verdict_is_not_held_back():
    """Then nothing is known of the load."""
    watch = LoadWatch(LoadReader(root="/nothing"), 0.0, alone=True)
    watch.notice(0.0)
    told = watch.look(ALL, 10.0)
    assert (told.explains, told.text) == (False, "")


QUIET = Load(2, own=0.9, others=0.02, stolen=0.0, idle=0.08, waiting=0.05)
CROWDED = Load(2, own=0.45, others=0.54, stolen=0.0, idle=0.01, waiting=0.9, tasks=6.0)


def change(load, **values):
    """Return a load with other values."""
    return attrs.evolve(load, **values)


def test_counters_become_shares_of_the_processors():
    """What everybody used without what the job used is what others did."""
    first = LoadReading(10.0, 2, own_s=5.0, busy_s=100.0, stolen_s=1.0, waiting_s=3.0)
    last = LoadReading(20.0, 2, own_s=11.0, busy_s=116.0, stolen_s=3.0, waiting_s=8.0, tasks=4.0)
    load = Load.between(first, last)
    assert load == Load(2, own=0.3, others=0.5, stolen=0.1, idle=pytest.approx(0.1), waiting=0.5, tasks=4.0)
    assert Load.between(first, first) is None


def test_what_the_kernel_does_not_tell_stays_unknown():
    """Neither zero nor a reason."""
    load = Load.between(LoadReading(0.0, 2, 0.0), LoadReading(10.0, 2, 5.0))
    assert load == Load(2, own=0.25)
    assert not explains(load, load, 2.0)
    assert words(None, load) == "the kernel does not tell the load of this machine"


@pytest.mark.parametrize("ratio", [1.1, 2.0, 3.0])
def test_others_who_take_half_of_a_full_machine_explain_it(ratio):
    """Also three times as long: each step waits for the rank that is held up most."""
    assert explains(QUIET, CROWDED, ratio)


def test_on_a_machine_that_was_full_before_it_counts_what_is_left():
    """From a tenth of the processors to a fiftieth."""
    before = Load(2, own=0.09, others=0.91, stolen=0.0, idle=0.0, waiting=1.0)
    now = Load(2, own=0.02, others=0.98, stolen=0.0, idle=0.0, waiting=1.0)
    assert explains(before, now, 5.0)
    assert not explains(before, now, 50.0)


@pytest.mark.parametrize(
    ("before", "now", "ratio"),
    [
        (QUIET, QUIET, 1.5),  # nothing has changed
        (CROWDED, CROWDED, 1.5),  # they did that before, when all was well
        (QUIET, CROWDED, 10.0),  # it would take far more than that
        (QUIET, change(CROWDED, own=0.2, others=0.5, idle=0.3), 1.5),  # processors are idle
        (QUIET, change(CROWDED, waiting=0.05), 1.5),  # nobody waits for one
        (QUIET, change(QUIET, own=0.99, idle=0.0, waiting=0.9), 1.5),  # the job itself wants more
    ],
)
def test_what_does_not_explain_it(before, now, ratio):
    """Then it is the training's."""
    assert not explains(before, now, ratio)


def test_the_hypervisor_explains_it():
    """Steal: the processors of a virtual machine that others have."""
    now = change(QUIET, own=0.6, stolen=0.3, idle=0.08)
    assert explains(QUIET, now, 1.5)
    assert "the hypervisor takes 30 % (0 % before)" in words(QUIET, now)


def test_pressure_alone_is_enough_where_the_job_had_less_time():
    """Nobody tells who had the processors: the job waited more and got less."""
    before, now = Load(2, own=0.9, waiting=0.05), Load(2, own=0.5, waiting=0.9)
    assert explains(before, now, 1.8)
    assert not explains(before, change(now, own=0.95), 1.8)


def test_it_is_said_beside_what_was_before():
    """One can judge it oneself."""
    assert words(QUIET, CROWDED) == (
        "other programs use 54 % of the 2 processors (2 % before), "
        "tasks wait for a processor during 90 % of the time (5 % before), load average 6.0"
    )


SHARES = st.floats(0.0, 1.0)


@given(SHARES, SHARES, SHARES, SHARES, SHARES, st.floats(1.0, 100.0))
def test_what_others_did_before_explains_nothing(own, others, stolen, idle, waiting, ratio):
    """However much it is: no load explains a slow-down that is no more than it was."""
    load = Load(2, own, others, stolen, idle, waiting)
    less = Load(2, own, 0.5 * others, 0.5 * stolen, idle, waiting)
    assert not explains(load, load, ratio)
    assert not explains(load, less, ratio)
