"""Batch scripts of `resilience slurm` under a real Slurm: jobs that are disturbed end by themselves, finished."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import psutil
import pytest
from accounts import account_of
from slurm_cluster import NODES, Cluster, cluster, why_not
from told_fleet import ToldFleetRun

from resilience_sdk.core.journal import read_journal
from resilience_sdk.history.indexer import Index
from resilience_sdk.system.hostinfo import process_is_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no Slurm can be started: {why_not()}"),
]
PROJECT = Path(__file__).parents[2]
TRAINING = Path(__file__).parent / "scripts" / "slurm_training.py"
TOTAL = 200  # at a tenth of a second each: a job is disturbed long before
LONG = 700  # longer than a minute
MOST_LOST = 11  # it saves every ten steps
AWKWARD = ("it's", '"two words"', "$HOME `id` \\", "tab\tand\r\nline", "#SBATCH --nodes=9", "-N", "")


@attrs.define
class Disturbed:
    """A submitted job, and what its ranks wrote down."""

    slurm: Cluster
    number: int
    folder: Path
    total: int

    @property
    def screen(self) -> str:
        """All that the job printed, in all its starts."""
        path = self.folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def run_dir(self) -> Path:
        """The run directory that the job has by default."""
        return self.folder / "resilience-runs" / f"slurm-{self.number}"

    def steps(self, rank: int = 0) -> list[tuple[int, int, int]]:
        """Return what each step of a rank told: requeues of the job, number of its start in one, step."""
        path = self.folder / f"steps-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(first), int(second), int(third)) for first, second, third in map(str.split, lines)]

    def tell(self) -> str:
        """Return what explains a failure."""
        return f"{self.screen}\nsteps: {self.steps()[-3:]}\n{self.slurm.logs()}"

    def wait_step(self, step: int) -> None:
        """Wait until rank 0 has done a step."""
        self.slurm.wait(lambda: any(done >= step for *_, done in self.steps()), self.tell, 60.0)

    def launcher(self, node: int) -> psutil.Process:
        """Return the launcher on a node of the running job."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[1:4] != ["-m", "resilience_sdk", "run"] or str(self.run_dir) not in words:
                    continue
                if process.environ().get("SLURM_NODEID") == str(node):
                    return process
        raise AssertionError(f"no launcher on node {node}:\n{self.tell()}")

    def finish(self) -> dict[str, str]:
        """Wait for the end, check that the training is complete, and return what Slurm tells."""
        end = self.slurm.wait_over(self.number, self.tell)
        assert end["JobState"] == "COMPLETED", self.tell()
        assert (self.run_dir / "finished").exists(), self.tell()
        assert "DUE TO TIME LIMIT" not in self.screen
        return end

    def lost_steps(self, rank: int = 0) -> int:
        """Return how many steps were done twice; fails if one was left out."""
        done = [step for *_, step in self.steps(rank)]
        assert set(done) == set(range(self.total))
        return len(done) - self.total


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    """One cluster for all tests of this file."""
    with cluster() as started:
        yield started


