"""Jobs of two and three nodes, each a host of its own: nodes that die, cables that are pulled, a node preempted.

Each host is a network namespace with a launcher in it, so what a node loses is what it would lose in a cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import attrs
import network
import pytest
from harness import Job, job

pytestmark = pytest.mark.slow

# Torch's own waits are half a minute and more; the rules are the same with shorter ones.
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=6,read_timeout=4,join_timeout="
QUICK = ("--heartbeat-timeout", "5", "--timeout-floor", "5")  # above what TCP needs to recover from a short cut
LONG_S = 60.0


@attrs.define
class Cluster:
    """The hosts and the launchers on them; what these write into the shared run directory is seen through any."""

    folder: Path
    hosts: Sequence[network.Host]
    nodes: str
    join_s: int
    stack: contextlib.ExitStack
    jobs: dict[int, Job] = attrs.field(factory=dict)

    def start(self, node: int) -> Job:
        """Start the launcher of a node."""
        own = self.folder / f"node{node}-{len(list(self.folder.glob(f'node{node}-*')))}"
        own.mkdir()
        started = job(
            own,
            *("--run-dir", str(self.folder / "run"), "--nnodes", self.nodes, "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "separate", "--rdzv-endpoint", f"{self.hosts[0].name}:29400"),
            *("--rdzv-conf", f"{RENDEZVOUS}{self.join_s}", *QUICK, "nodes_training.py"),
            env={"TOLD": str(self.told)},
            within=self.hosts[node].within,
        )
        self.jobs[node] = self.stack.enter_context(started)
        self.jobs[node].run_dir = self.folder / "run"
        return self.jobs[node]

    @property
    def told(self) -> Path:
        """Where the ranks tell what they do."""
        return self.folder / "told"

    @property
    def any(self) -> Job:
        """One of the launchers."""
        return next(iter(self.jobs.values()))

    def wait_step(self, attempt: int, rank: int, least: int = 0, watch: int | None = None) -> int:
        """Wait until a rank has made that step in that attempt."""
        path = self.told / f"step-{attempt}-{rank}"
        seen = self.any if watch is None else self.jobs[watch]
        seen.wait(lambda: path.exists() and int(path.read_text()) >= least, f"step {least} of rank {rank} in {attempt}")
        return int(path.read_text())

    def pid(self, attempt: int, rank: int) -> int:
        """Return the process of a rank that has begun."""
        return int((self.told / f"pid-{attempt}-{rank}").read_text())

    def first_step(self, attempt: int, rank: int) -> int:
        """Return the first step that a rank made in an attempt."""
        return int((self.told / f"first-{attempt}-{rank}").read_text())

    def kill(self, node: int) -> None:
        """SIGKILL launcher, ranks and monitor of a node at once."""
        self.jobs.pop(node).kill_everything()

    def wait_said(self, node: int, words: str) -> None:
        """Wait until a launcher has said something."""
        self.jobs[node].wait(lambda: words in self.jobs[node].screen, words, LONG_S)

    def finish_well(self) -> None:
        """Let the ranks finish; all launchers then exit with 0, and nothing is left."""
        (self.told / "enough").touch()
        assert {node: started.finish() for node, started in self.jobs.items()} == dict.fromkeys(self.jobs, 0), (
            self.screens
        )
        assert not [left for started in self.jobs.values() for left in started.left_behind()]

    def numbers(self, node: int) -> list[tuple[int, int]]:
        """Return number and world size of the attempts that this node's launchers journalled."""
        starts = self.any.events("attempt_start", host=self.hosts[node].name)
        return [(event["attempt"], event["world_size"]) for event in starts]

    def incidents(self) -> list[tuple[str, list[tuple[int, str]]]]:
        """Return kind and culprits (rank and node) of each incident, once all are recovered from."""
        seen = self.any  # which monitor closes them, and when it hears of all first beats, depends on the node
        seen.wait(lambda: all(i["recovered_at"] is not None for i in seen.incidents()), "recovery", LONG_S)
        found = seen.incidents()
        return [(i["kind"], [(culprit["rank"], culprit["node"]) for culprit in i["culprits"]]) for i in found]

    @property
    def screens(self) -> str:
        """All screens, for a failed assertion."""
        return "\n".join(f"--- node {node}\n{started.screen}" for node, started in self.jobs.items())


