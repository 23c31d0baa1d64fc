"""Two launchers on one machine as the two nodes of a job that is asked to leave: all ranks stop at one check."""

import contextlib
import os
import signal
import socket

import attrs
import pytest
from harness import Job, job

from resilience_sdk.checkpoint.store import verify_checkpoint

pytestmark = pytest.mark.slow  # two launchers with ranks of their own


@attrs.define
class Nodes:
    """Both launchers; run directory and what the ranks tell are shared."""

    jobs: list[Job]
    told: object

    @property
    def first(self):
        return self.jobs[0]

    @property
    def screens(self):
        """Both screens, for a failed assertion."""
        return "\n".join(f"--- node {node}\n{started.screen}" for node, started in enumerate(self.jobs))

    def finish(self):
        """Wait for all launchers and return their exit codes."""
        return [started.finish() for started in self.jobs]

    def wait_steps(self, ranks, steps=1):
        """Wait until that many ranks have done that many steps."""

        def are_there():
            found = [path.read_text() for path in self.told.glob("step-*")]
            return len(found) == ranks and all(int(text) >= steps for text in found)

        self.first.wait(are_there, f"{steps} steps of {ranks} ranks")

    def pid(self, rank):
        """Return the process of a rank."""
        return int((self.told / f"rank-{rank}").read_text())


@contextlib.contextmanager
def two_nodes(folder, *args, options=(), per_node=(1, 1)):
    """Start `preempted.py` with these arguments on two nodes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    told = folder / "told"
    told.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        jobs = []
        for node, ranks in enumerate(per_node):
            own = folder / f"node{node}-{len(list(folder.glob('node*')))}"
            own.mkdir()
            jobs.append(
                stack.enter_context(
                    job(
                        own,
                        *("--run-dir", str(folder / "run"), "--nnodes", "2", "--node-rank", str(node)),
                        *("--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "two"),
                        *("--rdzv-endpoint", f"localhost:{port}", *options, "preempted.py", *args),
                        env={"TOLD": str(told)},
                    )
                )
            )
            jobs[-1].run_dir = folder / "run"
        yield Nodes(jobs, told)


def losses(folder, rank=0):
    """Return the loss of every step; a step computed twice must have given the same."""
    found = {}
    for line in (folder / "told" / f"losses-{rank}").read_text().splitlines():
        step, value = line.split()
        assert found.setdefault(int(step), value) == value
    return found


def check_stopped(nodes, ranks=2):
    """Check the promises of a stop, and return the step at which all ranks stopped."""
    assert nodes.finish() == [75, 75], nodes.screens
    run = nodes.first
    stops = run.events("stop_agreed")
    assert {event["rank"] for event in stops} == set(range(ranks)), nodes.screens
    assert len({(event["step"], event["check"]) for event in stops}) == 1, stops
    (incident,) = run.incidents()
    assert (incident["kind"], incident["lost_steps"]) == ("preemption", 0), incident
    assert run.outcome()["verdict"] == "preempted"
    assert verify_checkpoint(max((run.run_dir / "checkpoints").glob("step-*"))).step == stops[0]["step"]
    assert run.outcome()["checkpoint"] == stops[0]["step"]
    assert not (run.run_dir / "finished").exists()
    assert not run.events("degraded"), run.events("degraded")
    assert not [left for started in nodes.jobs for left in started.left_behind()]
    return stops[0]["step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of a run of two ranks that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder, "--nproc-per-node", "2", "preempted.py", "--pause", "0") as run:
        assert run.finish() == 0, run.screen
    return losses(folder)


@pytest.mark.parametrize("whom", ["a rank of node 1", "the launcher of node 1 while rank 0 evaluates"])
def test_whoever_is_asked_on_one_node_all_ranks_of_both_stop_at_one_step(tmp_path, undisturbed, whom):
    """Exit 75 on both nodes, no step lost; the next start goes on with the losses of the undisturbed run."""
    slow = ["--slow", "7"] if "evaluates" in whom else []
    with two_nodes(tmp_path, "--steps", "60", "--pause", "0.05", *slow) as nodes:
        nodes.wait_steps(2, steps=5)
        if slow:
            nodes.first.wait(lambda: (nodes.told / "evaluates").exists(), "the evaluation")
            nodes.jobs[1].process.send_signal(signal.SIGTERM)
        else:
            os.kill(nodes.pid(1), signal.SIGTERM)
        stopped = check_stopped(nodes)
        assert any("another node was asked to leave" in started.screen for started in nodes.jobs)
    assert 5 < stopped < 60
    with two_nodes(tmp_path, "--steps", "60", "--pause", "0") as nodes:
        assert nodes.finish() == [0, 0], nodes.screens
    assert losses(tmp_path) == losses(tmp_path, rank=1) | undisturbed == undisturbed


def test_a_rank_that_never_checks_is_named_with_its_node(tmp_path):
    """On the screen of the other node, too; both launchers end their ranks when the time is over."""
    options = ("--preempt-time", "8")
    args = ("--style", "loop", "--steps", "100000", "--without", "1")
    with two_nodes(tmp_path, *args, options=options) as nodes:
        nodes.wait_steps(2)
        os.kill(nodes.pid(0), signal.SIGTERM)
        for started in nodes.jobs:
            started.wait(lambda started=started: "never calls preemption.check()" in started.screen, "the line")
            (line,) = (line for line in started.screen.splitlines() if "never calls" in line)
            assert "rank 1 on " in line
            assert "#1 never calls" in line
        for started in nodes.jobs:
            started.process.send_signal(signal.SIGTERM)
        assert nodes.finish() == [75, 75], nodes.screens
        assert not nodes.first.events("stop_agreed")


def test_a_store_that_does_not_answer_blocks_no_rank_and_the_stop_comes_after_it(tmp_path):
    """The launcher that has the store is stopped: training goes on; when it goes on, all stop at one step."""
    with two_nodes(tmp_path, "--steps", "100000", "--pause", "0.02") as nodes:
        nodes.wait_steps(2, steps=5)
        nodes.first.process.send_signal(signal.SIGSTOP)
        os.kill(nodes.pid(1), signal.SIGTERM)
        nodes.first.wait_event("preempt_notice")
        since = int((nodes.told / "step-0").read_text())
        nodes.wait_steps(2, steps=since + 30)
        nodes.first.process.send_signal(signal.SIGCONT)
        assert check_stopped(nodes) > since + 30
