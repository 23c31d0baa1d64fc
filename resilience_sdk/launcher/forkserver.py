"""The launcher's side of the fork server: start it, order workers, learn of their exits. Imports no torch.

Single-threaded: one thread of the launcher, its main thread, owns a `ForkServer`. The kernel ties the
server's life to the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from resilience_sdk import environ
from resilience_sdk.console import say
from resilience_sdk.launcher.protocol import Channel, Order, Readiness
from resilience_sdk.launcher.script import Script

# What interpreter, C libraries and torch read when they are loaded: changing it in a forked worker has no
# effect. TORCH_NCCL_* and the store's switch are read when a process group is made, CUDA's other variables
# when CUDA starts.
_LOAD_TIME = re.compile(
    r"(OMP|GOMP|MKL|KMP|OPENBLAS|BLIS|NUMEXPR|VECLIB|LD|MALLOC|PYTORCH|TORCHINDUCTOR|TORCHDYNAMO)_\w+|PYTHON\w*"
    r"|TORCH_(?!NCCL_|GLOO_|DISABLE_SHARE_RDZV_TCP_STORE)\w+"
    r"|GLIBC_TUNABLES|(CUDA|HIP|ROCR|ZE)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER"
)
# SIGCHLD drives the loop; the others tell of the process's own faults.
_NEVER_BLOCKED = frozenset(
    {
        signal.SIGCHLD,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
ENTRY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
_READY_TIMEOUT_S = 300.0  # a cold torch on a shared file system takes minutes
_FORK_TIMEOUT_S = 60.0
_LOST = -int(signal.SIGKILL)


def load_time_part(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `env` that only count when a process starts."""
    return {name: value for name, value in env.items() if _LOAD_TIME.fullmatch(name)}


def needs_exec(
    worker_envs: Iterable[Mapping[str, str]],
    *,
    script: Script,
    start_method: str = "forkserver",
    numa_binding: bool = False,
) -> str | None:
    """Say why workers with these environments must be exec'd, or None where forking serves as well."""
    if start_method == "exec":
        return "asked for by --start-method exec"
    if script.kind == "binary":
        return "--no-python: the program is not a Python script"
    if numa_binding:
        return "--numa-binding: memory must be bound before anything is loaded"
    if not sys.platform.startswith("linux"):
        return f"the fork server needs Linux, this is {sys.platform}"
    parts = [load_time_part(env) for env in worker_envs]
    names = sorted({name for part in parts for name in part if any(p.get(name) != part[name] for p in parts)})
    if names:
        return f"{', '.join(names)} differs between ranks, and is read when a process starts"
    return None


@attrs.frozen
class WorkerExit:
    """The end of one worker process."""

    number: int  # of its order
    pid: int
    code: int  # negative: the signal that ended it
    seen_ns: int  # CLOCK_MONOTONIC when the launcher learned of it
    server_lost: bool = False  # the fork server died, and the kernel killed the worker with it: the code is inferred