@pytest.fixture
def cluster(tmp_path):
    """Make a cluster of that many hosts and start a launcher on each."""
    if reason := network.why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def make(count: int, nodes: str = "", *, start: int | None = None, join_s: int = 60) -> Cluster:
            hosts = stack.enter_context(network.network(count))
            (tmp_path / "told").mkdir()
            made = Cluster(tmp_path, hosts, nodes or str(count), join_s, stack)
            for node in range(count if start is None else start):
                made.start(node)
            return made

        yield make


@pytest.mark.release
def test_all_nodes_count_the_same_attempts(cluster):
    """A launcher that comes late, a rank that is killed on another node, and one that hangs there.

    Each fault is one incident that names rank and host, and every launcher says so.
    """
    nodes = cluster(3, "2:3", start=2)
    nodes.wait_step(0, 1)
    nodes.start(2)
    nodes.wait_step(1, 2, least=6)
    os.kill(nodes.pid(1, 1), signal.SIGKILL)
    nodes.wait_step(2, 2, least=6)
    (nodes.told / "hang").write_text("2 2")
    nodes.wait_step(3, 2)
    nodes.finish_well()
    assert nodes.numbers(0) == nodes.numbers(1) == [(0, 2), (1, 3), (2, 3), (3, 3)]
    assert nodes.numbers(2) == [(1, 3), (2, 3), (3, 3)]
    assert nodes.incidents() == [("crash", [(1, "host1")]), ("hang", [(2, "host2")])], nodes.screens
    for started in nodes.jobs.values():
        assert "rank 1 on host1 died by SIGKILL" in started.screen
        assert "rank 2 on host2 stands still" in started.screen


@pytest.mark.release
def test_a_node_that_loses_its_power(cluster):
    """Nothing of it is heard any more, no connection is closed: it is named, and the rest goes on without it.

    From the last checkpoint; and with it again when it is back.
    """
    nodes = cluster(3, "2:3")
    before = nodes.wait_step(0, 2, least=11)
    nodes.hosts[2].cut()
    nodes.kill(2)
    nodes.wait_step(1, 1, least=before + 5)
    nodes.hosts[2].restore()
    nodes.start(2)
    nodes.wait_step(2, 2)
    nodes.finish_well()
    assert nodes.incidents() == [("hang", [(2, "host2")])], nodes.screens
    (incident,) = nodes.any.incidents()
    assert (incident["category"], incident["cause"]) == ("network", "network_node_unreachable")
    assert incident["victims"] == [0, 1]
    assert (
        10.0 < incident["detection_latency_s"] < 30.0
    )  # measured: 16.5; within the 15 s that a node may be silent nothing is said
    assert before - 5 < nodes.first_step(1, 0) <= before + 3
    assert nodes.numbers(0) == nodes.numbers(1) == [(0, 3), (1, 2), (2, 3)]
    for node in (0, 1):
        assert "nothing has been heard of host2 (rank 2)" in nodes.jobs[node].screen


@pytest.mark.release
def test_a_killed_node_is_waited_for_where_it_is_needed(cluster):
    """Launcher and rank of the second of two nodes are killed: the first says so, waits, and goes on with it."""
    nodes = cluster(2)
    nodes.wait_step(0, 1, least=11)
    nodes.kill(1)
    nodes.wait_said(0, "waiting for the other nodes at host0:29400")
    assert "host1 (rank 1) is gone" in nodes.jobs[0].screen
    nodes.start(1)
    nodes.wait_step(1, 1)
    nodes.finish_well()
    assert nodes.incidents() == [("crash", [(1, "host1")])], nodes.screens
    assert nodes.numbers(0) == [(0, 2), (1, 2)]
    assert nodes.numbers(1) == [(0, 2), (1, 2)]
    assert nodes.first_step(1, 1) >= 10


