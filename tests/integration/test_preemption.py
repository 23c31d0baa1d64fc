"""Real jobs that are asked to leave: all ranks stop at one step, save, and the job ends with 75."""

import contextlib
import os
import signal

import pytest
from harness import job

from resilience_sdk.checkpoint.store import verify_checkpoint
from resilience_sdk.report.run_view import find_notes

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


def check_stopped(run, ranks=2):
    """Check the promises of a stop, and return the step at which all ranks stopped."""
    assert run.finish() == 75, run.screen
    stops = run.events("stop_agreed")
    assert len({event["rank"] for event in stops}) == ranks
    assert len({(event["step"], event["check"]) for event in stops}) == 1, stops
    assert [incident["kind"] for incident in run.incidents()] == ["preemption"]
    assert run.outcome()["verdict"] == "preempted"
    assert run.outcome()["checkpoint"] == newest_whole(run) == stops[0]["step"]
    assert not (run.run_dir / "finished").exists()
    assert not run.left_behind()
    return stops[0]["step"]


def resume(folder, *args, ranks=TWO):
    """Run the job once more, to its end."""
    with contextlib.ExitStack() as stack:
        (folder / "told").rename(folder / "told-before")
        again = stack.enter_context(job(folder, *ranks, "preempted.py", *args))
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
        most = 1 if when[0] == "--slow" else 2
        # Opened before the ranks listen, written in the first step.
        run.wait(lambda: sum(path.stat().st_size > 0 for path in run.told(sign)) >= most, sign)
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
        assert {"source": "notice", "text": "the file preempt in the run directory"} in incident["evidence"]
        assert incident["cause"] == "preemption_requested"


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
        run.wait(lambda: "never calls preemption.check()" in run.screen, "the line")
        send(run, "the launcher")
        assert run.finish(30.0) == 75, run.screen
        assert not run.events("stop_agreed")
        (incident,) = run.incidents()
        assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
        assert incident["culprits"][0]["node"]
        asked, hindrance, *_, cure = (item["text"] for item in incident["evidence"])
        assert asked.startswith("SIGTERM to ")
        assert hindrance.startswith("rank 1 on ")
        assert "never calls preemption.check()" in hindrance
        assert cure.startswith("call preemption.check() in the loop of rank 1")
        last = run.last_lines()
        assert f"the job was asked to leave by {asked}" in last
        assert hindrance in last
        assert cure in (run.run_dir / "incidents" / incident["id"] / "report.md").read_text()


def newest_whole(run):
    """Return the step of the newest checkpoint, after reading every byte of it."""
    return verify_checkpoint(max((run.run_dir / "checkpoints").glob("step-*"))).step


@pytest.mark.slow
def test_a_second_signal_within_the_grace_changes_nothing(tmp_path, undisturbed):
    """The ranks are in their last save when launcher and ranks are told again: it ends as if nobody had."""
    with job(tmp_path, *TWO, "preempted.py", "--save", "1") as run:
        run.wait(lambda: len(run.told("step-*")) == 2, "a step")
        send(run, "the launcher")
        run.wait(lambda: bool(run.told("saves-0")), "the last save")
        send(run, "the launcher")
        send(run, "all ranks")
        check_stopped(run)
        assert len(run.events("preempt_notice", source="SIGTERM")) == 1
    resume(tmp_path)
    assert losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_signal_during_a_checkpoint_write_lets_it_end(tmp_path, undisturbed):
    """The save goes on to its commit, then the ranks stop at one step; nothing torn is left."""
    with job(tmp_path, *TWO, "--checkpoint-every", "5", "preempted.py", "--save", "1") as run:
        run.wait(lambda: bool(run.told("saves-0")), "a save")
        send(run, "the whole tree")
        check_stopped(run)
        assert run.events("ckpt_commit", step=5)
    resume(tmp_path)
    assert losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_signal_while_a_checkpoint_is_written_in_the_background_lets_it_end(tmp_path, undisturbed):
    """It is committed, and then the last save is made: both are whole, and nothing unfinished is left."""
    with job(tmp_path, *TWO, "--checkpoint-every", "10", "preempted.py", "--behind") as run:
        stopped = check_stopped(run)
        *_, begun, last = run.events("ckpt_commit")
        assert begun["step"] < last["step"] == stopped
        assert float(run.told("behind")[0].read_text()) < begun["t"] < last["t"]
        assert sorted(path.name for path in (run.run_dir / "checkpoints").glob("step-*"))[-2:] == [
            begun["checkpoint"],
            last["checkpoint"],
        ]
        assert not list((run.run_dir / "checkpoints").glob(".tmp-*"))
        for name in (begun["checkpoint"], last["checkpoint"]):
            verify_checkpoint(run.run_dir / "checkpoints" / name)
    resume(tmp_path)
    assert losses(tmp_path) == undisturbed


@pytest.mark.release
@pytest.mark.slow
def test_four_ranks_go_on_as_ranks_that_wrap_their_model_anew_at_that_step(tmp_path):
    """DDP on more than two ranks adds in another order after its first step, so a run undisturbed is no measure."""
    four = ("--nproc-per-node", "4")
    with job(tmp_path, *four, "preempted.py", "--deep") as run:
        run.wait(lambda: len(run.told("step-*")) == 4, "a step")
        send(run, "one rank")
        stopped = check_stopped(run, ranks=4)
    resume(tmp_path, "--deep", ranks=four)
    reference = tmp_path / "reference"
    reference.mkdir()
    with job(reference, *four, "preempted.py", "--deep", "--pause", "0", "--rewrap", str(stopped)) as run:
        assert run.finish() == 0, run.screen
    for rank in range(4):
        assert losses(tmp_path, rank) == losses(reference, rank)


@pytest.mark.slow
def test_a_last_save_that_cannot_fit_is_skipped_and_said(tmp_path):
    """The saves before took 2 s, 1.5 s are left: journal, screen and incident say so; the one before is whole."""
    options = ("--preempt-time", "1.5", "--checkpoint-every", "20")
    with job(tmp_path, *TWO, *options, "preempted.py", "--save", "2", "--pause", "0.06") as run:
        (committed,) = run.wait_event("ckpt_commit", step=20)
        send(run, "the launcher")
        assert run.finish() == 75, run.screen
        skips = run.events("ckpt_skip", why="no time")
        assert {event["rank"] for event in skips} == {0, 1}
        assert {note["what"] for note in find_notes(skips)} == {"was not written"}  # as `resilience why` says it
        assert "no last save: it takes about" in run.screen
        (incident,) = run.incidents()
        assert incident["kind"] == "preemption"
        assert incident["lost_steps"] == skips[0]["step"] - committed["step"] > 0
        assert any("the last save was skipped" in item["text"] for item in incident["evidence"])
        assert newest_whole(run) == committed["step"]


@pytest.mark.slow
def test_ctrl_c_is_final_and_no_preemption(tmp_path):
    """SIGINT to the foreground group, as a terminal sends it, while the handlers are installed: 130, no incident."""
    options = ("--preempt-signals", "SIGTERM,SIGINT")
    for given in ((), options):
        folder = tmp_path / str(len(given))
        folder.mkdir()
        with job(folder, *TWO, *given, "preempted.py", "--pause", "0.05", "--steps", "4000") as run:
            run.wait(lambda run=run: len(run.told("step-*")) == 2, "a step")
            os.killpg(run.process.pid, signal.SIGINT)
            assert run.finish() == 130, run.screen
            assert "preemption" not in [incident["kind"] for incident in run.incidents()]
            assert run.outcome()["verdict"] == "interrupted"
            assert not (run.run_dir / "finished").exists()
            assert not run.left_behind()
