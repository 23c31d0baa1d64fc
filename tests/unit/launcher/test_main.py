"""What the launcher settles before its first attempt: the run directory, and what an outer launcher said."""

import os
import signal

import pytest

from resilience_sdk.core import environ
from resilience_sdk.core.lease import Lease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.launcher import env
from resilience_sdk.launcher.main import _job_key, _open_run_dir, main
from resilience_sdk.launcher.options import parse_options

TWO_NODES = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "x")


@pytest.fixture(autouse=True)
def handlers_as_before():
    """A launcher that is over keeps its handlers, which end the process: here that of the tests."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parse options for a script, in a folder and an environment of its own."""
    for name in [name for name in os.environ if name.startswith(("PET_", "RESILIENCE_", "SLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return lambda *argv: parse_options([*argv, "train.py"])


def used(path):
    """A run directory in which something was done."""
    run = RunDirectory.create(path)
    (run.journal / "old.jsonl").touch()
    return run


def left(folder):
    return sorted(path.name for path in folder.glob("run*"))


def test_several_nodes_need_a_named_directory(parse, tmp_path, monkeypatch):
    """Each would make its own, and no checkpoint would be whole; a scheduler's job names one."""
    with pytest.raises(ConfigError, match=r"--nnodes 2.*--run-dir"):
        _open_run_dir(parse(*TWO_NODES))
    assert not (tmp_path / "resilience-runs").exists()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert _open_run_dir(parse(*TWO_NODES))[0].path.name == "slurm-7"


def test_fresh_sets_aside_what_is_there(parse, tmp_path):
    """One node: whatever is there is renamed, with no lease in it, unless a job uses it."""
    used(tmp_path / "run")
    options = parse("--run-dir", "run", "--fresh")
    run, named = _open_run_dir(options)
    assert named
    assert run.is_unused()
    assert len(left(tmp_path)) == 2
    assert not list(tmp_path.glob("run*/lease.json"))
    Lease.acquire(run, "another-job")
    with pytest.raises(RunDirectoryError, match="in use"):
        _open_run_dir(options)


def test_fresh_on_several_nodes_sets_aside_once(parse, tmp_path):
    """The node that comes second finds the directory new, held by its own job or not yet, and joins."""
    used(tmp_path / "run")
    options = parse("--run-dir", "run", "--fresh", *TWO_NODES)
    first, _ = _open_run_dir(options)
    assert len(left(tmp_path)) == 2
    _open_run_dir(options)
    assert len(left(tmp_path)) == 2
    Lease.acquire(first, _job_key(options))
    (first.journal / "new.jsonl").touch()
    second, _ = _open_run_dir(options)
    assert (second.journal / "new.jsonl").exists()
    assert len(left(tmp_path)) == 2


def test_a_launcher_inside_a_rank_is_a_run_of_its_own(monkeypatch):
    """What the outer launcher said to its rank is forgotten; what a user said to this launcher is not."""
    monkeypatch.setattr(os, "environ", {environ.RUN_DIR: "/outer", environ.INTERNAL_JOB: "j"})
    env.prepare_launcher()
    assert not {environ.RUN_DIR, environ.INTERNAL_JOB} & set(os.environ)
    monkeypatch.setattr(os, "environ", {})
    env.provide_nvrx({})
    assert environ.NVRX_MONITOR in os.environ
    env.prepare_launcher()
    assert environ.NVRX_MONITOR not in os.environ
    theirs = {environ.RUN_DIR: "/mine", environ.NVRX_MONITOR: "/of/nvidia"}
    monkeypatch.setattr(os, "environ", dict(theirs))
    env.prepare_launcher()
    assert theirs.items() <= os.environ.items()


def test_a_finished_directory_is_told_to_a_script_that_waits_for_its_own_flag(parse, tmp_path, monkeypatch):
    """`while [ ! -f $FLAG ]` would start it for ever."""
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "flag"))
    monkeypatch.setattr(env, "prepare_launcher", lambda: None)  # it changes the environment of this process
    used(tmp_path / "run").finished.touch()
    assert main(["--run-dir", str(tmp_path / "run"), "train.py"]) == 0
    assert (tmp_path / "flag").exists()
