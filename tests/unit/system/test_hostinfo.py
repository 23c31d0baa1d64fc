"""What the machine says about processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from resilience_sdk.system import hostinfo

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux")


def test_this_host_has_a_name() -> None:
    """The name is that of `uname -n`."""
    assert hostinfo.host_name() == os.uname().nodename


@linux
def test_this_process_is_known() -> None:
    """A running process has a state, a start, and is not gone."""
    pid = os.getpid()
    start = hostinfo.process_start_ticks(pid)
    assert start is not None
    assert start > 0
    assert hostinfo.process_state(pid) == "R"
    assert not hostinfo.process_is_gone(pid, start)
    assert hostinfo.boot_id()
    assert hostinfo.pid_namespace().startswith("pid:")


@linux
def test_a_command_with_parentheses_does_not_shift_the_fields() -> None:
    """The command in /proc/<pid>/stat is the user's text, blanks and parentheses included."""
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') R 1 (x y', 0, 0, 0); print('named', flush=True);"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        own = hostinfo.process_start_ticks(os.getpid())
        start = hostinfo.process_start_ticks(process.pid)
        assert own is not None
        assert start is not None
        assert start >= own
        assert hostinfo.process_state(process.pid) in ("R", "S")
        process.communicate(b"")


@linux
def test_zombies_and_reused_pids_are_gone() -> None:
    """Nothing runs in a zombie; the same pid with another start is another process."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # until it ends
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert hostinfo.process_state(process.pid) == "Z"
    assert hostinfo.process_is_gone(process.pid, None)
    process.communicate()
    assert hostinfo.process_state(process.pid) is None
    assert hostinfo.process_is_gone(process.pid, 1)
    assert hostinfo.process_is_gone(os.getpid(), 1)


def test_what_is_unknown_is_no_proof() -> None:
    """Pids that cannot exist, or processes of others, are not reported as gone without proof."""
    assert not hostinfo.process_is_gone(0, None)
    assert not hostinfo.process_is_gone(1, None)
    assert hostinfo.process_start_ticks(-1) is None
