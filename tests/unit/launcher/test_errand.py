"""A program's answer arrives whatever else is written, and whoever else holds its pipes."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from resilience_sdk.launcher.signals import LeaveRequested, SignalInbox
from resilience_sdk.launcher.task_programs import answer_of
from resilience_sdk.system.programs import Program

HEAD = "from resilience_sdk.health.checkup import read_task, tell; task = read_task(); "
LONG_S = 60.0


@pytest.fixture
def ask():
    """Give a program a task and return its answer."""
    with SignalInbox(["SIGTERM"]) as inbox:
        yield lambda program, task=None, longest_s=LONG_S: answer_of(Program(program), task or {}, inbox, longest_s)


def wait_until_gone(pid):
    """Wait until a process has ended."""
    until = time.monotonic() + LONG_S
    with contextlib.suppress(OSError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z":
            assert time.monotonic() < until
            time.sleep(0.01)


def test_what_libraries_print_is_no_part_of_the_answer(ask, capfd):
    """NCCL writes to the descriptor of standard output; people see it on standard error."""
    assert ask(HEAD + "os.write(1, b'NCCL INFO Bootstrap'); tell(task, {'told': task['it']})", {"it": 7}) == {"told": 7}
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "NCCL INFO Bootstrap")


@pytest.mark.parametrize("own_session", [False, True])
def test_who_lives_longer_does_not_hold_up_the_answer(ask, own_session):
    """A process of a trial that cannot be killed holds all that it has inherited."""
    pause = f"({own_session} and os.setsid(), __import__('signal').pause())"
    began = time.monotonic()
    pid = ask(HEAD + f"pid = os.fork(); pid or {pause}; tell(task, {{'pid': pid}})")["pid"]
    assert time.monotonic() - began < LONG_S / 2
    if own_session:
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)


def test_a_long_answer_to_a_long_task(ask):
    """Longer than any pipe."""
    text = "x" * 3_000_000
    assert ask(HEAD + "tell(task, {'back': task['text']})", {"text": text}) == {"back": text}


@pytest.mark.parametrize(
    ("program", "longest_s", "told"),
    [
        ("sys.exit(3)", LONG_S, "left with 3 and without an answer"),
        (HEAD + "os.write(task['answer'], b'{\"half\": '); os._exit(0)", LONG_S, "left with 0 and without an answer"),
        ("pid = os.fork(); pid or __import__('signal').pause(); os.kill(os.getpid(), 9)", LONG_S, "died by signal 9"),
        ("__import__('signal').pause()", 0.1, "has not answered in time"),
    ],
)
def test_a_program_without_an_answer(ask, program, longest_s, told):
    """Nobody waits for one that is gone, nor for ever."""
    with pytest.raises(ValueError, match=told):
        ask(program, longest_s=longest_s)


def test_where_python_knows_less_of_the_system(ask, monkeypatch, tmp_path):
    """macOS, and builds against an old C library: the task lies in a file that never has a name for others."""
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "waitid")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert ask(HEAD + "tell(task, {'told': task['it']})", {"it": 7}) == {"told": 7}
    with pytest.raises(ValueError, match="left with 3 and without"):
        ask("sys.exit(3)")
    with pytest.raises(ValueError, match="died by signal 9"):
        ask("os.kill(os.getpid(), 9)")
    assert not list(tmp_path.iterdir())


def test_a_signal_ends_it(ask):
    """As a person or a scheduler asked to leave."""
    with pytest.raises(LeaveRequested):
        ask("os.kill(os.getppid(), 15); __import__('signal').pause()")
