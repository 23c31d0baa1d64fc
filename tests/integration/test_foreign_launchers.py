"""The same scripts under launchers that are not ours: explained, and left alone unless told otherwise.

And scripts that do not know us, under ours and under others.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import job

pytestmark = pytest.mark.slow  # several jobs under each launcher, at their own pace

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
# A restart of plain torchrun reads the dead attempt's addresses from a store that outlives it.
RESTARTING = (*TORCHRUN, "--max-restarts", "2")
RESTART_SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "RESILIENCE_ON_HANG": "kill"}
AUTO = ("-m", "resilience_sdk.auto")
PYTHON = (sys.executable,)
KERNEL = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
needs_exit_codes = pytest.mark.skipif(
    KERNEL < (6, 15), reason="before Linux 6.15 a launcher that collects its children at once hides how they ended"
)
STEPS = 150  # about a second: the monitor has come to see who dies first, and how
LONG = ("--steps", str(STEPS))
SHORT = {"RESILIENCE_HEARTBEAT_TIMEOUT": "1.2"}

# They hang until they are told to go on: (command, ranks, function at which the culprit stands)
HANGS = {
    "python": ((*PYTHON, "light.py", "hang"), 1),
    "torchrun": ((*TORCHRUN, "light.py", "hang"), 2),
    "srun": ((*PYTHON, "ranks.py", "2", "slurm", "light.py", "hang"), 2),
    "mpirun": ((*PYTHON, "ranks.py", "2", "mpi", "light.py", "hang"), 2),
    "spawn": ((*PYTHON, "foreign.py", "--how", "spawn", "--hang", "5"), 2),
    "fork": ((*PYTHON, "foreign.py", "--how", "fork", "--early", "--hang", "5"), 2),
}
# They hang, are ended and start again: command, or the arguments of `resilience run`, and settings.
RESTARTS = {
    "torchrun-kill": ((*RESTARTING, "foreign.py", "--hang", "5"), SHORT | RESTART_SETTINGS),
    "auto-kill": ((*RESTARTING, *AUTO, "plain.py", "--sgd", "--hang", "30"), SHORT | RESTART_SETTINGS),
    "run-plain": (("plain.py", "--sgd", "--hang", "30"), SHORT),
    "run-plainer": (("plain.py", "--steps", "900", "--hang", "500"), SHORT),
}
# One rank dies.
CRASHES = {
    "torchrun-raise": ((*TORCHRUN, "light.py", "raise"), {}),
    "early-raise": ((*PYTHON, "ranks.py", "2", "slurm", "light.py", "raise", "--steps", "0"), {}),
    "ranks-raise": ((*PYTHON, "ranks.py", "2", "slurm", "light.py", "raise", *LONG), {}),
    "ranks-kill": ((*PYTHON, "ranks.py", "2", "torch", "light.py", "kill", *LONG), {}),
    "ranks-exit": ((*PYTHON, "ranks.py", "2", "mpi", "light.py", "exit", *LONG), {}),
    "python-raise": ((*PYTHON, "light.py", "raise"), {}),
    "auto-raise": ((*PYTHON, *AUTO, "light.py", "raise"), {}),
    "torchrun-leave": ((*TORCHRUN, "light.py", "leave", *LONG), {}),
}


class Ended:
    """What is left of a job that is over."""

    def __init__(self, run) -> None:
        self.code = run.finish()
        self.left = run.left_behind()
        self.run = run
        self.incidents = run.incidents()
        self.outcome = run.outcome() if (run.run_dir / "outcome.json").exists() else None


def started(folder: Path, command: tuple[str, ...], env: dict[str, str]):
    """Start a foreign command, or `resilience run` where it begins with a script."""
    if command[0] != sys.executable:
        return job(folder, "--nproc-per-node", "2", *command, env=env)
    return job(folder, command=command, env=env)


def run_all(tmp_path_factory, jobs: dict, together: int) -> dict[str, Ended]:
    """Run jobs that end without anybody's help, some together, and return what is left of each."""
    folders = {name: tmp_path_factory.mktemp(name) for name in jobs}  # here: pytest's are not for threads

    def run(name: str) -> Ended:
        with started(folders[name], *jobs[name]) as running:
            return Ended(running)

    with ThreadPoolExecutor(together) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """All jobs that hang once, over now."""
    return run_all(tmp_path_factory, RESTARTS, 2)


