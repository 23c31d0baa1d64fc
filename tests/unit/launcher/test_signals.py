"""The launcher's inbox takes every signal that the settings allow."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from resilience_sdk.core.early_signals import has_terminal
from resilience_sdk.launcher.signals import LeaveRequested, SignalInbox


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="the platform has no real-time signals")
def test_a_real_time_signal_without_a_name_is_a_request() -> None:
    """Python has no name for it; it is noted like any other, and is no person's."""
    number = signal.SIGRTMIN + 5
    with SignalInbox(["SIGTERM", f"SIGRTMAX{number - signal.SIGRTMAX}"]) as inbox:
        os.kill(os.getpid(), number)
        assert inbox.request == number
        assert not inbox.interrupted


def test_only_what_may_be_lost_holds_a_signal_back() -> None:
    """It raises within `raising`, is noted within `noting`, and what was swallowed is raised before ranks start."""
    with SignalInbox(["SIGTERM"]) as inbox, contextlib.suppress(LeaveRequested), inbox.raising():
        with inbox.noting():
            signal.raise_signal(signal.SIGTERM)
            assert inbox.request == signal.SIGTERM
        with pytest.raises(LeaveRequested), inbox.raising():
            raise AssertionError("it came before")
    with SignalInbox(["SIGTERM"]) as inbox:
        with inbox.raising():
            with contextlib.suppress(BaseException):  # as an import may do that tries what there is
                signal.raise_signal(signal.SIGTERM)
            with pytest.raises(LeaveRequested):
                inbox.only_note()
        inbox.settle()
        inbox.only_note()


def test_a_hang_up_is_a_persons_where_there_is_a_terminal_and_a_notice_where_it_was_named_one() -> None:
    """A scheduler sends it too; it ends a job for good only where a terminal was closed."""
    for notices, terminal in (((), has_terminal()), (("SIGHUP",), False)):
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with SignalInbox(["SIGHUP"], notices=notices) as inbox:
            signal.raise_signal(signal.SIGHUP)
            assert (inbox.interrupted, inbox.interrupts) == (terminal, int(terminal))
        signal.signal(signal.SIGHUP, before)


def test_what_is_ignored_stays_so_when_elastic_has_taken_it() -> None:
    """Under nohup a terminal that is closed ends nothing, also once ranks were started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with SignalInbox(["SIGTERM", "SIGHUP"]) as inbox:
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # as elastic does with its own
        inbox.retake()
        signal.raise_signal(signal.SIGHUP)
        assert inbox.request is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


STUCK = """
from resilience_sdk.launcher.signals import SignalInbox
with SignalInbox(["SIGTERM", "SIGUSR1"]) as inbox, inbox.raising(ends_process=True):
    inbox.last_words = lambda: print("last words", flush=True)
    while True:
        try:
            print("ready", flush=True)
            input()
        except BaseException:
            pass
"""


def test_a_launcher_that_swallows_the_request_is_ended_all_the_same() -> None:
    """Before there are ranks nothing can be lost: it has 3 s to come back, then its process ends with 75."""
    with subprocess.Popen(
        [sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(30) == 75
        assert process.stdout.read() == b"ready\nlast words\n"
        assert b"SIGUSR1: left before its ranks started; nothing is lost (exit code 75)" in process.stderr.read()
