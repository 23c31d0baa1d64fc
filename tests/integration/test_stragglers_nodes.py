"""Slow ranks in a job of two nodes: named on both, left out on request, found where the node that judges is frozen."""

import os
import signal

import pytest
from straggler_runs import RANKS, found_events, least_of, named, named_by_incidents
from two_launchers import two_launchers

pytestmark = [pytest.mark.slow, pytest.mark.alone]  # two launchers with two ranks each, which are compared


def two_nodes(folder, *words, fault, store_on=0):
    """Start `words` with two ranks on each of two nodes."""
    return two_launchers(folder, *words, ranks=2, store_on=store_on, RESILIENCE_FAULT=fault)


def test_a_stop_that_leaves_the_slow_node_out(tmp_path):
    """The slow rank is on the other node: that node is named on both, all ranks stop at one step, exit code 76."""
    fault = "slow:rank=3,section=bwd,seconds=0.1"
    with two_nodes(tmp_path, "--stop-if-detected", "straggling.py", "--check", fault=fault) as nodes:
        codes = [run.finish() for run in nodes]
        screens = "\n".join(run.screen for run in nodes)
        assert codes == [76, 76], screens
        assert not [left for run in nodes for left in run.left_behind()]
    run, told = nodes[0], tmp_path / "told"
    assert named(run, least=least_of(0.1)) == {((3,), "bwd")}
    assert len({path.read_text() for path in told.glob("left-*")}) == 1
    assert len(list(told.glob("left-*"))) == RANKS
    (incident,) = run.incidents()
    (culprit,) = incident["culprits"]
    assert (incident["kind"], incident["action"], culprit["rank"]) == ("slow", "exclude_node", 3)
    assert culprit["node"].endswith("#1")
    outcome = run.outcome()
    assert (outcome["verdict"], outcome["exit_code"], outcome["incidents"]) == ("hardware", 76, [incident["id"]])
    assert culprit["node"] in outcome["reason"]


def test_the_other_node_judges_while_the_one_that_does_is_frozen(tmp_path):
    """Launcher and monitor of node 0 are stopped: node 1 finds its slow rank, and all ends well.

    The ranks of node 0 have another monitor by then; its launcher, which carries the words, goes on later.
    """
    fault = "slow:rank=3,section=bwd,seconds=0.1,step=80"
    with two_nodes(tmp_path, "straggling.py", fault=fault, store_on=1) as nodes:
        first, second = nodes
        told = tmp_path / "told"
        second.wait(lambda: all((told / f"step-{rank}").exists() for rank in range(RANKS)), "a step")
        monitor = first.monitor_pid()
        os.kill(monitor, signal.SIGSTOP)
        first.process.send_signal(signal.SIGSTOP)
        second.wait(lambda: bool(named(second, least=least_of(0.1))), "a verdict")
        second.wait(lambda: first.monitor_pid() != monitor, "another monitor")
        first.process.send_signal(signal.SIGCONT)
        (told / "enough").touch()
        assert [run.finish() for run in nodes] == [0, 0], "\n".join(run.screen for run in nodes)
        assert not [left for run in nodes for left in run.left_behind()]
    found = found_events(second, least=least_of(0.1))
    assert {(tuple(event["ranks"]), event["section"]) for event in found} == {((3,), "bwd")}
    assert all(event["nodes"][0].endswith("#1") for event in found)
    assert named_by_incidents(second) <= {(3, "bwd")}