class ForkServer:
    """The server process and the channel to it. `start` may come early: the preload then costs no waiting."""

    def __init__(self, *, mode: Literal["fork", "exec"]) -> None:
        self.mode = mode
        self.environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._readiness: Readiness | None = None
        self._pids: dict[int, int] = {}  # number of each worker that runs -> its pid
        self._exits: list[WorkerExit] = []

    @property
    def alive(self) -> bool:
        """Whether the server runs, as far as this side has seen."""
        return self._channel is not None and self._channel.open

    def start(self, env: Mapping[str, str], script: Script) -> None:
        """Begin the server with `env`; returns at once, while it preloads. `script` is for `ps` only.

        Raises:
            OSError: the interpreter cannot be started.
        """
        python = env.get("PYTHON_EXEC", sys.executable)
        ours, theirs = socket.socketpair()
        try:
            with _signals_blocked() as mask:
                shown = script.command(python)
                # A session of its own: what the terminal or a shell sends to the launcher's group must not
                # reach it.
                self._process = subprocess.Popen(
                    [
                        python,
                        "-u",
                        ENTRY,
                        "serve",
                        str(theirs.fileno()),
                        str(os.getpid()),
                        self.mode,
                        mask,
                        *shown,
                    ],
                    env=dict(env),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.environment = dict(env)
        self._channel = Channel(ours)

    def ready(self, timeout_s: float = _READY_TIMEOUT_S) -> Readiness:
        """Wait until the server has preloaded and return what it found; its death is a `problem` too."""
        deadline = time.monotonic() + timeout_s
        while self._readiness is None and self.alive and time.monotonic() < deadline:
            self._receive(timeout_s)
        if self._readiness is None:
            why = "does not answer" if self.alive else f"ended while it started ({self._how_it_ended()})"
            return Readiness(f"the fork server {why}", (), timeout_s)
        return self._readiness

    def launch(self, orders: Sequence[Order]) -> dict[int, int]:
        """Start a worker for each order and return the pid of each by order number.

        Raises:
            RuntimeError: the server died or hangs; workers that it had started are dead or are killed here.
        """
        channel = self._need_channel()
        for order in orders:
            channel.send(order.to_message())
        numbers = {order.number for order in orders}
        pids: dict[int, int] = {}
        deadline = time.monotonic() + _FORK_TIMEOUT_S
        while len(pids) < len(numbers):
            left = deadline - time.monotonic()
            if not self.alive or left <= 0:
                how = self._how_it_ended() if not self.alive else f"no answer in {_FORK_TIMEOUT_S:.0f} s"
                self.close()
                raise RuntimeError(f"the fork server was lost while it started workers: {how}")
            pids.update(self._receive(left, numbers))
        return pids

    def exits(self, wait_s: float = 0.0) -> list[WorkerExit]:
        """Return the exits that were not yet returned, waiting up to `wait_s` seconds for the first."""
        if not self._exits and self._channel is not None:
            self._receive(wait_s)
        found, self._exits = self._exits, []
        return found

    def fileno(self) -> int:
        """Return the descriptor that is readable when `exits` may have something new; -1 after `close`."""
        return self._need_channel().fileno()

    def close(self) -> None:
        """End the server; workers that still run are killed with their groups."""
        if self._channel is not None:
            self._channel.close()
        self._lose_workers()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
                return
            self._process.kill()
            self._process.wait()

    def _receive(self, wait_s: float, expected: frozenset[int] | set[int] = frozenset()) -> dict[int, int]:
        channel = self._need_channel()
        started: dict[int, int] = {}
        for message in channel.receive(wait_s):
            if message["op"] == "ready":
                self._readiness = Readiness(message["problem"], tuple(message["missing"]), message["seconds"])
                continue
            number, pid = int(message["number"]), int(message["pid"])
            if message["op"] == "started":
                self._pids[number] = pid
                if number in expected:
                    started[number] = pid
            else:
                self._pids.pop(number, None)
                self._exits.append(WorkerExit(number, pid, int(message["code"]), time.monotonic_ns()))
        if not channel.open:
            self._lose_workers()
        return started

    def _lose_workers(self) -> None:
        """The server is gone and the kernel has killed its workers; end what they had started as well."""
        for number, pid in self._pids.items():
            kill_group(pid, signal.SIGKILL)
            self._exits.append(WorkerExit(number, pid, _LOST, time.monotonic_ns(), server_lost=True))
        self._pids.clear()

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "it was never started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit code {self._process.wait(1.0)}"
        return "its channel is closed"

    def _need_channel(self) -> Channel:
        if self._channel is None:
            raise RuntimeError("the fork server was not started")
        return self._channel


def kill_group(pid: int, signum: int) -> bool:
    """Send `signum` to the process group that worker `pid` leads; tell whether anybody was there."""
    try:
        os.killpg(pid, signum)
    except OSError:
        # A worker that was forked a moment ago has no group yet.
        try:
            os.kill(pid, signum)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _signals_blocked() -> Iterator[str]:
    """Have the server begin with the mask that it keeps; yield the mask that its workers are to have.

    Whoever signals the whole job (scancel, a preemption, pkill by the script's name) means the ranks, which
    must get their time to save: the server ends by its launcher only. Blocked and not ignored, because
    children inherit either, and a signal that reaches a rank before it has unblocked them is then not lost.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _NEVER_BLOCKED)
    try:
        yield ",".join(str(int(number)) for number in before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launcher_environment(worker_env: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a worker, composed as torchrun does: the launcher's and its own."""
    return {**environ.environment(), **worker_env}


def say_missing(readiness: Readiness) -> None:
    """Show which preloads failed; a worker that needs one sees the error itself."""
    for missing in readiness.missing:
        say(f"preload of {missing}")
