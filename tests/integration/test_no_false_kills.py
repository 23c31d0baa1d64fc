"""What is slow, or in a person's hands, is no hang: nothing is confirmed, restarted or killed.

Deadlines are as short as these runs can learn them, and each slow thing lasts several times its deadline.
"""

import os
import select
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import PATIENCE_S, job

FLOOR_S, SLOW_S = 0.6, 2.0
UNNAMED_FLOOR_S, LONG_S = 0.2, 4.5  # time that nobody named has ten floors
TWO = ("--nproc-per-node", "2")
NAMED = ("--timeout-floor", str(FLOOR_S), "slow_work.py", "--slow", str(SLOW_S))
UNNAMED = ("--timeout-floor", str(UNNAMED_FLOOR_S))
PULSES = (*UNNAMED, "slow_work.py", "--slow", str(LONG_S), "--beats", "pulse")
# The step itself gets more, so that a busy machine does not matter.
BLOCKS = (*UNNAMED, "--heartbeat-timeout", "4", "slow_work.py", "--slow", str(LONG_S))
JOBS = {
    "evaluate": (*NAMED, "first", "eval-0", "eval", "save-0"),
    "compile": (*NAMED, "compile-0", "compile", "save", "upload-done"),
    "blocks": (*BLOCKS, "upload"),
    "blocks-alone": (*BLOCKS, "upload-0"),
    "pulses": (*PULSES, "upload"),
    "pulses-done": (*PULSES, "upload-done"),
    "optimizer": (*UNNAMED, "plain.py", "--sgd", "--upload", str(LONG_S)),
}


class Outcome:
    """What is left of one job."""

    def __init__(self, run) -> None:
        self.code = run.finish()
        self.left = run.left_behind()
        self.out, self.screen = run.out, run.screen
        self.incidents = run.incidents()
        self.attempts = run.events("attempt_start")
        self.bad = [name for name in ("confirmed", "signal_sent", "rank_exit_early", "incident") if run.events(name)]
        self.suspects = [suspect for event in run.events("suspect") for suspect in event["suspects"]]

    def check(self) -> None:
        """Assert that nothing was done to the job."""
        assert self.code == 0, self.screen
        assert (len(self.attempts), self.bad, self.incidents, self.left) == (1, [], [], []), self.screen
        assert "HANG" not in self.screen
        assert "degraded" not in self.screen
        assert all(f"rank {rank} finished" in self.out for rank in (0, 1))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """All jobs of this file that need nobody beside them, over now."""

    def run(name: str) -> Outcome:
        with job(tmp_path_factory.mktemp(name), *TWO, *JOBS[name]) as started:
            return Outcome(started)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(JOBS, pool.map(run, JOBS), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_slow_work_is_no_hang(outcomes, name):
    """One attempt, no verdict, exit 0; on all ranks alike, and on rank 0 alone while the others wait."""
    outcomes[name].check()


@pytest.mark.parametrize("name", ["evaluate", "compile"])
def test_the_deadlines_were_short_enough_to_matter(outcomes, name):
    """Somebody was late by a learned deadline of which the slow work takes several, on one rank and on both."""
    late = [suspect for suspect in outcomes[name].suspects if suspect["deadline_s"] <= SLOW_S / 2]
    assert {suspect["rank"] for suspect in late} == {0, 1}
    assert any(suspect["name"].startswith("bwd") for suspect in late)


@pytest.mark.parametrize("name", ["blocks", "pulses", "optimizer"])
def test_an_upload_without_done_is_suspect_and_no_more(outcomes, name):
    """All ranks stopped at one count with nothing open: that is what the end of a loop looks like."""
    late = [suspect for suspect in outcomes[name].suspects if suspect["deadline_s"] <= LONG_S / 2]
    assert {suspect["rank"] for suspect in late} == {0, 1}


def test_after_done_nobody_is_late(outcomes):
    """`heartbeat.done()` ends the deadlines altogether."""
    assert not outcomes["pulses-done"].suspects


def test_an_export_that_was_taken_for_a_hang_gets_more_time_in_the_next_attempt(tmp_path):
    """What rank 0 does alone in time that nobody named cannot be told from a hang; it is ended once, not for ever."""
    with job(tmp_path, *TWO, *UNNAMED, "plain.py", "--sgd", "--upload", "3", "--alone") as run:
        assert run.finish() == 0, run.screen
        (found,) = run.incidents()
        assert [named["rank"] for named in found["culprits"]] == [0]
        assert len(run.events("attempt_start")) == 2


def test_a_person_at_a_debugger_is_left_alone(tmp_path):
    """`breakpoint()` on a terminal, or ptrace, keeps a rank as long as the person likes; so the peers wait too."""
    ours, theirs = os.openpty()
    try:
        with job(tmp_path, *TWO, *NAMED, "breakpoint-0", "traced-0", terminal=theirs) as run:
            seen = _read_until(ours, b"(Pdb) ")
            run.wait_event("suspect")
            time.sleep(SLOW_S)
            assert run.process.poll() is None
            os.write(ours, b"p 6 * 7\nc\n")
            seen += _read_until(ours, b"trace")
            outcome = Outcome(run)
            os.set_blocking(ours, False)
            outcome.out = (seen + os.read(ours, 1 << 16)).decode()
            outcome.check()
            assert "42" in outcome.out
            assert {suspect["rank"] for suspect in outcome.suspects} == {0, 1}
            if "cannot trace" in outcome.out:
                pytest.skip("processes may not be traced here")
            assert any(suspect["name"] == "step-1" for suspect in outcome.suspects)
    finally:
        os.close(ours)
        os.close(theirs)


def _read_until(terminal: int, text: bytes) -> bytes:
    """Return what a program wrote to its terminal, up to `text`."""
    seen = b""
    while text not in seen:
        assert select.select([terminal], [], [], PATIENCE_S)[0], seen
        seen += os.read(terminal, 4096)
    return seen
