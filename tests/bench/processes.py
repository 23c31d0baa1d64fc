"""Starting what is measured: a clean environment, a bound on its time, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
_FOREIGN = ("RESILIENCE_", "PET_", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which only `more` speaks of a job."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    env["PYTHONPATH"] = str(ROOT)
    env["OMP_NUM_THREADS"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    env["RESILIENCE_JOB_ID"] = f"bench-{uuid.uuid4().hex[:12]}"
    return env | more


@contextlib.contextmanager
def started(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own; at the end of the block its whole group is gone."""
    with open(log, "ab") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(command: Sequence[str], env: Mapping[str, str], log: Path, timeout_s: float) -> int | None:
    """Run a command to its end and return its exit code, or None when it had to be ended."""
    with started(command, env, log) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None


def resilience_run(*options: str) -> list[str]:
    """Return the start of a command line with our launcher."""
    return [sys.executable, "-m", "resilience_sdk", "run", *options]


def torchrun(*options: str) -> list[str]:
    """Return the start of a command line with torch's launcher."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]


def nvrx_launcher(python: str, *options: str) -> list[str]:
    """Return the start of a command line with the launcher of NVIDIA's extension."""
    module = "nvidia_resiliency_ext.fault_tolerance.launcher"
    return [python, "-W", "ignore", "-m", module, "--standalone", *options]


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