def test_the_node_with_the_store_is_killed(cluster):
    """The other one says so and tries to reach it: when it is back both go on, when it is not, that has an end."""
    nodes = cluster(2, join_s=20)
    nodes.wait_step(0, 1, least=11)
    nodes.kill(0)
    nodes.wait_said(1, "the rendezvous store at host0:29400 does not answer")
    assert "host0 (rank 0) is gone" in nodes.jobs[1].screen
    nodes.start(0)
    nodes.wait_step(1, 0, least=16)
    assert nodes.numbers(0) == nodes.numbers(1) == [(0, 2), (1, 2)]
    assert nodes.incidents() == [("crash", [(0, "host0")])], nodes.screens
    nodes.kill(0)
    assert nodes.jobs[1].finish() == 1
    assert "failed: the nodes did not meet" in nodes.jobs[1].screen
    assert nodes.any.outcome()["checkpoint"] >= 15


@pytest.mark.release
def test_a_cable_that_is_pulled_and_put_back(cluster):
    """For a second: nothing ends. For long: the node is named, and both go on from the last checkpoint."""
    nodes = cluster(2)
    seen = nodes.wait_step(0, 1, least=11)
    nodes.hosts[1].cut()
    threading.Event().wait(1.0)  # how long the cable is out is what is tested
    nodes.hosts[1].restore()
    seen = nodes.wait_step(0, 1, least=seen + 10)
    assert not nodes.any.events("attempt_end") + nodes.any.events("confirmed"), nodes.screens
    nodes.hosts[1].cut()
    nodes.any.wait_event("attempt_end", attempt=0, count=2)
    nodes.hosts[1].restore()
    nodes.wait_step(1, 1)
    nodes.finish_well()
    assert nodes.incidents() == [("hang", [(1, "host1")])], nodes.screens
    assert nodes.any.incidents()[0]["cause"] == "network_node_unreachable"
    assert seen - 5 < nodes.first_step(1, 1)
    assert nodes.numbers(0) == nodes.numbers(1) == [(0, 2), (1, 2)]


@pytest.mark.parametrize("whom", [pytest.param("launcher", marks=pytest.mark.release), "rank"])
def test_one_node_is_preempted(cluster, whom):
    """SIGTERM to one launcher, or one rank, of three: all ranks stop at one step, nothing is lost, 75 everywhere."""
    nodes = cluster(3)
    nodes.wait_step(0, 2, least=6)
    os.kill(nodes.jobs[1].process.pid if whom == "launcher" else nodes.pid(0, 1), signal.SIGTERM)
    assert [started.finish() for started in nodes.jobs.values()] == [75, 75, 75], nodes.screens
    stops = nodes.any.events("stop_agreed")
    assert {event["rank"] for event in stops} == {0, 1, 2}
    assert len({(event["step"], event["check"]) for event in stops}) == 1, stops
    (incident,) = nodes.any.incidents()
    assert (incident["kind"], incident["lost_steps"]) == ("preemption", 0)
    assert nodes.any.outcome()["checkpoint"] == stops[0]["step"]
    assert not nodes.any.left_behind()


@pytest.mark.release
def test_a_node_that_is_cut_off_for_good(cluster):
    """The other one goes on alone and finishes; what the one that was left behind says last is true of the job, too."""
    nodes = cluster(2, "1:2", join_s=30)
    nodes.wait_step(0, 1, least=11)
    nodes.hosts[1].cut()
    nodes.wait_step(1, 0, watch=0)
    (nodes.told / "enough").touch()
    ends = {node: started.finish() for node, started in nodes.jobs.items()}
    assert ends == {0: 0, 1: 0}, nodes.screens
    last = nodes.jobs[1].last_lines()
    assert "finished: the other nodes went on without this one, and all their ranks exited with 0" in last
    assert "to run it again:" not in last
    assert "to resume:" not in last
    assert nodes.any.outcome()["verdict"] == "finished"