@pytest.fixture(scope="module")
def crashed(tmp_path_factory):
    """All jobs in which a rank dies, over now."""
    return run_all(tmp_path_factory, CRASHES, 3)


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    """All jobs that hang until they are told to go on, over now."""

    folders = {name: tmp_path_factory.mktemp(name) for name in HANGS}

    def run(name: str) -> Ended:
        with started(folders[name], HANGS[name][0], SHORT) as running:
            running.wait(lambda: bool(running.incidents()), "the report of the hang")
            running.wait(lambda: "next:" in running.screen, "the message")
            (running.folder / "told" / "go").touch()
            return Ended(running)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(HANGS, pool.map(run, HANGS), strict=True))


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_reported_and_left_alone(hung, name):
    """Rank, step, section and stack are named once, peers are victims, and the job goes on when it can."""
    job_, ranks = hung[name], HANGS[name][1]
    assert job_.code == 0, job_.run.screen
    assert job_.left == []
    (found,) = job_.incidents
    (culprit,) = found["culprits"]
    assert culprit["rank"] == ranks - 1
    assert any(frame.endswith("hang_here") for frame in culprit["stack"][:2])
    assert culprit["step"] == (5 if "foreign.py" in HANGS[name][0] else 25)
    assert found["victims"] == list(range(ranks - 1))
    assert (found["kind"], found["action"]) == ("hang", "none")
    assert job_.run.screen.count("HANG: ") == 1
    assert f"HANG: rank {ranks - 1} on " in job_.run.screen
    assert "RESILIENCE_ON_HANG=kill would end them" in job_.run.screen
    assert not job_.run.events("signal_sent")
    assert len(job_.run.events("rank_start")) >= ranks


@pytest.mark.parametrize("name", HANGS)
def test_the_outcome_is_written_where_the_launcher_says_little(hung, name):
    """`outcome.json` has verdict, code and the incidents of the job."""
    outcome = hung[name].outcome
    assert (outcome["verdict"], outcome["exit_code"], outcome["attempts"]) == ("finished", 0, 1)
    assert outcome["incidents"] == ["0001-hang"]


def test_on_hang_kill_lets_torchrun_restart(restarted):
    """The culprit is ended, torchrun starts all ranks again, and the incident knows when they were back."""
    job_ = restarted["torchrun-kill"]
    assert job_.code == 0, job_.run.screen
    assert len(job_.incidents) == 1, (job_.incidents, job_.run.screen)
    (found,) = job_.incidents
    assert [culprit["rank"] for culprit in found["culprits"]] == [1]
    assert found["recovered_at"] > found["detected_at"]
    assert {event["rank"] for event in job_.run.events("signal_sent")} == {1}
    assert "the stuck ranks are ended, so that the launcher's restart policy acts" in job_.run.screen
    assert job_.run.screen.count("HANG: ") == 1
    assert "CRASH" not in job_.run.screen
    assert (job_.outcome["verdict"], job_.outcome["attempts"]) == ("finished", 2)
    assert job_.outcome["incidents"] == ["0001-hang"]
    assert job_.left == []


@pytest.mark.parametrize("name", ["auto-kill", "run-plain", "run-plainer"])
def test_a_script_that_does_not_know_us_is_named_and_restarted(restarted, name):
    """Optimizer steps, else collectives, tell that it moved; the flight record tells who did not come."""
    job_ = restarted[name]
    assert job_.code == 0, job_.run.screen
    assert len(job_.incidents) == 1, (job_.incidents, job_.run.screen)
    (found,) = job_.incidents
    assert [culprit["rank"] for culprit in found["culprits"]] == [1]
    assert found["victims"] == [0]
    assert any(frame.endswith(" hang") for frame in found["culprits"][0]["stack"])
    assert any(item["source"] == "flight" for item in found["evidence"])
    assert found["recovered_at"] > found["detected_at"]
    assert job_.run.out.count("finished") == 2
    assert job_.left == []
    pages = job_.run.incident_file(found, "pages/rank-1.json")
    assert f'"{"collectives" if name == "run-plainer" else "optimizer"}"' in pages


@pytest.mark.parametrize("name", ["run-plain", "run-plainer"])
def test_a_restart_says_whether_anything_resumes(restarted, name):
    """A script that saves nothing with us begins anew unless it loads its own state, and is told so."""
    assert (
        "starting the ranks again (restart 1 of 3): nothing saved by the SDK to resume from"
        in restarted[name].run.screen
    )


