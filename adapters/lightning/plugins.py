"""Plugins for NeMo-Run, by the names and parameters of NeMo's: a script changes an import.

    from resilience_sdk.adapters.lightning.plugins import FaultTolerancePlugin

    run.run(recipe, plugins=[FaultTolerancePlugin()], executor=executor)

NeMo's plugin starts the ranks by `ft_launcher`. This one starts `resilience run` on each node, in the place of what
the executor would start, so the environment or image of the job needs this SDK alone. `nemo_run` is imported here.
"""

from __future__ import annotations

import copy
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilience_sdk.adapters._base import framework
from resilience_sdk.adapters.lightning.drop_in import PreemptionCallback
from resilience_sdk.adapters.lightning.fault_tolerance import FaultToleranceCallback
from resilience_sdk.core import environ
from resilience_sdk.core.console import say
from resilience_sdk.errors import EXIT_PREEMPTED, ConfigError
from resilience_sdk.postmortem.exit_codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_STOP, EXIT_USAGE

run: Any = framework("nemo_run", "nemo_run")
_launcher: Any = framework("nemo_run.core.execution.launcher", "nemo_run")

__all__ = ["FaultTolerancePlugin", "PreemptionPlugin", "ResilienceRun"]

_JOB_DIR = "/nemo_run"
"""NeMo-Run mounts the directory of a job here in a container, and writes its path in the place of this elsewhere."""


@dataclass(kw_only=True)
class ResilienceRun(_launcher.Launcher):  # type: ignore[misc]
    """The launcher of an executor: `resilience run` around the command, once on each node."""

    max_restarts: int | None = None
    initial_heartbeat_timeout: float | None = None
    """Seconds; None: learned."""
    heartbeat_timeout: float | None = None
    nproc_per_node: int = 1
    nnodes: int = 1
    rdzv_port: int = 29500
    run_dir: str | None = None

    def transform(self, cmd: list[str]) -> Any:
        """Return the script that NeMo-Run starts in the place of `cmd`, a program and its arguments."""
        return run.Script(path="resilience_sdk", m=True, entrypoint="python", args=[*self.options(), *_ranks(cmd)])

    def options(self) -> list[str]:
        """Return `run` and its options. What has a `$` is for the shell of the batch script."""
        given = {
            "--run-dir": self.run_dir,
            "--max-restarts": self.max_restarts,
            "--initial-heartbeat-timeout": self.initial_heartbeat_timeout,
            "--heartbeat-timeout": self.heartbeat_timeout,
            "--nproc-per-node": self.nproc_per_node,
        }
        words = ["run", *(word for name, value in given.items() if value is not None for word in (name, str(value)))]
        if self.nnodes > 1:
            words += ["--nnodes", str(self.nnodes), "--rdzv-backend", "c10d"]
            words += ["--rdzv-endpoint", f"$head_node_ip:{self.rdzv_port}"]
            words += ["--rdzv-id", "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"]
        return words


def _ranks(cmd: list[str]) -> list[str]:
    """Return what follows the options of `resilience run` for a command: a program that is no Python is started so."""
    return cmd[1:] if Path(cmd[0]).name.startswith("python") else ["--no-python", *cmd]


