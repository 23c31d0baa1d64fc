"""What a fork must not take along: locks that another thread of the parent holds at that moment."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from resilience_sdk.core import console, job_config
from resilience_sdk.monitor import spawn
from resilience_sdk.rank import lifecycle
from resilience_sdk.system.file_lock import file_lock


@contextmanager
def held_by_another_thread(lock) -> Iterator[None]:
    """Have a thread take `lock`, and give it back at the end."""
    taken, give_back = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            give_back.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    try:
        yield
    finally:
        give_back.set()
        thread.join()


def exit_code_of_child(action: Callable[[], object]) -> int:
    """Fork, and return 0 if `action` comes to its end in the child."""
    gc.collect()  # what torch left of other tests has threads, which the child would not have: it dies of collecting it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tried here
        pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_can_speak_and_start(capfd):
    """A fork while the helper thread says something, or while another thread starts the session, blocks nobody."""
    with held_by_another_thread(console._lock):
        assert exit_code_of_child(lambda: console.say_once("fork-test", "said by the child")) == 0
    with held_by_another_thread(lifecycle._lock):
        assert exit_code_of_child(lambda: lifecycle._lock.__enter__()) == 0
    assert "said by the child" in capfd.readouterr().err


@pytest.mark.parametrize("where", ["spawn", "agree"])
def test_a_worker_forked_under_a_file_lock_does_not_keep_it(tmp_path, monkeypatch, where):
    """A DataLoader worker that is forked while the monitor is started must not keep all others from starting one."""
    children: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            time.sleep(30)
            os._exit(0)
        children.append(pid)

    try:
        if where == "spawn":
            with file_lock(tmp_path / "spawn.lock") as mine:
                assert mine
                fork()
            assert spawn.is_unlocked(tmp_path / "spawn.lock")
        else:
            monkeypatch.setattr(job_config, "read", lambda _pages: fork())
            proposal = job_config.JobConfig("job", "run", True, {}, "report", "t.py", None, None, 1, 1, 1, 1)
            assert job_config.agree(tmp_path, proposal) is proposal
            assert spawn.is_unlocked(tmp_path / "config.lock")
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
