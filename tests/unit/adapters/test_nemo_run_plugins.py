"""The plugins for NeMo-Run against its documented interface; `tests/integration/test_nemo_run.py` has the package."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
from adapter_frameworks import require

from resilience_sdk.adapters.lightning import FaultToleranceCallback, PreemptionCallback
from resilience_sdk.errors import ConfigError, MissingExtraError

MODULE = "resilience_sdk.adapters.lightning.plugins"


@dataclass(kw_only=True)
class Launcher:
    nsys_profile: bool = False


@dataclass(kw_only=True)
class Plugin:
    experiment_id: str = field(init=False, default="")


@dataclass
class Script:
    path: str = ""
    args: list[str] = field(default_factory=list)
    entrypoint: str = "bash"
    m: bool = False


class Config:
    def __init__(self, fn, **values):
        self.fn = fn
        self.__dict__.update(values)

    def __eq__(self, other):
        return isinstance(other, Config) and vars(self) == vars(other)

    __hash__ = None


@dataclass(kw_only=True)
class LocalExecutor:
    launcher: Any = None
    env_vars: dict[str, str] = field(default_factory=dict)
    retries: int = 0
    job_dir: str = "/here/job"
    ntasks_per_node: int = 2
    nodes: int = 1

    def nnodes(self):
        return self.nodes

    def nproc_per_node(self):
        return self.ntasks_per_node


@dataclass(kw_only=True)
class SlurmExecutor(LocalExecutor):
    torchrun_nproc_per_node: int | None = None
    srun_args: list[str] | None = None
    setup_lines: str | None = None
    signal: str | None = None
    tunnel: Any = field(default_factory=lambda: types.SimpleNamespace(job_dir="/there"))


@pytest.fixture
def plugins(monkeypatch):
    """The module, with what NeMo-Run documents in the place of the package."""
    interface = (Plugin, Script, Config, LocalExecutor, SlurmExecutor)
    run = types.ModuleType("nemo_run")
    for each in interface:
        setattr(run, each.__name__, each)
    launchers = types.ModuleType("nemo_run.core.execution.launcher")
    launchers.Launcher = Launcher
    for name in ("nemo_run.core", "nemo_run.core.execution"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "nemo_run", run)
    monkeypatch.setitem(sys.modules, launchers.__name__, launchers)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield importlib.import_module(MODULE)
    sys.modules.pop(MODULE, None)


def recipe(*callbacks):
    return Config(print, trainer=Config(dict, callbacks=list(callbacks)), log=Config(dict, log_dir="logs"))


def test_without_nemo_run_it_is_named(monkeypatch):
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "nemo_run", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(MissingExtraError, match="pip install nemo_run"):
        importlib.import_module(MODULE)


def test_one_node_of_slurm_is_started_by_our_launcher(plugins):
    """Once per node, with the ranks of the executor; timeouts that nobody gave are learned."""
    executor, task = SlurmExecutor(ntasks_per_node=8), recipe("mine")
    plugins.FaultTolerancePlugin().setup(task, executor)
    assert (executor.ntasks_per_node, executor.torchrun_nproc_per_node, executor.retries) == (1, 8, 0)
    script = executor.launcher.transform(["python", "-m", "nemo_run.core.runners.fdl_runner", "-n", "name", "config"])
    assert (script.entrypoint, script.m, script.path) == ("python", True, "resilience_sdk")
    command = "run --run-dir /nemo_run/resilience --max-restarts 3 --nproc-per-node 8"
    assert script.args == [*command.split(), "-m", "nemo_run.core.runners.fdl_runner", "-n", "name", "config"]
    first, ours = task.trainer.callbacks
    assert first == "mine"
    assert ours == Config(FaultToleranceCallback, autoresume=True, calculate_timeouts=True, exp_dir="logs")
    assert executor.supports_launcher_transform()


def test_several_nodes_meet_and_arguments_are_handed_on(plugins):
    """What has a dollar sign is for the shell of NeMo-Run's batch script, which knows the address of its first node."""
    executor = SlurmExecutor(nodes=4, srun_args=["--mpi=none"], setup_lines="module load x")
    plugin = plugins.FaultTolerancePlugin(
        num_in_job_restarts=0,
        num_job_retries_on_failure=5,
        initial_rank_heartbeat_timeout=1800,
        rank_heartbeat_timeout=300,
    )
    plugin.setup(recipe(), executor)
    words = " ".join(executor.launcher.options())
    assert "--max-restarts 0 --initial-heartbeat-timeout 1800 --heartbeat-timeout 300 --nproc-per-node 2" in words
    assert "--nnodes 4 --rdzv-backend c10d --rdzv-endpoint $head_node_ip:29500 --rdzv-id $SLURM_JOB_ID-" in words
    assert executor.srun_args == ["--mpi=none", "--wait=0", "--kill-on-bad-exit=0"]
    assert executor.setup_lines.startswith("module load x\n")
    assert "/there/job/resilience-retries" in executor.setup_lines


