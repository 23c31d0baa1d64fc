"""What a person reads fits the terminal, and what is to be copied stays in one piece."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

SAYING = """
from resilience_sdk import console
console.say("the job was asked to leave by a signal to the launcher; all ranks stopped after 40 steps, 0 steps lost")
console.say("to resume: resilience run --run-dir runs/exp1 --nproc-per-node 8 train.py --config big.yaml", wrap=False)
console.say("  report: /a/path/of/more/than/sixty/characters/which/nobody/breaks/in/two/report.md")
"""


def on_terminal(columns: int) -> list[str]:
    """Return what a process says whose standard error is a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    subprocess.run([sys.executable, "-c", SAYING], stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    data = b""
    while chunk := _read(ours):
        data += chunk
    os.close(ours)
    return data.decode().replace("\r\n", "\n").splitlines()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:  # nobody has the other end any more
        return b""


def test_a_long_line_is_wrapped_between_words_and_a_command_or_a_path_never():
    """At 60 columns, each part with the prefix, what follows indented."""
    lines = on_terminal(60)
    assert lines[:3] == [
        "resilience: the job was asked to leave by a signal to the",
        "resilience:   launcher; all ranks stopped after 40 steps, 0",
        "resilience:   steps lost",
    ]
    assert lines[3].endswith("--nproc-per-node 8 train.py --config big.yaml")
    assert [line.split()[-1] for line in lines[4:]][-1].endswith("/in/two/report.md")


def test_a_line_stays_one_where_there_is_room_or_no_sense_in_wrapping():
    """A wide terminal, and one that is too narrow for anything."""
    assert len(on_terminal(200)) == len(on_terminal(20)) == 3


def test_a_log_has_a_message_in_one_line():
    """Nothing is wrapped where no terminal reads it: programs search it."""
    done = subprocess.run([sys.executable, "-c", SAYING], stderr=subprocess.PIPE, text=True, check=True, timeout=60)
    assert len(done.stderr.splitlines()) == 3
