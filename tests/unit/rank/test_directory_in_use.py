"""A run directory that another living job uses: what resumes is refused, what is only watched goes beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_sdk.core.lease import Lease, WriterLease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.system.hostinfo import host_name

BEAT = "import resilience_sdk\nwith resilience_sdk.heartbeat():\n    pass\n"
START = """
import sys, resilience_sdk
from resilience_sdk.errors import DirectoryInUseError

arguments = eval(sys.argv[1])
try:
    with resilience_sdk.start_run(**arguments):
        print("started")
except DirectoryInUseError as error:
    print("refused:", error)
"""
NAMED = "{'run_dir': 'run', 'state': {}}"
STATE = "{'state': {}}"


@pytest.fixture
def used(tmp_path):
    """A directory that another job holds, whose rank 0 is this process."""
    run_dir = RunDirectory.create(tmp_path / "run")
    leases = [kind.acquire(run_dir, "another") for kind in (Lease, WriterLease)]
    yield run_dir
    for lease in leases:
        lease.release()


def run(folder: Path, code: str, *args: str, **env: str) -> tuple[str, str]:
    """Run a process of its own in `folder`; return what it printed and what we said."""
    (folder / "pages").mkdir(exist_ok=True)
    env |= {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "RESILIENCE_PAGE_DIR": str(folder / "pages")}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def others(used: RunDirectory) -> list[str]:
    """Return the run directories that were made beside the one in use."""
    return sorted(path.name for path in used.path.parent.iterdir() if path.name.startswith("run."))


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (NAMED, {}),
        ("{'run_dir': 'run'}", {}),
        (STATE, {"RESILIENCE_RUN_DIR": "run"}),
        ("{'state': {}, 'run_dir': None, 'checkpoint_keep': 3}", {"RESILIENCE_RUN_DIR": "run"}),
    ],
    ids=["named by the code", "named, without state", "named by the environment", "with options"],
)
def test_a_run_is_refused_and_leaves_nothing(used, tmp_path, arguments, env):
    """It says who has the directory and what to do; it never begins anew in another one."""
    out, _ = run(tmp_path, START, arguments, **env)
    assert out.startswith("refused: "), out
    for word in (str(used.path), f"job another (host {host_name()}, pid {os.getpid()})", "name another directory"):
        assert word in out
    assert others(used) == []
    assert not list(used.journal.glob("*.jsonl"))


def test_a_loop_that_saves_nothing_goes_beside_it(used, tmp_path):
    """Heartbeats alone: the training is not ended for that, and one line says where it is watched."""
    _, said = run(tmp_path, BEAT, RESILIENCE_RUN_DIR="run")
    assert said.count("is in use by another job; this one uses") == 1
    assert others(used) == ["run.2"]


@pytest.mark.parametrize("arguments", [NAMED, STATE])
def test_a_run_in_a_job_that_went_beside_it_is_refused(used, tmp_path, arguments):
    """As under `resilience_sdk.auto`, which starts the recording before the script."""
    out, _ = run(tmp_path, BEAT + START, arguments, RESILIENCE_RUN_DIR="run")
    assert out.startswith("refused: "), out
    assert f"{used.path} was in use by another job" in out
    assert "RESILIENCE_RUN_DIR" in out


def test_a_directory_that_nobody_named_may_get_a_number(tmp_path):
    """Two jobs in one allocation: the second one's default is beside the first one's, and it says so."""
    run_dir = RunDirectory.create(tmp_path / "resilience-runs" / "slurm-7")
    lease = Lease.acquire(run_dir, "another")
    out, said = run(tmp_path, START, "{}", SLURM_JOB_ID="7")
    lease.release()
    assert out == "started\n"
    assert "slurm-7.2" in said


def test_a_job_that_is_just_leaving_is_waited_for(tmp_path):
    """Its ranks have ended, its monitor has not looked yet: a script that trains twice is not refused."""
    run_dir = RunDirectory.create(tmp_path / "run")
    with subprocess.Popen(["sleep", "1"]) as monitor:
        lease = Lease.acquire(run_dir, "another")
        text = run_dir.lease.read_text().replace(f'"pid": {os.getpid()}', f'"pid": {monitor.pid}')
        lease.release()
        run_dir.lease.write_text(text.replace('"start_ticks": ', '"was": '))
        assert run(tmp_path, START, "{'run_dir': 'run'}")[0] == "started\n"


def test_under_a_foreign_launcher_the_directory_beside_it_is_used(used, tmp_path):
    """Its ranks of another node may have made up a key of their own, and then the directory is this very job's."""
    out, said = run(tmp_path, START, NAMED, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert out == "started\n"
    assert said.count("is in use by another job; this one uses") == 1
    assert others(used) == ["run.2"]