def test_a_script_is_started_too_but_gets_no_callback(plugins, capfd):
    """One line says so; a program that is no Python is one rank's whole command."""
    executor = LocalExecutor()
    plugins.FaultTolerancePlugin().setup(Script("train.sh"), executor)
    assert executor.launcher.transform(["bash", "train.sh"]).args[-3:] == ["--no-python", "bash", "train.sh"]
    assert executor.launcher.run_dir == "/here/job/resilience"
    assert "no callback is added" in capfd.readouterr().err


def test_what_cannot_be_served_is_an_error_with_its_cure(plugins):
    """Other executors, and Nsys."""
    with pytest.raises(ConfigError, match=r"SimpleNamespace is not supported, use run\.SlurmExecutor"):
        plugins.FaultTolerancePlugin().setup(recipe(), types.SimpleNamespace(launcher=None))
    with pytest.raises(ConfigError, match="Nsys is not supported"):
        plugins.FaultTolerancePlugin().setup(recipe(), SlurmExecutor(launcher=Launcher(nsys_profile=True)))


def test_the_preemption_plugin_has_slurm_send_the_signal(plugins):
    """So long before the time is up; its callback is added once, and another one may be given."""
    executor, task = SlurmExecutor(), recipe()
    plugins.PreemptionPlugin(preempt_time=90).setup(task, executor)
    plugins.PreemptionPlugin(preempt_time=90).setup(task, executor)
    assert executor.signal == "TERM@90"
    assert executor.env_vars == {"RESILIENCE_PREEMPT_TIME": "90"}
    assert task.trainer.callbacks == [Config(PreemptionCallback)]
    other, local = recipe(), LocalExecutor()
    plugins.PreemptionPlugin(callbacks=[Config(dict, sig=10)]).setup(other, local)
    assert other.trainer.callbacks == [Config(dict, sig=10)]
    assert local.env_vars == {}


@pytest.mark.parametrize(
    ("code", "lasted_s", "state", "requeued"),
    [
        ("75", 100, "RUNNING", [True] * 4),  # preempted: as often as it comes
        ("75", 5, "RUNNING", [True, True, False]),  # at once, again and again: somebody does not want it
        ("1", 100, "RUNNING", [True, True, False]),
        ("76", 100, "RUNNING", [True, True, False]),
        ("0", 100, "RUNNING", [False]),
        ("77", 100, "RUNNING", [False]),
        ("75", 100, "COMPLETING", [False]),  # somebody has cancelled it
        ("", 100, "RUNNING", [False]),  # before the launchers had ended
    ],
)
def test_slurm_gets_the_job_back_by_its_exit_code(plugins, tmp_path, code, lasted_s, state, requeued):
    """Failures are counted over its starts; the lines are run by bash, with a stand-in for Slurm's client."""
    client = tmp_path / "scontrol"
    client.write_text(f'#!/bin/bash\nif [ "$1" = show ]; then echo "JobId=7 JobState={state} x"; else echo "$@"; fi\n')
    client.chmod(0o755)
    lines = plugins.requeue_lines(str(tmp_path / "count"), 2)
    text = f"set -e\n{lines}\n{'exitcode=' + code if code else ''}\nSECONDS={lasted_s}\nexit {code or 1}\n"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    for expected in requeued:
        done = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, timeout=30)
        assert (done.stdout == "requeue 7\n") == expected, done
        assert done.returncode == int(code or 1)


def test_the_callbacks_of_the_plugins_can_be_built():
    """By what NeMo-Run calls: the class, with these arguments."""
    require("lightning.pytorch", "lightning")
    FaultToleranceCallback(autoresume=True, calculate_timeouts=True, exp_dir=None)
    PreemptionCallback()
