"""The place into which a save that stalls writes: its path, and whether it answers."""

import os
import subprocess
import sys
import time

import pytest

from resilience_sdk.monitor.save_storage import SaveStorage, path_of, storage_words

_OPEN = "import os, sys; os.chdir(sys.argv[1]); print(flush=True); open(sys.argv[2], 'wb')"
_WRITE = "import os, sys; fd = os.open(sys.argv[2], os.O_RDWR); print(flush=True); os.write(fd, bytes(1 << 20))"


def waited_for(found, wanted):
    """What `found` returns once that is `wanted`, or after a while."""
    until = time.monotonic() + 30.0
    while not wanted(value := found()) and time.monotonic() < until:
        time.sleep(0.01)
    return value


@pytest.mark.parametrize(
    ("program", "name"), [(_OPEN, "in here.pt"), (_OPEN, "{}/in here.pt"), (_WRITE, "{}/in here.pt")]
)
def test_the_file_of_a_blocked_call_is_found(tmp_path, program, name):
    """A FIFO that nobody reads, opened by a relative and by an absolute name; and one that is full."""
    fifo = tmp_path / "in here.pt"
    os.mkfifo(fifo)
    command = [sys.executable, "-S", "-c", program, str(tmp_path), name.format(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert waited_for(lambda: path_of(process.pid, [process.pid]), bool) == str(fifo)
            storage = SaveStorage()
            storage.ask(3, process.pid, [process.pid])
            words = waited_for(lambda: storage.words(3), lambda text: "small write takes" in text)
            assert words.startswith(f"{fifo} (a FIFO, which nobody reads or feeds, ")
            assert ", beside which a small write takes 0." in words
            storage.forget()
            assert storage.words(3) is None
        finally:
            process.kill()
    assert os.listdir(tmp_path) == [fifo.name]


def test_who_is_in_no_call_on_a_file_saves_nowhere():
    """This very thread."""
    assert path_of(os.getpid(), [os.getpid()]) is None
    assert path_of(2**22 - 1, [2**22 - 1]) is None


@pytest.mark.parametrize(
    ("answers", "asked_s", "end"),
    [
        ("", 0.2, ")"),
        ("", 9.0, ", whose directory has not answered for 9 s"),
        ("file none\nstat 0.001\n", 9.0, ", whose directory answers, and has taken no small write for 9 s"),
        ("stat 0.001\nwrite 0.0512\n", 9.0, ", beside which a small write takes 0.05 s"),
        (
            "stat 0.001\nerror No space left on device\n",
            9.0,
            ", beside which a small write fails: No space left on device",
        ),
        ("write x\n", 9.0, ", beside which a small write takes an unknown time"),
    ],
)
def test_what_has_answered_is_said_and_what_has_not(answers, asked_s, end):
    """Line by line, as the program that tries it comes to say it."""
    words = storage_words("/proc/a\n.pt", answers, asked_s)
    assert words.endswith(end)
    assert "proc on /proc" in words
    assert "\n" not in words