@pytest.mark.parametrize(
    ("name", "cause", "ranks"),
    [
        ("torchrun-raise", "user_code_error", 2),
        ("ranks-raise", "user_code_error", 2),
        ("early-raise", "user_code_error", 2),
        pytest.param("ranks-kill", "rank_killed_sigkill", 2, marks=needs_exit_codes),
        pytest.param("ranks-exit", "unknown", 2, marks=needs_exit_codes),
        ("python-raise", "user_code_error", 1),
        ("auto-raise", "user_code_error", 1),
    ],
)
def test_the_first_death_is_named(crashed, name, cause, ranks):
    """A crash incident with culprit, step, cause, exception and stack; its peers are victims; the outcome says so."""
    job_ = crashed[name]
    assert job_.code != 0
    (found,) = job_.incidents
    (culprit,) = found["culprits"]
    assert (found["kind"], found["cause"], culprit["rank"]) == ("crash", cause, ranks - 1), found
    assert culprit["step"] == {"ranks": STEPS, "early": 0}.get(name.partition("-")[0], 25)
    assert found["victims"] == list(range(ranks - 1))
    assert f"CRASH: rank {ranks - 1} on " in job_.run.screen
    if cause == "user_code_error":
        assert any("ValueError: the loss is not a number" in item["text"] for item in found["evidence"])
        assert "light.py" in culprit["stack"][0]
        assert culprit["stack"][0].endswith(" work")
    assert (job_.outcome["verdict"], job_.outcome["exit_code"]) == ("give_up", 1)
    told = "ValueError: the loss is not a number" if cause == "user_code_error" else cause
    assert told in job_.outcome["reason"]
    assert told in next(line for line in job_.run.screen.splitlines() if "CRASH: " in line)
    assert job_.outcome["resume"].startswith("RESILIENCE_RUN_DIR=")
    assert str(job_.run.run_dir) in job_.outcome["resume"]
    assert job_.outcome["incidents"] == ["0001-crash"]
    assert job_.left == []


@needs_exit_codes
def test_a_rank_that_leaves_as_asked_is_no_crash(crashed):
    """Exit code 75, to which torchrun answers by ending the others and with 1: a preemption without a culprit."""
    job_ = crashed["torchrun-leave"]
    assert job_.code == 1
    (found,) = job_.incidents
    assert (found["kind"], found["culprits"], found["victims"]) == ("preemption", [], []), found
    assert "CRASH" not in job_.run.screen
    assert f"incidents/{found['id']}/report.md" in job_.run.screen
    assert (job_.outcome["verdict"], job_.outcome["exit_code"]) == ("preempted", 75)
    assert job_.left == []


@pytest.mark.parametrize("command", [TORCHRUN, (*TORCHRUN, *AUTO)])
def test_switched_off_it_is_not_there(tmp_path, command):
    """`RESILIENCE_DISABLE=1`: one line, and no directory, page or process."""
    with job(tmp_path, "light.py", "upload", command=command, env={"RESILIENCE_DISABLE": "1"}) as run:
        run.wait(lambda: run.out.count("begin") == 2, "the last phase")
        commands = [text for text in run.processes().values() if "torch.distributed.run" not in text]
        assert len(commands) == 2
        assert all("light.py" in text for text in commands)
        assert run.finish() == 0, run.screen
        assert not run.run_dir.exists()
        assert not list(run.pages.iterdir())
        said = [line for line in run.screen.splitlines() if line.startswith("resilience: ")]
        assert said == ["resilience: switched off (RESILIENCE_DISABLE): nothing is watched, recorded or restarted"]
        assert sorted(os.listdir(tmp_path)) == ["err", "out", "told"]


def test_a_script_that_shows_no_progress_is_not_judged(tmp_path):
    """Without heartbeats, optimizer steps and collectives no hang can be told, and that is said once."""
    options = ("--nproc-per-node", "2", "--start-method", "exec", "--timeout-floor", "0.3")
    with job(tmp_path, *options, "light.py", "mute", "--slow", "3") as run:
        assert run.finish() == 0, run.screen
        assert run.screen.count("no progress signal so far") == 1
        assert run.events("degraded", what="no progress signal")
        assert not run.incidents()
        assert not run.events("suspect")