def submit(
    slurm: Cluster, folder: Path, *options: str, total: int = TOTAL, words: tuple[str, ...] = (), slow_starts: int = 1
) -> Disturbed:
    """Print a batch script as a user does, with these options, and submit it."""
    folder.mkdir(exist_ok=True)
    env = {**slurm.env, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["SLOW_STARTS"] = str(slow_starts)
    command = [sys.executable, "-m", "resilience_sdk", "slurm", *options, str(TRAINING), str(folder), str(total)]
    printed = subprocess.run([*command, *words], env=env, cwd=folder, capture_output=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    (folder / "job.sh").write_bytes(printed.stdout)
    return Disturbed(slurm, slurm.submit(folder / "job.sh", folder, env=env), folder, total)


@pytest.fixture(scope="module")
def short_of_time(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Disturbed:
    """A job that needs longer than it may take; submitted first, since Slurm's shortest limit is a minute."""
    return submit(slurm, tmp_path_factory.mktemp("limit"), "--time", "1", "--signal", "TERM@10", total=LONG)


@pytest.mark.release
def test_a_killed_launcher_is_started_again_in_the_allocation(
    slurm: Cluster, short_of_time: Disturbed, tmp_path: Path
) -> None:
    """SIGKILL to the launcher of one node: nothing is asked of the queue, and the job resumes from its checkpoint.

    The other node's launcher would wait ten minutes for it.
    """
    job = submit(slurm, tmp_path, "--nodes", "2", "--job-name", "two words #1")
    job.wait_step(25)
    assert slurm.run("squeue", "--noheader", "--format=%j", f"--jobs={job.number}") == "two words #1"
    job.launcher(node=1).kill()
    slurm.wait(lambda: "retry 1 of 2" in job.screen, job.tell, 45.0)
    end = job.finish()
    assert end["Restarts"] == "0"
    assert "exit code 137" in job.screen
    assert 0 <= job.lost_steps() <= MOST_LOST


@pytest.mark.release
def test_a_requeued_job_resumes(slurm: Cluster, tmp_path: Path) -> None:
    """`scontrol requeue` by an operator, twice; arguments of the script survive shell and Slurm as they are."""
    requeued_twice(slurm, tmp_path)
    assert json.loads((tmp_path / "argv-0").read_text()) == list(AWKWARD)


@pytest.mark.release
def test_requeued_jobs_make_one_account(slurm: Cluster, tmp_path: Path) -> None:
    """Three jobs make one account, in which the time between them is nobody's."""
    buckets = account_of(requeued_twice(slurm, tmp_path).run_dir)
    assert buckets["idle"] > 0
    assert buckets["preempted"] > 0
    assert buckets["startup"] > 0


def requeued_twice(slurm: Cluster, tmp_path: Path) -> Disturbed:
    job = submit(slurm, tmp_path, words=AWKWARD, slow_starts=2)
    for step in (25, 75):
        job.wait_step(step)
        slurm.run("scontrol", "requeue", str(job.number))
    assert job.finish()["Restarts"] == "2"
    assert job.lost_steps() == 0
    return job


@pytest.mark.release
def test_a_signal_by_scancel_is_a_preemption(slurm: Cluster, tmp_path: Path) -> None:
    """`scancel --signal=TERM`: the ranks save and stop at one step, and the job requeues itself; no step is lost."""
    job = submit(slurm, tmp_path, "--cpus-per-task", "2", "--nproc-per-node", "2")
    job.wait_step(25)
    slurm.run("scancel", "--signal=TERM", str(job.number))
    assert job.finish()["Restarts"] == "1"
    assert "exit code 75; requeue" in job.screen
    assert [job.lost_steps(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.release
def test_two_nodes_meet_again_after_a_preemption(slurm: Cluster, tmp_path: Path) -> None:
    """One launcher per node, and a rendezvous from the node list in each start of the job; no step is lost."""
    job = submit(slurm, tmp_path, "--nodes", "2", "--signal", "TERM@8")
    job.wait_step(25)
    slurm.run("scancel", "--signal=TERM", str(job.number))
    assert job.finish()["Restarts"] == "1"
    assert "exit code 75; requeue" in job.screen
    assert [job.lost_steps(rank) for rank in (0, 1)] == [0, 0]


@pytest.mark.release
def test_a_job_that_comes_back_leaves_out_a_suspect_node(slurm: Cluster, tmp_path: Path) -> None:
    """The node that it ran on has failed in two other runs, by the history: the requeued job lands on another one."""
    runs = tmp_path / "resilience-runs"
    job = submit(slurm, tmp_path)
    job.wait_step(25)
    (first,) = nodes_of(job)
    for number in (1, 2):
        run = ToldFleetRun.make(runs / f"earlier{number}", NODES, at=time.time() - 86400 * number)
        run.start()
        run.at += 3600
        run.fail(first, "gpu_fell_off_bus", "hardware", action="exclude_node")
        run.end()
    index = Index(str(runs / "history.db"))
    index.add([runs])
    index.close()
    slurm.run("scancel", "--signal=TERM", str(job.number))
    end = job.finish()
    assert f"exit code 75; requeue without {first}" in job.screen
    assert f"left out: {first}: suspect: 2 independent failures in 2 runs" in job.screen
    assert (end["Restarts"], end["ExcNodeList"]) == ("1", first)
    assert nodes_of(job) == [first, next(node for node in NODES if node != first)]
    assert job.lost_steps() == 0


def nodes_of(job: Disturbed) -> list[str]:
    """Return where the attempts of a job have run, as Slurm calls the nodes."""
    events = read_journal(job.run_dir / "journal").events
    return [event["scheduler_node"] for event in events if event["event"] == "attempt_start"]


@pytest.mark.release
def test_a_cancelled_job_stays_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    """`scancel` without a signal ends the job for good: no requeue, no process left."""
    job = submit(slurm, tmp_path)
    job.wait_step(5)
    lease = json.loads((job.run_dir / "lease.json").read_text())
    slurm.run("scancel", str(job.number))
    end = slurm.wait_over(job.number, job.tell)
    assert end["JobState"] == "CANCELLED"
    slurm.wait(lambda: process_is_gone(lease["pid"], lease["start_ticks"]), job.tell, 40.0)
    slurm.wait(lambda: not slurm.run("squeue", "--noheader", "--jobs", str(job.number), check=False), job.tell, 40.0)
    end = slurm.job(job.number)
    assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0")
    assert "; requeue" not in job.screen
    assert not (job.run_dir / "finished").exists()


def test_a_time_limit_is_a_preemption(short_of_time: Disturbed) -> None:
    """The signal arrives before the limit; the job saves, requeues itself and goes on where it stopped."""
    assert int(short_of_time.finish()["Restarts"]) >= 1
    assert "exit code 75; requeue" in short_of_time.screen
    assert short_of_time.lost_steps() == 0
    starts = [
        event for event in read_journal(short_of_time.run_dir / "journal").events if event["event"] == "run_start"
    ]
    assert len(starts) >= 2
