"""When a wait ends by itself, as the kernel tells it: the calls of both machines, and memory that holds anything."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.hang.waits import (
    CLOCKS,
    EndForm,
    On,
    SystemCall,
    WaitFollower,
    WaitTime,
    calls_on,
    of_call,
    parse_call,
    time_of,
)

SECOND = 1_000_000_000
NUMBERS = {
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "ppoll": (271, 73),
    "pselect6": (270, 72),
    "epoll_pwait": (281, 22),
    "restart_syscall": (219, 128),
}


def memory(**at):
    """Memory with these pairs of numbers at the addresses of which the names tell: `at_16=(90, 0)`."""
    cells = {int(name.partition("_")[2]): struct.pack("=qq", *pair) for name, pair in at.items()}
    return lambda address, size: cells.get(address, b"")[:size] or None


def test_the_numbers_of_both_machines():
    """As the kernel's tables have them; of another machine no call is known."""
    for name, numbers in NUMBERS.items():
        for machine, number in zip(("x86_64", "aarch64"), numbers, strict=True):
            assert calls_on(machine)[number][0] == name
    assert calls_on("riscv64") == {}


@pytest.mark.parametrize("text", ["", "running\n", "-1 0x7ffc 0x7f\n", "230 0x1 0x0", "230 x y z 0 0 0 0 0"])
def test_what_is_no_call_is_none(text):
    """A thread that runs, that is stopped outside of a call, or that ends."""
    assert parse_call(text) is None


def test_a_call_is_read_with_its_arguments():
    """Number, six arguments, stack pointer and program counter."""
    call = parse_call("230 0x1 0x1 0x7ffd10 0x0 0x0 0x8 0x7ffd00 0x7f22\n")
    assert call == SystemCall(230, (1, 1, 0x7FFD10, 0, 0, 8), 0x7FFD00)


READS = {
    "time.sleep": ("clock_nanosleep", (1, 1, 16), WaitTime(EndForm.AT, 90.5, 1)),
    "sleep of C": ("clock_nanosleep", (0, 0, 16), WaitTime(EndForm.AFTER, 90.5)),
    "by an unknown clock": ("clock_nanosleep", (2, 1, 16), WaitTime(EndForm.UNKNOWN)),
    "nanosleep": ("nanosleep", (16,), WaitTime(EndForm.AFTER, 90.5)),
    "a lock with a time": ("futex", (1, 0x189, 0, 16), WaitTime(EndForm.AT, 90.5, 0)),
    "by the monotonic clock": ("futex", (1, 0x89, 0, 16), WaitTime(EndForm.AT, 90.5, 1)),
    "the plain futex": ("futex", (1, 0x80, 2, 16), WaitTime(EndForm.AFTER, 90.5)),
    "a lock": ("futex", (1, 0x189, 0, 0), WaitTime(EndForm.NEVER)),
    "a lock that lends its priority": ("futex", (1, 6, 0, 16), WaitTime(EndForm.AT, 90.5, 0)),
    "waking others": ("futex", (1, 1, 0, 16), WaitTime(EndForm.UNKNOWN)),
    "several futexes": ("futex_waitv", (1, 2, 0, 16, 1), WaitTime(EndForm.AT, 90.5, 1)),
    "select": ("pselect6", (0, 0, 0, 0, 16), WaitTime(EndForm.AFTER, 90.5)),
    "select in microseconds": ("select", (0, 0, 0, 0, 32), WaitTime(EndForm.AFTER, 90.5)),
    "select for ever": ("pselect6", (0, 0, 0, 0, 0), WaitTime(EndForm.NEVER)),
    "poll": ("poll", (0, 0, 90500), WaitTime(EndForm.AFTER, 90.5)),
    "poll for ever": ("poll", (0, 1, 0xFFFFFFFF), WaitTime(EndForm.NEVER)),
    "epoll": ("epoll_wait", (3, 0, 1, 90500), WaitTime(EndForm.AFTER, 90.5)),
    "ppoll": ("ppoll", (0, 0, 16), WaitTime(EndForm.AFTER, 90.5)),
    "memory that is not there": ("clock_nanosleep", (1, 1, 99), WaitTime(EndForm.UNKNOWN)),
    "a call without a time": ("read", (3, 16, 1), WaitTime(EndForm.UNKNOWN)),
}


@pytest.mark.parametrize("name", READS)
def test_each_call_tells_its_end(name):
    """Absolute on the clock that it names, after a while, never, or unknown."""
    call, arguments, expected = READS[name]
    cells = memory(at_16=(90, 500_000_000), at_32=(90, 500_000))
    assert time_of(call, (*arguments, *(0,) * (6 - len(arguments))), cells) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "on"),
    [
        ("select", (0, 0, 0, 0, 16), On.SLEEP),
        ("pselect6", (1, 8, 0, 0, 16), On.POLL),
        ("poll", (0, 0, 100), On.SLEEP),
        ("ppoll", (8, 1, 16), On.POLL),
        ("epoll_wait", (3, 8, 1, 100), On.POLL),
    ],
)
def test_a_poll_for_nothing_is_a_sleep(name, arguments, on):
    """Python 3.10 sleeps so; a time-out on descriptors promises nothing."""
    assert of_call(name, On.POLL, arguments) is on


