"""What is said of a stop: who asked, what was cut, what is lost; and nobody is blamed who does what he should."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from harness import job

TWO = ("--nproc-per-node", "2")
ADVICE = ("call preemption.check()", "never calls", "has ended before the others")


def pid_of(run, name, rank):
    """Return the process of a rank that has told that it came to a place."""
    return int(run.told(f"{name}-{rank}")[0].read_text())


def check_blames_nobody(run):
    """Check that no line of ours and no incident accuses the loop."""
    (incident,) = run.incidents()
    assert incident["kind"] == "preemption"
    assert not incident["culprits"]
    for words in ADVICE:
        assert words not in run.outcome()["reason"]
        assert words not in run.last_lines()
    return incident


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_of_an_unchanged_script_ends_the_job_and_starts_nothing_again(tmp_path, name):
    """That rank dies of it; the other one is told, too, and the job is requeued: any rank's notice counts for all."""
    with job(tmp_path, *TWO, "told_stops.py", "unchanged") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        os.kill(pid_of(run, "step", 1), getattr(signal, name))
        assert run.finish() == 75, run.screen
        assert len(run.events("attempt_start")) == 1
        assert f"rank 1 died of {name}, which nobody here has sent: the job is asked to leave" in run.screen
        assert f"asked to leave by {name} to rank 1" in run.outcome()["reason"]
        (incident,) = run.incidents()
        assert (incident["cause"], incident["action"]) == ("preemption_sigterm", "requeue")
        assert not run.left_behind()


@pytest.mark.slow
def test_a_save_of_the_scripts_own_that_was_cut_is_said_first(tmp_path):
    """It takes longer than there is time: what is not whole, why, and what to set, wherever the end is told."""
    with job(tmp_path, *TWO, "--preempt-time", "3", "told_stops.py", "own", "--save", "120") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.screen
        assert not run.told("saved-*")
        reason, steps = run.outcome()["reason"], run.told("made-0")[0].read_text()
        assert reason.startswith("ranks 0-1 were ended while saving own-0.part and 1 more (in told_stops.py:"), reason
        assert "slow_save()" in reason
        part = tmp_path / "told" / "own-0.part"
        assert f"after all ranks had stopped: the 3 s to leave were over; {part} and 1 more are not whole" in reason
        assert f"all ranks stopped after {steps} steps" in reason
        assert "to do: raise preempt_time (--preempt-time)" in reason
        assert f"preempted: {reason}" in run.screen.replace("\nresilience:  ", "")
        (incident,) = run.incidents()
        assert incident["evidence"][0]["source"] == "save"
        assert incident["evidence"][0]["text"].startswith("ranks 0-1 were ended while saving")


@pytest.mark.slow
def test_a_save_that_a_signal_cuts_in_a_script_that_handles_none_is_said_first(tmp_path):
    """`torch.save` in the loop and in a thread, gone within a moment: what each was in was seen before the signal."""
    with job(tmp_path, *TWO, "told_stops.py", "saves", "--save", "120") as run:
        run.wait(lambda: len(run.told("saves-*")) == 2, "both saves")
        asked = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.screen
        assert time.monotonic() - asked < 8
        reason, path = run.outcome()["reason"], tmp_path / "told" / "step-4-of-0.pt"
        words = "ranks 0-1 were ended while saving step-4-of-0.pt and 1 more (in torch.save at told_stops.py:"
        assert reason.startswith(words), reason
        assert "keep()) by SIGTERM, which nothing there handles; " in reason
        assert f"{path} and 1 more are not whole, and what was to be kept there is lost" in reason
        assert "0 steps lost" not in run.screen
        (sent,) = run.events("signal_sent")
        assert (sent["unheard"], sent["writing"]["0"]) == ([0, 1], str(path))
        assert run.incidents()[-1]["evidence"][0]["source"] == "save"


@pytest.mark.slow
def test_a_run_that_is_still_starting_has_lost_nothing_and_is_given_no_advice(tmp_path):
    """The first start, and one that resumes: nothing came after its checkpoint."""
    for saved in (None, 5):
        if saved is not None:
            (tmp_path / "told" / "quick").touch()
            with job(tmp_path, *TWO, "told_stops.py", "starts") as run:
                run.wait(lambda run=run: len(run.told("step-*")) == 2, "a step")
                run.process.send_signal(signal.SIGTERM)
                assert run.finish() == 75, run.screen
            (tmp_path / "told" / "quick").unlink()
            for path in (tmp_path / "told").iterdir():
                path.unlink()
        with job(tmp_path, *TWO, "told_stops.py", "starts") as run:
            run.wait(lambda run=run: len(run.told("starts-*")) == 2, "the start")
            run.process.send_signal(signal.SIGTERM)
            assert run.finish() == 75, run.screen
            reason = run.outcome()["reason"]
            assert reason.endswith("before its first step; nothing is lost"), reason
            assert (run.outcome()["checkpoint"] is None) == (saved is None)
            newest = run.incidents()[-1]
            assert newest["lost_steps"] == 0
            assert not newest["culprits"]


