"""The line that tells what a command is at: on a terminal only, after a while only, and gone at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from resilience_sdk.core import console

_WORKS = """
import sys
from resilience_sdk.core import console
console._progress = console.ProgressLine(after_s=float(sys.argv[1]))
with console.progress("reading"):
    console.doing("reading \\x1b[31mfile", 3, 4000)
    sys.stdin.readline()
    {then}
    sys.stdin.readline()
"""


@pytest.fixture
def works():
    """Starts a process that works until its input has a line, does `then`, and waits for another one."""
    started = []

    def start(after_s: float, then: str = "console.hide_progress()", term: str = "xterm"):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**os.environ, "TERM": term, "PYTHONPATH": str(Path(__file__).parents[3])}
        command = [sys.executable, "-c", _WORKS.format(then=then), str(after_s)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs, env=env)
        os.close(theirs)
        started.append((process, ours))
        return process, ours

    yield start
    for process, ours in started:
        process.kill()
        process.communicate()
        os.close(ours)


def read_until(fd: int, wanted: bytes) -> bytes:
    """What the terminal got, up to these bytes."""
    got = b""
    until = time.monotonic() + 30
    while wanted not in got:
        assert time.monotonic() < until, got
        got += os.read(fd, 4096)
    return got


def rest(process, fd: int) -> bytes:
    """What the terminal got until the process was over."""
    process.communicate(b"\n\n")
    got = b""
    try:
        while data := os.read(fd, 4096):
            got += data
    except OSError:
        pass  # its other end is closed
    return got


def test_it_tells_how_far_the_work_is_and_goes(works):
    """The line is taken away before anything else is written; what a job says does not steer the terminal."""
    process, screen = works(0.05)
    assert b"\r\x1b[Kresilience: reading \xef\xbf\xbd[31mfile 3 of 4,000, " in read_until(screen, b"4,000, 0 s")
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert rest(process, screen).endswith(b"\r\x1b[K")


def test_a_line_that_is_said_meanwhile_has_its_own_place(works):
    """It begins where the progress was, and the progress goes on below it."""
    process, screen = works(0.05, then="console.say('a word')")
    read_until(screen, b" s")
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert read_until(screen, b"a word\r\n").endswith(b"\r\x1b[Kresilience: a word\r\n")
    read_until(screen, b"4,000")
    assert rest(process, screen).endswith(b"\r\x1b[K")


@pytest.mark.parametrize(("after_s", "term"), [(30.0, "xterm"), (0.0, "dumb")])
def test_a_quick_command_and_a_dumb_terminal_show_nothing(works, after_s, term):
    """Nothing is written at all."""
    process, screen = works(after_s, term=term)
    assert rest(process, screen) == b""


def test_without_a_terminal_it_costs_nothing():
    """No thread is started, and whoever works may tell as often as he likes."""
    line = console.ProgressLine(after_s=0.0)
    line.start("reading")
    assert line._thread is None
    line.stop()
    console.doing("anything", 1, 2)
