"""What /proc says of real processes: asked by a person, asleep, gone."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from resilience_sdk.system import procfs
from resilience_sdk.system.hostinfo import process_state

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")


@pytest.fixture
def on_terminal():
    """Start Python code with a terminal of its own; return its pid."""
    started: list[tuple[int, int]] = []

    def start(code: str) -> int:
        master, slave = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        started.append((child.pid, master))
        children.append(child)
        return child.pid

    children: list[subprocess.Popen[bytes]] = []
    yield start
    for child in children:
        child.kill()
        child.wait()
    for _, master in started:
        os.close(master)


def becomes(predicate, seconds: float = 20.0) -> bool:
    """Wait for what another process does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if predicate():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("code", ["input('? ')", "import sys; sys.stdin.readline()", "breakpoint()\npass"])
def test_a_prompt_is_seen(on_terminal, code):
    """input(), a read of stdin, and a debugger's prompt, which waits in select() and not in read()."""
    pid = on_terminal(code)
    assert becomes(lambda: procfs.reads_terminal(pid))


def test_sleeping_on_a_terminal_is_no_prompt(on_terminal):
    """A hang of a program that was started from a shell stays a hang."""
    pid = on_terminal("import time\nopen('/proc/self/comm', 'w').write('asleep')\ntime.sleep(600)")
    assert becomes(lambda: "asleep" in _comm(pid) and process_state(pid) == "S")
    assert not procfs.reads_terminal(pid)


def test_reading_something_else_is_no_prompt():
    """A rank whose stdin is a pipe or nothing waits for no person."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert becomes(lambda: process_state(child.pid) == "S")
        assert not procfs.reads_terminal(child.pid)
    finally:
        child.kill()
        child.communicate()


def test_stopped_and_traced_are_two_things():
    """SIGSTOP is no debugger."""
    child = subprocess.Popen(["sleep", "600"])
    try:
        child.send_signal(signal.SIGSTOP)
        assert becomes(lambda: process_state(child.pid) == "T")
        assert not procfs.is_traced(child.pid)
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone():
    """No answer is no failure."""
    child = subprocess.Popen(["true"])
    child.wait()
    assert not procfs.is_traced(child.pid)
    assert not procfs.reads_terminal(child.pid)
    assert process_state(child.pid) is None


def _comm(pid: int) -> str:
    with open(f"/proc/{pid}/comm") as file:
        return file.read()
