"""Two launchers on one machine as the two nodes of a job: hangs, deaths, and the loss of one of them."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from harness import Job, is_running, job

DEADLINE_S = 1.0
ON_TIME_S = 1.5  # beyond the deadline; measured: about 0.5 on an idle machine


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
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    told, run_dir = folder / "told", folder / "run"
    told.mkdir()
    with contextlib.ExitStack() as stack:
        jobs = []
        for node in (0, 1):
            own = folder / f"node{node}"
            own.mkdir()
            started = job(
                own,
                *("--run-dir", str(run_dir), "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", str(per_node), "--rdzv-backend", "c10d", "--rdzv-id", "two"),
                *("--rdzv-endpoint", f"localhost:{port}", "--heartbeat-timeout", str(DEADLINE_S), *options),
                *("training.py", *args),
                env={"TOLD": str(told)} | ({"RESILIENCE_FAULT": fault} if fault else {}),
            )
            jobs.append(stack.enter_context(started))
            jobs[-1].run_dir = run_dir
        yield TwoNodes(*jobs)


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_hang_on_another_node_is_told_at_its_deadline(tmp_path, per_node):
    """The rank that stopped is named with its node, soon after its deadline, once; both nodes start again."""
    culprit = 2 * per_node - 1
    with two_nodes(tmp_path, per_node=per_node, fault=f"hang:how=sleep,rank={culprit},step=5,attempt=0") as nodes:
        assert nodes.finish() == [0, 0], nodes.screens
        (incident,) = nodes.first.incidents()
        (named,) = incident["culprits"]
        assert (incident["kind"], named["rank"]) == ("hang", culprit)
        assert named["node"].endswith("#1")
        assert named["stack"]
        assert sorted(incident["victims"]) == [rank for rank in range(2 * per_node) if rank != culprit]
        assert DEADLINE_S <= incident["detection_latency_s"] < DEADLINE_S + ON_TIME_S
        assert incident["recovered_at"] is not None
        assert {end["ended_by"] for end in nodes.first.events("attempt_end", attempt=0)} == {"hang"}
        pages = (nodes.first.run_dir / "incidents" / incident["id"] / "pages").glob("*")
        assert len(list(pages)) == 2 * per_node


def test_a_rank_killed_on_one_node_is_one_incident(tmp_path):
    """Lost connections on the other node are no second incident, and both nodes start again."""
    with two_nodes(tmp_path, "--steps", "200") as nodes:
        os.kill(nodes.rank_pid(1), signal.SIGKILL)
        assert nodes.finish() == [0, 0], nodes.screens
        (incident,) = nodes.first.incidents()
        (named,) = incident["culprits"]
        assert (incident["kind"], incident["cause"], named["rank"]) == ("crash", "rank_killed_sigkill", 1)
        assert named["node"].endswith("#1")
        assert incident["recovered_at"] is not None


def test_a_monitor_that_died_is_replaced_and_the_hang_still_told(tmp_path):
    """The judgement of all nodes does without one of them until it is there again."""
    with two_nodes(tmp_path, fault="hang:how=sleep,rank=1,step=5,attempt=0") as nodes:
        nodes.rank_pid(1)
        os.kill(nodes.second.monitor_pid(), signal.SIGKILL)
        assert nodes.finish() == [0, 0], nodes.screens
        (incident,) = nodes.first.incidents()
        assert [culprit["rank"] for culprit in incident["culprits"]] == [1]


def test_a_launcher_that_died_leaves_the_other_node_its_judgement(tmp_path):
    """A whole node goes: the other one says that its ranks lost their peers, and ends them."""
    with two_nodes(tmp_path, "--until", str(tmp_path / "never"), options=("--max-restarts", "0")) as nodes:
        nodes.rank_pid(1)
        survivor = nodes.rank_pid(0)
        nodes.second.process.kill()
        assert nodes.first.finish() == 1, nodes.screens
        assert not is_running(survivor)
        (incident,) = nodes.first.incidents()
        assert incident["kind"] == "crash"
        assert incident["culprits"] == []
