"""Two launchers on one machine as the two nodes of a job: hangs, deaths, and the loss of one of them."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from accounts import account_of
from harness import Job, is_running
from two_launchers import two_launchers

pytestmark = pytest.mark.slow  # two launchers with ranks of their own, three times

DEADLINE_S = 2.0
ON_TIME_S = 5.0  # beyond the deadline; measured: about 0.5 on an idle machine


@attrs.define
class TwoNodes:
    """Both launchers; what they write into the shared run directory is seen through either."""

    first: Job
    second: Job

    def finish(self) -> list[int]:
        """Wait for both and return their exit codes."""
        return [self.first.finish(), self.second.finish()]

    @property
    def screens(self) -> str:
        """Both screens, for a failed assertion."""
        return f"--- node 0\n{self.first.screen}\n--- node 1\n{self.second.screen}"

    def rank_pid(self, rank: int, attempt: int = 0) -> int:
        """Wait until a rank has made a step, and return its process."""
        told = self.first.folder.parent / "told"
        self.first.wait(lambda: (told / f"step-{attempt}-{rank}").exists(), f"a step of rank {rank}")
        return int((told / f"rank-{attempt}-{rank}").read_text())


@contextlib.contextmanager
def two_nodes(
    folder: Path, *args: str, per_node: int = 1, options: tuple[str, ...] = (), fault: str = ""
) -> Iterator[TwoNodes]:
    """Start `training.py` with these arguments on two nodes of `per_node` ranks each."""
    options = ("--heartbeat-timeout", str(DEADLINE_S), *options)
    faults = {"RESILIENCE_FAULT": fault} if fault else {}
    with two_launchers(folder, *options, "training.py", *args, ranks=per_node, **faults) as jobs:
        yield TwoNodes(*jobs)


def named_in(incident) -> list[tuple[int, str]]:
    """Return rank and number of the node of each culprit."""
    return [(culprit["rank"], culprit["node"].partition("#")[2]) for culprit in incident["culprits"]]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A job of one rank on each node: the one of node 1 hangs, and in the next attempt is killed."""
    faults = "hang:how=sleep,rank=1,step=5,attempt=0; kill:how=sigkill,rank=1,step=5,attempt=1"
    with two_nodes(tmp_path_factory.mktemp("faulty"), fault=faults) as nodes:
        assert nodes.finish() == [0, 0], nodes.screens
        yield nodes


def test_each_fault_is_one_incident(faulty):
    """Both nodes start again after each, and finish."""
    found = faulty.first.incidents()
    assert [(incident["kind"], incident["attempt"]) for incident in found] == [("hang", 0), ("crash", 1)]
    assert all(incident["recovered_at"] is not None for incident in found)
    assert len(faulty.first.events("attempt_start")) == 6
    assert not faulty.first.events("degraded")


def test_every_second_of_two_nodes_is_counted_once(faulty):
    """Of the run, whichever node was the first; what hung or was done again has its own bucket."""
    buckets = account_of(faulty.first.run_dir)
    assert DEADLINE_S * 0.7 < buckets["hang"] < DEADLINE_S + ON_TIME_S
    assert buckets["restart"] > 0


def test_a_hang_on_another_node_is_told_at_its_deadline(faulty):
    """The rank that stopped is named with its node, soon after its deadline; both launchers know of it."""
    incident = faulty.first.incidents()[0]
    assert named_in(incident) == [(1, "1")]
    assert incident["culprits"][0]["stack"]
    assert incident["victims"] == [0]
    assert DEADLINE_S <= incident["detection_latency_s"] < DEADLINE_S + ON_TIME_S
    assert {end["ended_by"] for end in faulty.first.events("attempt_end", attempt=0)} == {"hang"}
    for folder in ("pages", "stacks"):
        assert len(list((faulty.first.run_dir / "incidents" / incident["id"] / folder).glob("rank-*"))) == 2


def test_a_rank_killed_on_one_node_is_no_fault_of_the_other(faulty):
    """Its lost connections are no incident: the other launcher repeats what that of the killed rank says."""
    incident = faulty.first.incidents()[1]
    assert named_in(incident) == [(1, "1")]
    assert incident["cause"] == "rank_killed_sigkill"
    for screen in (faulty.first.screen, faulty.second.screen):
        assert "rank 1 on " in screen
        assert "died by SIGKILL" in screen


def test_a_monitor_that_died_is_replaced_and_the_hang_still_told(tmp_path):
    """Two ranks on each node; the judgement does without one of the monitors until it is there again."""
    with two_nodes(tmp_path, per_node=2, fault="hang:how=sleep,rank=3,step=5,attempt=0") as nodes:
        nodes.rank_pid(3)
        os.kill(nodes.second.monitor_pid(), signal.SIGKILL)
        assert nodes.finish() == [0, 0], nodes.screens
        (incident,) = nodes.first.incidents()
        assert named_in(incident) == [(3, "1")]
        assert incident["victims"] == [0, 1, 2]


def test_a_hang_that_is_only_reported_and_a_launcher_that_dies(tmp_path):
    """One report for both nodes; then a whole node goes, and the other says that it is gone."""
    options = ("--max-restarts", "0", "--on-hang", "report")
    with two_nodes(tmp_path, options=options, fault="hang:how=sleep,rank=1,step=5,attempt=0") as nodes:
        survivor = nodes.rank_pid(0)
        nodes.first.wait_event("confirmed", count=2)
        (hang,) = nodes.first.incidents()
        assert (named_in(hang), hang["action"]) == ([(1, "1")], "none")
        nodes.second.process.kill()
        assert nodes.first.finish() == 1, nodes.screens
        assert not is_running(survivor)
        (crash,) = nodes.first.incidents()[1:]
        assert (crash["kind"], named_in(crash)) == ("crash", [(1, "1")])
        assert crash["cause"] == "network_node_unreachable"