@dataclass(kw_only=True)
class FaultTolerancePlugin(run.Plugin):  # type: ignore[misc]
    """NeMo's `FaultTolerancePlugin`: hangs, deaths and stops of the task are seen, and it is started again.

    Adds `FaultToleranceCallback(autoresume=True, calculate_timeouts=True)` to the trainer of the task. For
    `run.SlurmExecutor`, and for `run.LocalExecutor` without retries of the job; not together with Nsys.

    Args:
        num_in_job_restarts: How often the ranks are started again within a job.
        num_job_retries_on_failure: How often Slurm gets a failed job back. A preempted one that has run for a minute is
            not counted; one that is finished, or not to be retried, is not given back.
        initial_rank_heartbeat_timeout: Seconds up to the first heartbeat of a rank; None: learned.
        rank_heartbeat_timeout: Seconds up to each further one; None: learned. A value that is given holds as it is.

    Raises:
        ConfigError: At `setup`: another executor, or Nsys.
    """

    num_in_job_restarts: int = 3
    num_job_retries_on_failure: int = 2
    initial_rank_heartbeat_timeout: float | None = None
    rank_heartbeat_timeout: float | None = None

    def setup(self, task: Any, executor: Any) -> None:
        """Have the executor start `resilience run`, and the trainer call us."""
        if getattr(executor.launcher, "nsys_profile", False):
            raise ConfigError("FaultTolerancePlugin: Nsys is not supported, remove the NsysPlugin")
        is_slurm = isinstance(executor, run.SlurmExecutor)
        if not (is_slurm or isinstance(executor, run.LocalExecutor)):
            raise ConfigError(
                f"FaultTolerancePlugin: {type(executor).__name__} is not supported, use run.SlurmExecutor or "
                "run.LocalExecutor; elsewhere start the task by `resilience run`"
            )
        executor.launcher = ResilienceRun(
            max_restarts=self.num_in_job_restarts,
            initial_heartbeat_timeout=self.initial_rank_heartbeat_timeout,
            heartbeat_timeout=self.rank_heartbeat_timeout,
            nproc_per_node=executor.nproc_per_node(),
            nnodes=executor.nnodes(),
            run_dir=f"{_JOB_DIR}/resilience" if is_slurm else os.path.join(executor.job_dir, "resilience"),
        )
        # Executors ask a launcher for another command only where it is a template of Slurm's, which ours is not.
        executor.supports_launcher_transform = lambda: True
        if is_slurm:
            self._set_up_slurm(executor)
        log_dir = getattr(getattr(task, "log", None), "log_dir", None)
        _add_callbacks(
            type(self).__name__,
            task,
            [run.Config(FaultToleranceCallback, autoresume=True, calculate_timeouts=True, exp_dir=log_dir)],
        )

    def _set_up_slurm(self, executor: Any) -> None:
        executor.torchrun_nproc_per_node, executor.ntasks_per_node = executor.nproc_per_node(), 1
        # NeMo-Run counts every requeue as a retry, also one after the time limit; the lines below do not.
        executor.retries = 0
        # A launcher that ends must not take the others along before they have saved; the later option counts.
        executor.srun_args = [*(executor.srun_args or []), "--wait=0", "--kill-on-bad-exit=0"]
        count = os.path.join(executor.tunnel.job_dir, Path(executor.job_dir).name, "resilience-retries")
        lines = requeue_lines(count, self.num_job_retries_on_failure)
        executor.setup_lines = "\n".join(filter(None, (executor.setup_lines, lines)))


def requeue_lines(count: str, retries: int) -> str:
    """Return the lines of a batch script that give the job back to Slurm by its exit code. Pure.

    `count` is the file in which failures are counted. The script of NeMo-Run leaves the code of the launchers in
    `exitcode`; where that is not set, somebody has cancelled the job.
    """
    final = "|".join(map(str, (EXIT_FINISHED, EXIT_USAGE, EXIT_STOP, EXIT_INTERRUPTED)))
    return f"""
# FaultTolerancePlugin of resilience_sdk: what the exit code of `resilience run` means for this job.
export RESILIENCE_JOB_ID="slurm-$SLURM_JOB_ID"
resilience_requeue() {{
    local code=${{exitcode:-0}} count={shlex.quote(count)}
    set +e
    case "$code" in
        {final}) rm -f "$count"; return ;;  # finished, bad usage, stop, interrupted, or cancelled: never again
    esac
    if [ "$code" -ne {EXIT_PREEMPTED} ] || [ "$SECONDS" -lt 60 ]; then
        echo "$code" >> "$count"
        if [ "$(wc -l < "$count")" -gt {retries} ]; then
            echo "resilience: exit code $code, and no retry of the job is left (of {retries})" >&2
            rm -f "$count"
            return
        fi
    fi
    case "$(scontrol show job --oneliner "$SLURM_JOB_ID")" in
        *" JobState=RUNNING "*) scontrol requeue "$SLURM_JOB_ID" ;;
    esac
}}
trap resilience_requeue EXIT"""


@dataclass(kw_only=True)
class PreemptionPlugin(run.Plugin):  # type: ignore[misc]
    """NeMo's `PreemptionPlugin`: the job is asked to leave before its time is up, saves and leaves.

    Args:
        preempt_time: Seconds before the time limit at which `run.SlurmExecutor` has SIGTERM sent.
        callbacks: Configurations of what is added to the callbacks of the task's trainer; `PreemptionCallback` if that
            is left out.
    """

    preempt_time: int = 60
    callbacks: list[Any] = field(default_factory=lambda: [run.Config(PreemptionCallback)])

    def setup(self, task: Any, executor: Any) -> None:
        """Have Slurm send the signal, and the trainer listen to it."""
        if isinstance(executor, run.SlurmExecutor):
            executor.signal = f"TERM@{self.preempt_time}"
            executor.env_vars[f"{environ.PREFIX}PREEMPT_TIME"] = str(self.preempt_time)
        _add_callbacks(type(self).__name__, task, self.callbacks)


def _add_callbacks(plugin: str, task: Any, callbacks: list[Any]) -> None:
    """Add configurations of callbacks to those of a task's trainer, where they are not there yet."""
    if isinstance(task, run.Script):
        say(f"{plugin}: the task is a run.Script, so no callback is added to its trainer: add it in the script")
        return
    trainer = getattr(task, "trainer", None)
    if trainer is None:
        say(f"{plugin}: the task has no trainer, so no callback is added")
        return
    there = list(getattr(trainer, "callbacks", None) or [])
    trainer.callbacks = there + [copy.deepcopy(each) for each in callbacks if each not in there]
