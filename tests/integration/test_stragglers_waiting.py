"""Real ranks that wait: for others, in a section that holds a collective, or for a processor. Nobody is blamed."""

import contextlib
import os
import subprocess
import sys

import pytest
from harness import PATIENCE_S, job
from straggler_runs import enough, least_of, make_nice, named, named_by_incidents, training

pytestmark = pytest.mark.slow  # each trains for some seconds


@contextlib.contextmanager
def heavy_tailed(folder, *args, ranks):
    """Start README's loop on ranks whose forwards have heavy tails."""
    with job(folder, "--nproc-per-node", str(ranks), "heavy_tails.py", *args) as run:
        yield run


@pytest.mark.parametrize(("ranks", "section"), [(2, "bwd"), (3, "sync")])
def test_who_waits_in_a_backward_is_not_named(tmp_path, ranks, section):
    """Now and then a forward takes thirty times as long, on any rank: whoever waits for it in the backward is well."""
    with heavy_tailed(tmp_path, "--section", section, ranks=ranks) as run:
        run.wait(lambda: sum(event["section"] == "fwd" for event in found(run)) >= 4, "four stalls in the forward")
        enough(run)
    assert {event["section"] for event in found(run)} == {"fwd"}
    assert {where for _, where in named_by_incidents(run)} <= {"fwd"}


def test_of_two_ranks_the_slow_one_is_named_and_not_the_one_that_waits(tmp_path):
    """Their sections are each other's mirror: what holds the collective tells which is which."""
    with heavy_tailed(tmp_path, "--tails", "lognormal", "--slow", "0", ranks=2) as run:
        run.wait(lambda: any(incident["kind"] == "slow" for incident in run.incidents()), "the incident")
        enough(run)
    assert named(run, least=least_of(0.05)) == {((0,), "fwd")}
    assert named_by_incidents(run) == {(0, "fwd")}
    assert all(event["waits_least"] is not False for event in found(run))


def found(run):
    """Return what was found, and names somebody."""
    return [event for event in run.events("straggler", what="found") if event["ranks"]]


@contextlib.contextmanager
def crowd(count):
    """Keep so many programs busy that have nothing to do with the job."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            command = (sys.executable, "-c", "while True: pass")
            program = stack.enter_context(subprocess.Popen(command, start_new_session=True))
            stack.callback(program.kill)
        yield


@pytest.mark.release
def test_other_programs_that_slow_down_all_ranks_are_the_machines_load(tmp_path):
    """One line and one event a section with the load, and no incident: nothing is wrong with the training."""
    ranks = max(2, len(os.sched_getaffinity(0)))
    with training(tmp_path, "--burn", "0.01", "--pause", "0.001", "--steps", "100000", ranks=ranks) as run:
        run.wait(lambda: has_passed(run, 200), "200 steps")
        for rank in range(ranks):
            make_nice(int((tmp_path / "told" / f"rank-{rank}").read_text()))
        with crowd(2 * ranks):
            run.wait(lambda: bool(run.events("straggler", what="load")), "the load", PATIENCE_S)
            told = run.events("straggler", what="load")[0]  # of whichever section shows it first
            incidents = [incident for incident in run.incidents() if not incident["culprits"]]
        enough(run)
    assert "the machine's load, not the training: other programs use" in told["text"]
    assert "the machine's load, not the training" in run.screen
    assert incidents == []


def has_passed(run, step):
    """Tell whether the first rank has passed a step."""
    path = run.folder / "told" / "step-0"
    return path.exists() and int(path.read_text()) >= step
