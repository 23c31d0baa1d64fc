"""`@resilient`: heartbeats of a train step, and leaving when the job is asked to."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import resilience_sdk
from resilience_sdk import preemption, straggler
from resilience_sdk.errors import ConfigError
from resilience_sdk.rank.run import Run

PROJECT = Path(__file__).parent.parent.parent.parent


def test_each_call_is_a_heartbeat(recording):
    """What the function opens is inside it, its result and its name stay."""

    @resilience_sdk.resilient
    def train_step(batch, *, scale=1):
        with straggler.section("fwd"):
            assert recording.stack() == ["step", "fwd"]
        return batch * scale

    assert [train_step(number, scale=2) for number in range(3)] == [0, 2, 4]
    assert recording.snapshot().beats == 3
    assert train_step.__name__ == "train_step"
    assert recording.stack() == []


def test_a_coroutine_function_stays_one(recording):
    """The whole awaited time is the step."""

    @resilience_sdk.resilient
    async def train_step():
        await asyncio.sleep(0)
        return recording.stack()

    assert asyncio.run(train_step()) == ["step"]
    assert recording.snapshot().beats == 1


def test_an_exception_passes(recording):
    """It is the user's, and nothing stays open."""

    @resilience_sdk.resilient
    def train_step():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        train_step()
    assert recording.stack() == []


def test_inside_run_steps_nothing_is_added(recording, monkeypatch):
    """There the run beats and checks: it saves before it leaves. Before and after the loop the step does."""
    checks = []
    monkeypatch.setattr(preemption, "check", lambda step=None: checks.append(step) or False)

    @resilience_sdk.resilient
    def train_step():
        return recording.stack()

    with Run(None, None) as run:
        stacks = [train_step() for _ in run.steps("abc")]
        assert stacks == [["step"]] * 3
        assert recording.snapshot().beats == 3
        assert checks == [1, 2, 3]
        for _ in run.steps("ab"):
            break
        train_step()
    train_step()
    assert recording.snapshot().beats == 5 + 1
    assert checks == [1, 2, 3, None, None]


def test_what_is_no_function_is_refused():
    """A generator's body does not run while it is called, and a number not at all."""
    with pytest.raises(ConfigError, match="goes on the function"):
        resilience_sdk.resilient(5)

    def train_steps():
        yield

    with pytest.raises(TypeError, match="is a generator"):
        resilience_sdk.resilient(train_steps)


LOOP = """
import os, signal
import resilience_sdk
from resilience_sdk import heartbeat

done = 0

@resilience_sdk.resilient
def train_step():
    global done
    if done == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    done += 1

try:
    while True:
        train_step()
except resilience_sdk.Preempted:
    print("saved", done > 3)
    raise
"""


def test_asked_to_leave_it_ends_behind_a_whole_step(tmp_path):
    """A real signal: `Preempted` passes the loop, which can save, and the process ends with 75."""
    pages = tmp_path / "pages"
    pages.mkdir(mode=0o700)
    own = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), "RESILIENCE_PAGE_DIR": str(pages)}
    ended = subprocess.run(
        [sys.executable, "-c", LOOP],
        env=own | {"RESILIENCE_RUN_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (75, "saved True\n"), ended.stderr