@pytest.mark.slow
def test_a_rank_that_is_done_like_the_others_is_not_blamed_for_a_last_save_elsewhere(tmp_path):
    """Rank 1 has ended, rank 0 saves once more: both have made 30 steps, and the save has its time."""
    with job(tmp_path, *TWO, "told_stops.py", "ends", "--steps", "30", "--save", "8") as run:
        run.wait_event("rank_exit", rank=1)
        assert run.told("saves-0")
        os.kill(pid_of(run, "saves", 0), signal.SIGTERM)
        run.wait(lambda: "rank 0: SIGTERM heard: its training is done, and it ends by itself" in run.screen, "the word")
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.screen
        assert run.told("saved-0")
        assert "when its loop had ended (30 steps)" in run.outcome()["reason"]
        check_blames_nobody(run)


@pytest.mark.slow
def test_a_signal_that_schedulers_send_by_habit_saves_as_any_other(tmp_path):
    """SIGUSR1 and SIGUSR2 to ranks that check, and SIGHUP where there is no terminal: no setting is needed."""
    with job(tmp_path, *TWO, "told_stops.py", "own") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        os.kill(pid_of(run, "step", 0), signal.SIGUSR2)
        assert run.finish() == 75, run.screen
        assert "rank 0: SIGUSR2 heard: all ranks are to save and leave within 60 s" in run.screen
        assert len(run.told("saved-*")) == 2
        made = int(run.told("made-0")[0].read_text())
        assert {event["step"] for event in run.events("stop_agreed")} == {made}
        assert f"all ranks stopped after {made} steps" in run.outcome()["reason"]
        assert "SIGUSR2 to rank 0" in run.outcome()["reason"]


@pytest.mark.slow
def test_ranks_that_have_a_use_of_their_own_for_the_signal_hear_of_the_stop_all_the_same(tmp_path):
    """Two have their stacks written by `faulthandler`, a third one has a handler: each works, and all stop as one."""
    with job(tmp_path, "--nproc-per-node", "3", "told_stops.py", "uses") as run:
        run.wait(lambda: len(run.told("step-*")) == 3, "a step")
        asked = time.monotonic()
        run.process.send_signal(signal.SIGUSR1)
        run.wait(lambda: len(run.told("stopped-*")) == 3, "the stop")
        assert time.monotonic() - asked < 5
        assert run.finish() == 75, run.screen
        assert len({path.read_text() for path in run.told("stopped-*")}) == 1
        assert run.told("handled-2")
        assert run.screen.count("most recent call first") >= 2
        reason = run.outcome()["reason"]
        assert "asked to leave by SIGUSR1 to the launcher" in reason
        assert "all ranks stopped" in reason


@pytest.mark.slow
def test_sigterm_is_passed_on_where_it_follows_a_signal_that_the_script_has_used_for_itself(tmp_path):
    """To the launcher alone: the ranks went on, and would until the time is over."""
    with job(tmp_path, *TWO, "told_stops.py", "handles") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        run.process.send_signal(signal.SIGUSR1)
        run.wait(lambda: len(run.told("handled-*")) == 2, "the handlers")
        asked = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.screen
        assert time.monotonic() - asked < 8
        assert "SIGTERM after SIGUSR1: passing it on to the ranks that still run" in run.screen
        assert "asked to leave by SIGUSR1 to the launcher" in run.outcome()["reason"]


@pytest.mark.slow
def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path):
    """The ranks run on; the next request is the first one that is heard."""
    with job(tmp_path, *TWO, "told_stops.py", "own", within=("nohup",)) as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        assert run.finish() == 75, run.screen
        assert len(run.told("saved-*")) == 2
        assert "SIGTERM to the launcher" in run.outcome()["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["torchrun", "one rank"])
def test_under_torchrun_an_unchanged_script_that_was_asked_is_preempted(tmp_path, whom):
    """torchrun leaves with 1; outcome.json tells that it is to be requeued, and by whom it was asked."""
    command = (sys.executable, "-m", "torch.distributed.run", *TWO, "-m", "resilience_sdk.auto")
    with job(tmp_path, "told_stops.py", "unchanged", command=command) as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        if whom == "torchrun":
            run.process.send_signal(signal.SIGTERM)
        else:
            os.kill(pid_of(run, "step", 1), signal.SIGTERM)
        assert run.finish() != 0
        deadline = time.monotonic() + 20
        while not (run.run_dir / "outcome.json").exists() and time.monotonic() < deadline:
            time.sleep(0.02)  # the monitor writes it, a moment after torchrun's end
        assert run.outcome()["exit_code"] == 75, run.screen
        assert "SIGTERM to rank" in run.outcome()["reason"]
        assert not run.left_behind()
