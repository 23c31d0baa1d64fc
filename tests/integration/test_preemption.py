"""Real jobs that are asked to leave: all ranks stop at one step, save, and the job ends with 75."""

import contextlib
import os
import signal

import pytest
from harness import job

TWO = ("--nproc-per-node", "2")


def losses(folder, rank=0):
    """Return the loss of every step as it was computed last; a step computed twice must have given the same."""
    found = {}
    for line in (folder / "told" / f"losses-{rank}").read_text().splitlines():
        step, value = line.split()
        assert found.setdefault(int(step), value) == value
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder, *TWO, "preempted.py", "--pause", "0") as run:
        assert run.finish() == 0, run.screen
    return losses(folder)


def send(run, whom):
    """Send SIGTERM to whom it is meant for."""
    pids = [int(path.read_text()) for path in run.told("rank-*")]
    chosen = {
        "one rank": pids[1:],
        "all ranks": pids,
        "the launcher": [run.process.pid],
        "the whole tree": sorted(run.processes()),
    }[whom]
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def check_stopped(run, step=None):
    """Check the promises of a stop, and return the step at which all ranks stopped."""
    assert run.finish() == 75, run.screen
    stops = run.events("stop_agreed")
    assert len({event["rank"] for event in stops}) == 2
    assert len({(event["step"], event["check"]) for event in stops}) == 1, stops
    assert [incident["kind"] for incident in run.incidents()] == ["preemption"]
    assert run.outcome()["verdict"] == "preempted"
    assert run.outcome()["checkpoint"] == stops[0]["step"]
    assert not (run.run_dir / "finished").exists()
    assert not run.left_behind()
    return stops[0]["step"]


def resume(folder, *args):
    """Run the job once more, to its end."""
    with contextlib.ExitStack() as stack:
        (folder / "told").rename(folder / "told-before")
        again = stack.enter_context(job(folder, *TWO, "preempted.py", *args))
        for path in (folder / "told-before").glob("losses-*"):
            (folder / "told" / path.name).write_text(path.read_text())
        assert again.finish() == 0, again.screen


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["one rank", "all ranks", "the launcher"])
def test_whoever_gets_the_signal_all_ranks_stop_at_one_step_and_nothing_is_lost(tmp_path, undisturbed, whom):
    """Exit 75, a checkpoint of the very step; the next start goes on with the losses of the undisturbed run."""
    with job(tmp_path, *TWO, "preempted.py") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        send(run, whom)
        stopped = check_stopped(run)
    assert 0 < stopped < 60
    resume(tmp_path)
    assert losses(tmp_path) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", [["--workers", "2"], ["--first"], ["--slow", "2"]], ids=["workers", "first step", "evaluation"]
)
def test_a_signal_to_the_whole_tree_stops_the_job_at_one_step(tmp_path, undisturbed, when):
    """DataLoader workers, the monitor and the launcher get it too; in the first step, and while rank 0 evaluates."""
    with job(tmp_path, *TWO, "preempted.py", *when) as run:
        sign = {"--workers": "step-*", "--first": "losses-*", "--slow": "evaluates"}[when[0]]
        run.wait(lambda: len(run.told(sign)) >= (1 if when[0] == "--slow" else 2), sign)
        if when[0] == "--workers":
            assert run.told("worker-*")
        send(run, "the whole tree")
        stopped = check_stopped(run)
    resume(tmp_path)
    assert losses(tmp_path) == undisturbed
    assert stopped >= 1


@pytest.mark.slow
def test_a_file_in_the_run_directory_and_the_returning_style(tmp_path):
    """`resilience preempt` writes the file; scripts that end with 0 after the stop are preempted, not finished."""
    with job(tmp_path, *TWO, "preempted.py", "--on-preempt", "return", "--pause", "0.05") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        (run.run_dir / "preempt").touch()
        check_stopped(run)
        assert {event["exit_code"] for event in run.events("rank_exit")} == {0}
        (incident,) = run.incidents()
        assert incident["lost_steps"] == 0
        assert {"source": "notice", "text": "preempt"} in incident["evidence"]


@pytest.mark.slow
def test_a_failed_attempt_is_torn_down_at_once_and_is_no_preemption(tmp_path):
    """A rank is killed; the other listens for SIGTERM, which now means the end: no grace is waited for."""
    options = ("--preempt-time", "30", "--max-restarts", "0")
    with job(tmp_path, *TWO, *options, "preempted.py", "--style", "loop", "--pause", "0.05") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        os.kill(int(run.told("rank-1")[0].read_text()), signal.SIGKILL)
        assert run.finish(25.0) == 1, run.screen
        assert [incident["kind"] for incident in run.incidents()] == ["crash"]
        assert not run.events("stop_agreed")


@pytest.mark.slow
def test_a_rank_that_never_checks_is_named_and_the_grace_is_not_exceeded(tmp_path):
    """There can be no agreement; the launcher ends all ranks when the time is over."""
    options = ("--preempt-time", "8", "preempted.py", "--style", "loop", "--steps", "100000")
    with job(tmp_path, *TWO, *options, "--without", "1") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        os.kill(int(run.told("rank-0")[0].read_text()), signal.SIGTERM)
        run.wait(lambda: "rank 1 never calls preemption.check()" in run.screen, "the line")
        send(run, "the launcher")
        assert run.finish(30.0) == 75, run.screen
        assert not run.events("stop_agreed")
