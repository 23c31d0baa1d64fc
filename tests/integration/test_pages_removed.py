"""The page directory goes while a job runs: settings, stops, checkpoints and names of the guilty hold all the same."""

import os
import random
import signal
import sys

import pytest
from harness import job
from removed_pages import (
    EVERY,
    check_agreed_stop,
    check_killed,
    check_named,
    check_told_once,
    newest_step,
    rank_pid,
    remove,
    trained,
    training,
)

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
NOBODY = 65534
MOMENTS = random.Random(15)
CHECKS = {"sigterm": check_agreed_stop, "sigstop": check_named, "sigkill": check_killed}


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", CHECKS)
def test_a_removed_page_directory_costs_nothing(tmp_path, signal_name):
    """The directory goes at a random moment, and at once a rank gets the signal."""
    with training(tmp_path) as run:
        remove(run, MOMENTS.uniform(0.0, 0.5))
        CHECKS[signal_name](run)
        check_told_once(run)
        assert newest_step(run)


@pytest.mark.slow
def test_a_monitor_that_goes_with_the_directory_is_replaced(tmp_path):
    """No process is left that has the pages mapped: the ranks bring them along, and the new monitor finds them."""
    with training(tmp_path) as run:
        monitor = run.monitor_pid()
        remove(run)
        os.kill(monitor, signal.SIGKILL)
        run.wait(lambda: len(list(run.pages.glob("resilience-*/*/a0-r*.page"))) == 2, "the pages of both ranks")
        run.wait_event("monitor_start", count=2)
        check_agreed_stop(run)
        check_told_once(run)
        assert not run.left_behind()


@pytest.mark.slow
def test_a_name_that_another_user_takes_meanwhile_is_said(tmp_path):
    """Nothing can be made again then: that is said, the settings stand, and the job goes on and resumes."""
    with training(tmp_path) as run:
        place = remove(run)
        place.parent.symlink_to(tmp_path)
        run.wait(lambda: "cannot be made again" in run.screen, "the line about it")
        check_killed(run)
        assert run.events("degraded", what="pages")
        place.parent.unlink()


@pytest.mark.slow
def test_torchrun_whose_page_directory_goes(tmp_path):
    """Under a foreign launcher monitor and ranks keep it, and a stop is agreed as ever."""
    env = {"RESILIENCE_CHECKPOINT_EVERY": "5"}
    script = ("preempted.py", "--steps", "1000", "--pause", "0.05")
    with job(tmp_path, *script, command=TORCHRUN, env=env) as run:
        run.wait(lambda: trained(run) > 2 * EVERY, "twelve steps")
        remove(run, MOMENTS.uniform(0.0, 0.5))
        os.kill(rank_pid(run, 1), signal.SIGTERM)
        run.finish()
        stops = run.events("stop_agreed")
        assert [event["rank"] for event in sorted(stops, key=lambda event: event["rank"])] == [0, 1]
        assert len({event["step"] for event in stops}) == 1
        assert newest_step(run) == stops[0]["step"]
        check_told_once(run)
        assert not run.left_behind()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="takes a name as another user, so it needs root")
@pytest.mark.parametrize("command", [None, TORCHRUN])
def test_a_name_taken_by_another_user_leads_to_another_one(tmp_path, command):
    """All ranks of the node find the same one, a stop is agreed by their monitor, and that is said once."""
    pages = tmp_path / "pages"
    pages.mkdir()
    pages.chmod(0o1777)
    taken = pages / f"resilience-{os.getuid()}"
    taken.mkdir(mode=0o777)
    os.chown(taken, NOBODY, NOBODY)
    script = ("preempted.py", "--steps", "1000", "--pause", "0.05")
    options = () if command is not None else ("--nproc-per-node", "2", "--checkpoint-every", "5")
    env = {"RESILIENCE_CHECKPOINT_EVERY": "5"} if command is not None else {}
    with job(tmp_path, *options, *script, command=command, env=env, pages=pages) as run:
        run.wait(lambda: trained(run) > 2 * EVERY, "twelve steps")
        (place,) = pages.glob(f"{taken.name}.1/*")
        assert len(list(place.glob("a0-r*.page"))) == 2
        run.wait((place / "monitor.json").exists, "the monitor")
        assert not list(taken.iterdir())
        assert f"the rank pages are in {taken}.1" in run.screen
        saves = [event["step"] for event in run.events("ckpt_commit")]
        assert saves
        assert all(step % EVERY == 0 for step in saves)
        os.kill(rank_pid(run, 1), signal.SIGTERM)
        code = run.finish()
        assert code == (75 if command is None else 1), run.screen
        assert len({event["step"] for event in run.events("stop_agreed")}) == 1
