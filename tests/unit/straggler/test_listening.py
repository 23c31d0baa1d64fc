"""The thread that calls whoever listens, and a report that cannot be read."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time

import pytest

from resilience_sdk.straggler import published
from resilience_sdk.straggler.callbacks import Listening
from resilience_sdk.straggler.published import StandingVerdicts, write_report, write_standing
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import Change, SlowVerdict

VERDICT = SlowVerdict("transient", "bwd", "compute", "", (2,), ("n0",), False, 17, 32, ratio=2.0)


def publish(run_dir, newest):
    write_standing(
        run_dir, StandingVerdicts(0, 1.0, changes=tuple(Change("found", VERDICT, n) for n in range(1, newest + 1)))
    )


@pytest.fixture
def listening(tmp_path):
    listening = Listening()
    listening.begin(tmp_path, 0)
    yield listening
    listening.close(30)


def test_a_listener_that_takes_its_time_holds_nobody_up(tmp_path, listening):
    """It is called on a thread of its own; meanwhile the training reads reports, registers more, and ends."""
    entered, may_end = threading.Event(), threading.Event()

    def slow(change):
        entered.set()
        may_end.wait(60)

    assert listening._thread is None  # nobody listens
    listening.add_listener(slow)
    publish(tmp_path, 1)
    assert entered.wait(60)
    began = time.monotonic()
    write_report(tmp_path, Report({0: "new"}))
    assert listening.report().nodes == {0: "new"}
    listening.add_listener(print)
    listening.close(0.05)
    assert time.monotonic() - began < 30
    may_end.set()


def test_what_comes_while_a_listener_is_busy_is_told_afterwards(tmp_path, listening, monkeypatch):
    """Each change once, in order."""
    monkeypatch.setattr("resilience_sdk.straggler.callbacks._PERIOD_S", 0.01)
    entered, may_go_on, heard, all_heard = threading.Event(), threading.Event(), [], threading.Event()

    def slow(change):
        heard.append(change.verdict)
        entered.set()
        may_go_on.wait(60)
        if len(heard) == 3:
            all_heard.set()

    listening.add_listener(slow)
    publish(tmp_path, 1)
    assert entered.wait(60)
    publish(tmp_path, 3)
    may_go_on.set()
    assert all_heard.wait(60)
    assert len(heard) == 3


def test_a_listener_that_leaves_the_process_is_left_out(tmp_path, listening, monkeypatch, capfd):
    """`sys.exit()`, or `preemption.exit()`: it ended our thread without a word. The others are told."""
    monkeypatch.setattr("resilience_sdk.straggler.callbacks._PERIOD_S", 0.01)
    told = threading.Event()
    listening.add_listener(lambda change: sys.exit(75))
    listening.add_listener(lambda change: told.set())
    publish(tmp_path, 1)
    assert told.wait(60)
    assert "failed and is left out: SystemExit: 75" in capfd.readouterr().err


def test_a_process_without_another_thread_is_told_so_and_goes_on(tmp_path, monkeypatch, capsys):
    """Registration never raises into the training."""

    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    listening = Listening()
    listening.begin(tmp_path, 0)
    listening.add_listener(print)
    assert "can't start new thread" in capsys.readouterr().err


def test_a_forked_child_may_ask_for_the_report(tmp_path, listening):
    """Another thread of the parent held the lock when it was forked."""
    write_report(tmp_path, Report({0: "new"}))
    with listening._lock:
        child = os.fork()
        if child == 0:
            try:
                listening.orphan()
                os._exit(0 if listening.report().nodes == {0: "new"} else 3)
            finally:
                os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("fails", ["fstat", "read"])
def test_a_report_that_is_replaced_while_it_is_read_raises_nothing(tmp_path, listening, monkeypatch, fails):
    """On NFS the file of another host's monitor may be gone between open and read: the training loop asks for it."""

    class Stale:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            self._file.__enter__()
            return self

        def __exit__(self, *exception):
            self._file.__exit__(*exception)

        def read(self, *_):
            raise OSError(errno.ESTALE, "Stale file handle")

    def open_stale(*args, **how):
        return Stale(open(*args, **how))

    def stale(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    write_report(tmp_path, Report({0: "new"}))
    with monkeypatch.context() as patched:
        if fails == "read":
            patched.setattr(published, "open", open_stale, raising=False)
        else:
            patched.setattr(os, "fstat", stale)
        assert listening.report() is None
    write_report(tmp_path, Report({0: "newer"}))
    assert listening.report().nodes == {0: "newer"}
