"""Processes of probes that cannot be killed."""

import os
import signal
from pathlib import Path

import attrs
import pytest

from resilience_sdk.health import runner
from resilience_sdk.health.findings import Status
from resilience_sdk.health.probes import STORAGE, Context
from resilience_sdk.health.runner import run_probes


def children():
    """Return the processes that this one has started."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.fixture
def unkillable(monkeypatch):
    """What the runner kills stops instead, and stays; as a process does that waits for a dead mount."""
    monkeypatch.setattr(runner.os, "killpg", lambda pid, _: os.kill(pid, signal.SIGSTOP))
    monkeypatch.setattr(runner, "_KILL_GRACE_S", 0.02)
    yield
    monkeypatch.undo()
    for look in runner._left:
        look.process.kill()
        look.process.wait()


def test_a_process_that_cannot_be_killed_is_not_followed_by_another(tmp_path, unkillable):
    """However often it is looked: each look would leave one more; other probes are started as ever."""
    pipe = tmp_path / "pipe"  # opening it waits for a writer
    os.mkfifo(pipe)
    hanging = attrs.evolve(STORAGE, only=str(pipe), deadline_s=0.1)
    before = children()
    (first,) = run_probes([hanging], Context())
    (stuck,) = children() - before
    (again,) = run_probes([hanging], Context())
    assert children() - before == {stuck}
    assert (again.check, again.subject, again.status) == (first.check, first.subject, Status.FAILED)
    assert f"process {stuck}" in again.evidence
    file = tmp_path / "file"
    file.write_text("data")
    assert run_probes([attrs.evolve(STORAGE, only=str(file))], Context())[0].status is Status.OK
    os.kill(int(stuck), signal.SIGKILL)
    runner._left[0].process.wait(20)
    (after,) = run_probes([hanging], Context())
    assert "no answer within" in after.evidence
