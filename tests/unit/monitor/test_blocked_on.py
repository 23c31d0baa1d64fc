"""What the threads of a real process are seen to wait for."""

import json
import subprocess
import sys
import time

import pytest

from resilience_sdk.hang.waits import On
from resilience_sdk.monitor.thread_waits import blocked_on

_WAITING = """
import ctypes, json, os, select, subprocess, sys, threading, time

def mutex():
    libc, held = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(held)
    libc.pthread_mutex_lock(held)

def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()

def semaphore():
    libc, given = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.sem_init(given, 0, 0)
    libc.sem_wait(given)

def pipe():
    os.read(os.pipe()[0], 1)

def poll():
    select.select([os.pipe()[0]], [], [])

def sleep():
    time.sleep(1000)

ways = [mutex, lock, semaphore, pipe, poll, sleep]
threads = [threading.Thread(target=way, name=way.__name__, daemon=True) for way in ways]
for thread in threads:
    thread.start()
print(json.dumps({thread.name: thread.native_id for thread in threads}), flush=True)
sys.stdin.read()
"""
_SEEN = {
    "mutex": On.MUTEX,
    "lock": On.LOCK,
    "semaphore": On.LOCK,
    "pipe": On.PIPE,
    "poll": On.POLL,
    "sleep": On.SLEEP if sys.version_info >= (3, 11) else On.POLL,  # older ones sleep in select()
}


@pytest.fixture(scope="module")
def waiting():
    """A process whose threads wait in all ways, with the number of each."""
    command = [sys.executable, "-c", _WAITING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process.pid, json.loads(process.stdout.readline())
        process.kill()


@pytest.mark.parametrize("way", _SEEN)
def test_each_way_to_wait_is_told_apart(waiting, way):
    """Above all a mutex of native code from Python's own locks, which look as a wait for a device does."""
    pid, threads = waiting
    until = time.monotonic() + 30.0
    while blocked_on(pid, threads[way]) is not _SEEN[way] and time.monotonic() < until:
        time.sleep(0.01)  # until the thread has come there
    assert blocked_on(pid, threads[way]) is _SEEN[way]