words = st.integers(0, 2**64 - 1)
cell = st.one_of(
    st.none(), st.binary(max_size=16), st.builds(struct.pack, st.just("=qq"), *[st.integers(-9, 2**40)] * 2)
)


@given(name=st.sampled_from([row[0] for row in calls_on("x86_64").values()]), data=st.data())
def test_no_memory_makes_it_fail_or_exceed_its_bounds(name, data):
    """Whatever arguments and memory hold: a time within bounds on a clock that there is, or none."""
    arguments = data.draw(st.tuples(*[words] * 6))
    held = data.draw(cell)
    found = time_of(name, arguments, lambda _at, _size: held)
    if found.told in (EndForm.AT, EndForm.AFTER):
        assert found.clock in CLOCKS
        assert 0 <= found.seconds <= 2**33


# -- one wait from look to look


def looked(follower, at_s, *, number=35, name="nanosleep", time=None, stack=7, switches=5, on=On.SLEEP, real_s=None):
    """What is known of the wait of a thread at a moment."""
    time = time or WaitTime(EndForm.AFTER, 90.0)
    return follower.note(
        SystemCall(number, (16, 0, 0, 0, 0, 0), stack),
        name,
        on,
        time,
        int(at_s * SECOND),
        switches=switches,
        now_s=lambda _clock: real_s,
    )


def test_a_relative_end_counts_from_the_first_look():
    """And the next wait that looks the same has its own: the thread has woken up meanwhile."""
    follower = WaitFollower()
    assert looked(follower, 10.0).end_ns == 100 * SECOND
    assert looked(follower, 60.0).end_ns == 100 * SECOND
    again = looked(follower, 101.0, switches=6)
    assert (again.end_ns, again.since_ns) == (191 * SECOND, 101 * SECOND)


def test_what_a_stop_has_interrupted_keeps_its_end():
    """SIGSTOP and SIGCONT: the kernel goes on with a call of its own, on the same stack."""
    follower = WaitFollower()
    looked(follower, 10.0)
    follower.forget()  # as it is stopped
    restart = {"number": 219, "name": "restart_syscall", "on": On.OTHER, "time": WaitTime(EndForm.UNKNOWN)}
    for at_s in (40.0, 41.0):
        wait = looked(follower, at_s, switches=6, **restart)
        assert (wait.on, wait.end_ns) == (On.SLEEP, 100 * SECOND)
    assert looked(follower, 50.0, switches=7, stack=8, **restart).end_ns is None


def test_an_interrupted_wait_that_began_unseen_is_not_known():
    """Its end would lie in the past, or nothing was seen of it."""
    restart = {"number": 219, "name": "restart_syscall", "on": On.OTHER, "time": WaitTime(EndForm.UNKNOWN)}
    follower = WaitFollower()
    assert looked(follower, 10.0, **restart).on is On.OTHER
    looked(follower, 20.0)
    follower.forget()
    assert looked(follower, 200.0, switches=9, **restart).end_ns is None


def test_an_absolute_end_is_told_on_the_monotonic_clock():
    """Whichever clock it is of; one that lies out of all bounds is unknown."""
    follower = WaitFollower()
    assert looked(follower, 10.0, time=WaitTime(EndForm.AT, 100.0, 1)).end_ns == 100 * SECOND
    assert looked(follower, 10.0, time=WaitTime(EndForm.AT, 5090.0, 0), real_s=5000.0).end_ns == 100 * SECOND
    assert looked(follower, 10.0, time=WaitTime(EndForm.AT, 5090.0, 0), real_s=None).end_ns is None
    assert looked(follower, 10.0, time=WaitTime(EndForm.AT, 2.0**33, 1)).end_ns is None


@given(st.lists(st.tuples(st.floats(0.1, 20.0), st.booleans()), min_size=1, max_size=30))
def test_the_end_of_one_wait_never_moves(looks):
    """However often it is looked at; only a wake-up begins another."""
    follower, at_s, switches, ends = WaitFollower(), 0.0, 0, {}
    for pause_s, wakes in looks:
        at_s += pause_s
        switches += wakes
        wait = looked(follower, at_s, switches=switches)
        ends.setdefault(switches, set()).add(wait.end_ns)
        assert wait.end_ns >= wait.since_ns + 90 * SECOND
    assert all(len(found) == 1 for found in ends.values())
