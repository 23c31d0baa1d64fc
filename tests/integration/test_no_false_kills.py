"""What is slow, or in a person's hands, is no hang: nothing is confirmed, restarted or killed.

Deadlines are as short as these runs can learn them, and each slow thing lasts several times its deadline.
"""

import os
import select
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import PATIENCE_S, job

pytestmark = pytest.mark.slow  # legitimate slowness takes its time

FLOOR_S, SLOW_S = 0.6, 1.8
UNNAMED_FLOOR_S, LONG_S = 0.2, 4.5  # time that nobody named has ten floors
PHASES = ("first", "eval-0", "compile-0", "save-0", "eval", "compile", "save", "upload-done")
TORCH = {
    "work": ("--timeout-floor", str(FLOOR_S), "slow_work.py", "--slow", str(SLOW_S), *PHASES),
    "optimizer": ("--timeout-floor", str(UNNAMED_FLOOR_S), "plain.py", "--sgd", "--upload", str(LONG_S)),
    "export": ("--stuck-after", "1", "plain.py", "--sgd", "--upload", "8", "--alone"),  # a pipe has 5 s
}
# Without torch, under a launcher of somebody's own, which the monitor would let act by killing the ranks.
LIGHT = {
    "blocks": ("upload",),
    "blocks-alone": ("upload-0",),
    "pulses": ("--beats", "pulse", "upload"),
    "pulses-done": ("--beats", "pulse", "upload-done"),
}
LIGHT_SETTINGS = {
    "RESILIENCE_ON_HANG": "kill",
    "RESILIENCE_TIMEOUT_FLOOR": str(UNNAMED_FLOOR_S),
    "RESILIENCE_HEARTBEAT_TIMEOUT": "2",  # of steps and pulses
    "RESILIENCE_OUT_OF_SECTION_TIMEOUT": "2",
}
TWO = ("--nproc-per-node", "2")


class Outcome:
    """What is left of one job."""

    def __init__(self, run) -> None:
        self.code = run.finish(PATIENCE_S)
        self.left = run.left_behind()
        self.out, self.screen = run.out, run.screen
        self.incidents = run.incidents()
        self.attempts = run.events("attempt_start")
        self.bad = [name for name in ("confirmed", "signal_sent", "incident") if run.events(name)]
        self.suspects = [suspect for event in run.events("suspect") for suspect in event["suspects"]]

    def check(self) -> None:
        """Assert that nothing was done to the job."""
        assert self.code == 0, self.screen
        assert (self.bad, self.incidents, self.left) == ([], [], []), self.screen
        assert len(self.attempts) <= 1
        assert "HANG" not in self.screen
        assert "degraded" not in self.screen
        assert all(f"rank {rank} finished" in self.out for rank in (0, 1))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All jobs of this file that need nobody beside them, over now."""

    folders = {name: tmp_path_factory.mktemp(name) for name in (*TORCH, *LIGHT)}  # pytest's are not for threads

    def run_torch(name: str) -> Outcome:
        with job(folders[name], *TWO, *TORCH[name]) as started:
            return Outcome(started)

    def run_light(name: str) -> Outcome:
        command = (sys.executable, "ranks.py", "2", "torch", "light.py", "--slow", str(LONG_S))
        with job(folders[name], *LIGHT[name], command=command, env=LIGHT_SETTINGS) as started:
            return Outcome(started)

    with ThreadPoolExecutor(3) as pool:
        found = {name: pool.submit(run_torch, name) for name in TORCH}
        found |= {name: pool.submit(run_light, name) for name in LIGHT}
        return {name: future.result() for name, future in found.items()}


@pytest.mark.parametrize("name", ["work", "optimizer", *LIGHT])
def test_slow_work_is_no_hang(outcomes, name):
    """One attempt, no verdict, exit 0; on all ranks alike, and on rank 0 alone while the others wait."""
    outcomes[name].check()


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase not in ("first", "upload-done")])
def test_the_deadlines_were_short_enough_to_matter(outcomes, phase):
    """In each phase somebody was late by a learned deadline of which the slow work takes several."""
    number = PHASES.index(phase)
    late = [
        suspect
        for suspect in outcomes["work"].suspects
        if suspect["deadline_s"] <= SLOW_S / 2 and suspect["name"] in (f"step-{number}", f"bwd-{number}")
    ]
    assert late


@pytest.mark.parametrize("name", ["blocks", "pulses", "optimizer"])
def test_an_upload_without_done_is_suspect_and_no_more(outcomes, name):
    """All ranks stopped at one count with nothing open: that is what the end of a loop looks like."""
    late = [suspect for suspect in outcomes[name].suspects if suspect["deadline_s"] <= LONG_S / 2]
    assert {suspect["rank"] for suspect in late} == {0, 1}


def test_after_done_nobody_is_late(outcomes):
    """`heartbeat.done()` ends the deadlines altogether."""
    assert not outcomes["pulses-done"].suspects


def test_an_export_that_was_taken_for_a_hang_gets_more_time_in_the_next_attempt(outcomes):
    """What rank 0 does alone without a movement cannot be told from a hang; it is ended once, not for ever."""
    export = outcomes["export"]
    assert export.code == 0, export.screen
    (found,) = export.incidents
    assert [named["rank"] for named in found["culprits"]] == [0]
    assert found["cause"] == "hang_rank_stuck"
    assert len(export.attempts) == 2


def test_a_person_at_a_debugger_is_left_alone(tmp_path):
    """`breakpoint()` on a terminal, or ptrace, keeps a rank as long as the person likes; so the peers wait too."""
    ours, theirs = os.openpty()
    options = (*TWO, "--start-method", "exec", "--timeout-floor", str(FLOOR_S))
    try:
        with job(tmp_path, *options, "light.py", "breakpoint-0", "traced-0", terminal=theirs) as run:
            seen = _read_until(ours, b"(Pdb) ")
            run.wait_event("suspect")
            time.sleep(SLOW_S)
            assert run.process.poll() is None
            os.write(ours, b"p 6 * 7\nc\n")
            seen += _read_until(ours, b"finished", b"finished")
            outcome = Outcome(run)
            outcome.out = seen.decode()
            outcome.check()
            assert "42" in outcome.out
            assert {suspect["rank"] for suspect in outcome.suspects} == {0, 1}
            if "cannot trace" in outcome.out:
                pytest.skip("processes may not be traced here")
            assert any(suspect["name"] == "step-1" for suspect in outcome.suspects)
    finally:
        os.close(ours)
        os.close(theirs)


def _read_until(terminal: int, *texts: bytes) -> bytes:
    """Return what a program wrote to its terminal, until it has written all these."""
    seen = b""
    while any(seen.count(text) < texts.count(text) for text in texts):
        assert select.select([terminal], [], [], PATIENCE_S)[0], seen
        seen += os.read(terminal, 4096)
    return seen
