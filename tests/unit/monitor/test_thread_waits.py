"""When the waits of real threads end by themselves, read from outside."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from resilience_sdk.hang.waits import On
from resilience_sdk.monitor.thread_waits import ThreadWaits, read_memory

FOR_S = 90.0
_WAITING = """
import asyncio, ctypes, json, os, queue, select, socket, sys, threading, time

held = threading.Lock()
held.acquire()
mine, theirs = socket.socketpair()
libc = ctypes.CDLL(None)

def receive():
    mine.settimeout(FOR)
    mine.recv(1)

def relative():
    libc.syscall(35, ctypes.byref((ctypes.c_longlong * 2)(int(FOR), 0)), None)

WAYS = {
    "sleep": lambda: time.sleep(FOR),
    "sleep of C": lambda: libc.sleep(int(FOR)),
    "select": lambda: select.select([], [], [], FOR),
    "poll": lambda: select.poll().poll(FOR * 1000),
    "lock": lambda: held.acquire(timeout=FOR),
    "event": lambda: threading.Event().wait(FOR),
    "condition": lambda: [wait for condition in [threading.Condition()] for wait in [condition.acquire(),
                          condition.wait(FOR)]],
    "queue": lambda: queue.Queue().get(timeout=FOR),
    "asyncio": lambda: asyncio.run(asyncio.sleep(FOR)),
    "socket": receive,
    "lock for ever": held.acquire,
    "asyncio for ever": lambda: asyncio.run(asyncio.Event().wait()),
    "select for ever": lambda: select.select([], [], []),
}
threads = [threading.Thread(target=way, name=name, daemon=True) for name, way in WAYS.items()]
for thread in threads:
    thread.start()
print(json.dumps({thread.name: thread.native_id for thread in threads}), flush=True)
sys.stdin.read()
""".replace("FOR", "90.0")
ENDS = {
    "sleep": On.SLEEP,
    "sleep of C": On.SLEEP,
    "select": On.SLEEP,
    "poll": On.SLEEP,
    "lock": On.LOCK,
    "event": On.LOCK,
    "condition": On.LOCK,
    "queue": On.LOCK,
    "asyncio": On.POLL,
}
NEVER = {"lock for ever": On.LOCK, "asyncio for ever": On.POLL, "select for ever": On.SLEEP}


@pytest.fixture(scope="module")
def waiting():
    """A process whose threads wait in all ways: its number, the threads by name, and when it began."""
    began = time.monotonic()
    command = [sys.executable, "-c", _WAITING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process.pid, json.loads(process.stdout.readline()), began
        process.kill()


def wait_of(pid, thread, on):
    """What a thread waits in, once it has come there."""
    waits, until = ThreadWaits(pid), time.monotonic() + 30.0
    while (wait := waits.look(thread)).on is not on and time.monotonic() < until:
        time.sleep(0.01)
    return wait


@pytest.mark.parametrize("way", ENDS)
def test_a_wait_with_a_time_ends_when_that_is_over(waiting, way):
    """Whatever call and clock it is told by; a relative one counts from when it was first seen."""
    pid, threads, began = waiting
    wait = wait_of(pid, threads[way], ENDS[way])
    assert wait.on is ENDS[way]
    assert began + FOR_S <= wait.end_ns / 1e9 <= time.monotonic() + FOR_S + 0.1
    assert wait.polls_one is (way == "asyncio")


@pytest.mark.parametrize("way", NEVER)
def test_a_wait_without_a_time_has_no_end(waiting, way):
    """And a loop of asyncio that waits for nobody is told from one that has descriptors."""
    pid, threads, _ = waiting
    wait = wait_of(pid, threads[way], NEVER[way])
    assert (wait.on, wait.end_ns) == (NEVER[way], None)


def test_a_time_out_on_a_descriptor_is_none_of_these(waiting):
    """`settimeout(90)` polls for a socket."""
    pid, threads, _ = waiting
    assert wait_of(pid, threads["socket"], On.POLL).polls_one is False


@pytest.mark.parametrize("program", ["time.sleep(90)", "ctypes.CDLL(None).sleep(90)"])
def test_a_sleep_that_was_stopped_and_goes_on_keeps_its_end(program):
    """The kernel continues a relative one in a call of its own, which says nothing of the end."""
    command = [sys.executable, "-c", f"import ctypes, sys, time; print(flush=True); {program}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            waits, pid = ThreadWaits(process.pid), process.pid
            until = time.monotonic() + 30.0
            while waits.look(pid).on is not On.SLEEP and time.monotonic() < until:
                time.sleep(0.01)
            end_ns = waits.look(pid).end_ns
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
            waits.look(pid)
            os.kill(pid, signal.SIGCONT)
            os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)
            until = time.monotonic() + 10.0
            while (wait := waits.look(pid)).on is not On.SLEEP and time.monotonic() < until:
                time.sleep(0.01)
            assert wait.on is On.SLEEP
            assert wait.end_ns == pytest.approx(end_ns, abs=1000)  # seconds of a clock are rounded to nanoseconds
        finally:
            process.kill()


def test_memory_that_cannot_be_read_is_nothing():
    """Of a process that is gone, at no address, and beyond all addresses."""
    assert read_memory(os.getpid(), 0, 16) is None
    assert read_memory(os.getpid(), 2**63, 16) is None
    assert read_memory(2**22 - 1, 4096, 16) is None
    assert ThreadWaits(2**22 - 1).look(2**22 - 1).on is On.OTHER
