"""What the watch over a node takes from before it, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import attrs
import pytest

from resilience_sdk.events import Event
from resilience_sdk.health import runner, watch
from resilience_sdk.health.probes import STORAGE, Context
from resilience_sdk.health.runner import run_probes
from resilience_sdk.hostinfo import host_name
from resilience_sdk.journal import Journal, read_journal


def _journal(tmp_path, writer="health", host=None, job="job"):
    return Journal(tmp_path / "journal", writer=writer, host=host or host_name(), boot_id="", job=job)


def test_a_watch_reads_what_those_before_it_have_told_in_this_job(tmp_path):
    """Nothing of another job, node or writer, and nothing of the same job's time before it was requeued."""
    (tmp_path / "journal").mkdir()
    _journal(tmp_path).emit(Event.HEALTH, what="before")
    since = time.time()
    _journal(tmp_path).emit(Event.HEALTH, what="this")
    _journal(tmp_path, writer="launcher").emit(Event.HEALTH, what="of a preflight")
    _journal(tmp_path, host="elsewhere").emit(Event.HEALTH, what="elsewhere")
    _journal(tmp_path, job="other").emit(Event.HEALTH, what="of another job")
    task = watch.Task(run_dir=tmp_path, job="job", interval_s=1.0, parent_pid=os.getpid(), since=since)
    assert [event["what"] for event in watch._told_before(task)] == ["this"]


def test_the_probes_are_told_which_gpus_are_the_jobs_and_nothing_else(monkeypatch):
    """On a shared node the others are somebody else's."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    task = watch.Task(run_dir=".", job="job", interval_s=1.0, parent_pid=os.getpid())
    assert watch._Rounds(task, None)._environment == {"CUDA_VISIBLE_DEVICES": "1,3"}


def test_a_job_that_is_over_at_once_is_not_watched(tmp_path):
    """Both lines are in the pipe before the first is read."""
    (tmp_path / "journal").mkdir()
    task = {"run_dir": str(tmp_path), "job": "job", "interval_s": 600.0, "parent_pid": os.getpid()}
    command = [sys.executable, "-m", "resilience_sdk.health.watch"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
    try:
        process.stdin.write(json.dumps(task).encode() + b"\nover\n")
        assert process.wait(30) == 0
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


@pytest.fixture
def hanging(tmp_path):
    """A probe that waits for a writer of a pipe for ever."""
    os.mkfifo(tmp_path / "pipe")
    return attrs.evolve(STORAGE, only=str(tmp_path / "pipe"), deadline_s=0.1)


def test_what_the_watch_kills_at_its_end_has_not_failed(tmp_path, hanging, monkeypatch):
    """It ends while a probe runs, or listens: the journal of a sound job must not say that the driver was killed."""
    (tmp_path / "journal").mkdir()
    journal = _journal(tmp_path)
    rounds = watch._Rounds(watch.Task(run_dir=tmp_path, job="job", interval_s=1.0, parent_pid=os.getpid()), journal)
    gone = threading.Event()
    monkeypatch.setattr(watch.os, "_exit", lambda _: gone.set())
    probe = attrs.evolve(hanging, name="gpu", deadline_s=60.0)
    look = threading.Thread(target=lambda: rounds._take(run_probes([probe], Context()), 0.0))
    look.start()
    try:
        while not runner._running:
            assert look.is_alive()
        watch._end()
        assert gone.is_set()
        look.join(30)
        assert not look.is_alive()
    finally:
        watch._over.clear()
    assert read_journal(tmp_path / "journal").events == ()


def test_what_dies_late_is_collected_while_the_watch_rests(hanging, monkeypatch):
    """No zombie stands until the next look, which may be a quarter of an hour away."""
    with monkeypatch.context() as patched:
        patched.setattr(runner.os, "killpg", lambda pid, _: os.kill(pid, signal.SIGSTOP))
        patched.setattr(runner, "_KILL_GRACE_S", 0.02)
        run_probes([hanging], Context())
    process = runner._left[-1].process
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie by now
    watch._rest(0.05)
    assert process.returncode is not None
    assert not runner._left


_ENDED = """
import os, threading, time
from resilience_sdk.health import runner, watch
from resilience_sdk.health.probes import STORAGE, Context
import attrs, sys

def end():
    while not runner._running:
        time.sleep(0.01)
    (process,) = runner._running
    leave = os._exit
    os._exit = lambda _: leave(os.path.exists(f"/proc/{process.pid}"))
    watch._end()

threading.Thread(target=end, daemon=True).start()
runner.run_probes([attrs.evolve(STORAGE, only=sys.argv[1], deadline_s=60.0)], Context())
"""


def test_a_watch_that_ends_leaves_no_process_to_others(hanging):
    """In a container they would be the training's, whose first process may collect nobody."""
    subprocess.run([sys.executable, "-c", _ENDED, hanging.only], timeout=60, check=True)
