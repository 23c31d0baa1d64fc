"""Real jobs under torchrun in which no monitor coordinates the stop: the ranks agree by an all_reduce now and then."""

import contextlib
import os
import signal
import socket
import sys

import pytest
from harness import job

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
LOOP = ("reducing.py",)
ONE_NODE = (*TORCHRUN, "--standalone", "--nproc-per-node", "2")
NO_PAGES = {"RESILIENCE_PAGE_DIR": "/dev/null/nowhere"}


def pid_of(run, rank):
    """Return the process of a rank."""
    return int((run.folder / "told" / f"rank-{rank}").read_text())


def left(*runs):
    """Return for every rank that left the step at which it did, and the time that it had left."""
    found = {}
    for run in runs:
        for path in run.told("left-*"):
            step, seconds = path.read_text().split()
            found[path.name] = int(step), float(seconds)
    return found


def at_work(run, ranks):
    """Wait until that many ranks have done a second's steps."""
    run.wait(lambda: len([path for path in run.told("step-*") if int(path.read_text()) > 50]) == ranks, "steps")


@pytest.mark.slow
@pytest.mark.parametrize("why", ["no page", "no monitor"])
def test_a_signal_to_one_rank_stops_all_at_one_check(tmp_path, why):
    """No place for pages, or no interpreter for the monitor: each said once, and all stop within a few seconds."""
    env, more = (NO_PAGES, ()) if why == "no page" else ({}, ("--no-monitor",))
    with job(tmp_path, *LOOP, *more, command=ONE_NODE, env=env | {"RESILIENCE_PREEMPT_TIME": "25"}) as run:
        at_work(run, 2)
        os.kill(pid_of(run, 1), signal.SIGTERM)
        assert run.finish() != 0
        steps = left(run)
        assert len(steps) == 2, run.screen
        assert len({step for step, _ in steps.values()}) == 1
        assert all(15 < seconds < 25 for _, seconds in steps.values())  # the rank that heard nothing knows it, too
        assert "no stop can be agreed" not in run.screen
        assert not run.left_behind()
        if why == "no monitor":
            assert len({(event["check"], event["step"]) for event in run.events("stop_agreed")}) == 1
            assert len(run.events("stop_agreed")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "file"])
def test_two_nodes_under_torchrun_stop_at_one_check(tmp_path, how):
    """Their monitors cannot hear one another. Asked on one node only, by a signal to a rank or by a file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    with contextlib.ExitStack() as stack:
        nodes = []
        for node, ranks in enumerate((2, 1)):
            folder = tmp_path / str(node)
            folder.mkdir()
            command = (*TORCHRUN, *meeting, "--node-rank", str(node), "--nproc-per-node", str(ranks))
            nodes.append(stack.enter_context(job(folder, *LOOP, command=command)))
        at_work(nodes[0], 2)
        at_work(nodes[1], 1)
        if how == "signal":
            os.kill(pid_of(nodes[1], 2), signal.SIGTERM)
        else:
            (nodes[0].run_dir / "preempt").touch()
        for node in nodes:
            node.finish()
        steps = left(*nodes)
        assert len(steps) == 3, nodes[0].screen + nodes[1].screen
        assert len({step for step, _ in steps.values()}) == 1


@pytest.mark.slow
def test_a_rank_that_never_checks_is_named_once_and_does_not_hold_up_the_others(tmp_path):
    """The wait is bounded and happens once; the job goes on, and the signal acts when the grace is over."""
    env = NO_PAGES | {"RESILIENCE_PREEMPT_TIME": "4"}
    with job(tmp_path, *LOOP, "--without", "1", command=ONE_NODE, env=env) as run:
        run.wait(lambda: "rank 1 never called preemption.check()" in run.screen, "the line")
        at_work(run, 2)
        assert run.screen.count("no stop can be agreed") == 1
        os.kill(pid_of(run, 0), signal.SIGTERM)
        assert run.finish() != 0
        assert "no stop was agreed within 4 s" in run.screen
        assert not left(run)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "file"])
def test_our_launcher_without_a_place_for_pages_is_obeyed_as_well(tmp_path, how):
    """The ranks agree by themselves, and it leaves with 75, also when they return after the stop: training goes on."""
    more = ("--return",) if how == "file" else ()
    with job(tmp_path, "--nproc-per-node", "2", *LOOP, *more, env=NO_PAGES) as run:
        at_work(run, 2)
        if how == "signal":
            run.process.terminate()
        else:
            (run.run_dir / "preempt").touch()
        assert run.finish() == 75, run.screen
        assert not (run.run_dir / "finished").exists()
        steps = left(run)
        assert len(steps) == 2, run.screen
        assert len({step for step, _ in steps.values()}) == 1
