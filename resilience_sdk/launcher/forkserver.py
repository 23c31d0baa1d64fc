"""The launcher's side of the fork server.

It starts the workers of each attempt, by fork where that serves, else by exec. Imports no torch.

The agent calls `prepare(env)` early, so that torch is preloaded while the launcher does other things. It starts
ranks within `serving_elastic(...)`: there torch builds their environment, and we start the processes. What torch's
agent then has as `_pcontext` is a `WorkerProcesses`. Its `WorkerSpec` has `entrypoint=script.target,
args=script.args`, strings as under torchrun.

Single-threaded: one thread of the launcher, its main thread, owns a `ForkServer`. The kernel ties the
server's life to the thread that started it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.launcher.forkserver_wire import Order, Readiness, Script, WireEnd
from resilience_sdk.postmortem.facts import ServerEnd
from resilience_sdk.system import programs

if TYPE_CHECKING:
    from resilience_sdk.launcher.signals import SignalInbox
    from resilience_sdk.launcher.worker_processes import WorkerProcesses

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
        self._channel: WireEnd | None = None
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
                channel = theirs.fileno()
                words = (str(channel), str(os.getpid()), self.mode, mask, *script.command(python))
                self._process = programs.start(programs.FORK_SERVER, *words, python=python, env=env, pass_fds=[channel])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.environment = dict(env)
        self._channel = WireEnd(ours)

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

    def end(self) -> ServerEnd | None:
        """Return how the server ended; None while it runs, as far as this side has seen."""
        if self._process is None or self.alive:
            return None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)  # its connection closes a moment before it can be collected
        return ServerEnd(self._process.pid, code)

    def close(self) -> None:
        """End the server; workers that still run are killed with their groups."""
        if self._channel is not None:
            self._channel.close()
        self._lose_workers()
        if self._process is not None:
            if self._readiness is None:
                self._process.kill()  # it loads, and looks at nothing meanwhile
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

    def _need_channel(self) -> WireEnd:
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


StartMethod = Literal["forkserver", "exec"]


class WorkerStarter:
    """Owns the fork server over all attempts. Used from the launcher's main thread only."""

    def __init__(self, script: Script, *, start_method: StartMethod = "forkserver", numa_options: Any = None) -> None:
        self._script = script
        self._start_method = start_method
        self._numa_options = numa_options
        self._server: ForkServer | None = None
        self._unfit: str | None = None  # why the fork server of this job may not fork
        self._numbers = itertools.count()
        self._inbox: SignalInbox | None = None
        self.reason: str | None = None  # why the newest workers were exec'd, None when they were forked

    def prepare(self, env: Mapping[str, str]) -> None:
        """Begin preloading in the background, with `env` as the ranks will have it (set OMP_NUM_THREADS
        before).

        Does nothing where workers will be exec'd anyway. Raises nothing: a failure shows when ranks start.
        """
        if self._server is None and self._exec_reason([env]) is None:
            with contextlib.suppress(OSError):
                self._server = self._new_server("fork", env)

    def start(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[str, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: Any,
        log_line_prefixes: dict[int, str] | None = None,
        start_method: str = "",
        numa_options: Any = None,
        **filters: Any,
    ) -> WorkerProcesses:
        """Start one worker per local rank; the same parameters as elastic's `start_processes`.

        `start_method` is accepted and not used, this object knows better.

        Raises:
            RuntimeError: neither way could start workers.
        """
        from resilience_sdk.launcher.worker_processes import WorkerProcesses

        self._numa_options = numa_options or self._numa_options
        server = self._server_for([launcher_environment(env) for env in envs.values()])
        processes = WorkerProcesses(
            name,
            entrypoint,
            args,
            envs,
            logs_specs,
            log_line_prefixes,
            server=server,
            make_orders=self._orders,
            inbox=self._inbox,
            **{name: value for name, value in filters.items() if value},
        )
        processes.start()
        return processes

    @contextlib.contextmanager
    def serving_elastic(self, inbox: SignalInbox | None = None) -> Iterator[None]:
        """While entered, `LocalElasticAgent._start_workers` starts its processes through this object.

        `inbox` takes the signals back when torch has put its own handlers in place, before the first process starts.
        The module's name is exchanged, because the stock method calls a function and builds an environment
        that differs from release to release; copying it would be worse.
        """
        from torch.distributed.elastic.agent.server import local_elastic_agent as module

        original = module.start_processes
        module.start_processes = self.start
        self._inbox = inbox
        try:
            yield
        finally:
            module.start_processes = original

    def close(self) -> None:
        """End the server and every worker that still runs."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _exec_reason(self, envs: list[Mapping[str, str]]) -> str | None:
        return self._unfit or needs_exec(
            envs,
            script=self._script,
            start_method=self._start_method,
            numa_binding=self._numa_options is not None,
        )

    def _server_for(self, envs: list[dict[str, str]]) -> ForkServer:
        """Return a server that is alive, fit, and was loaded with what these workers' environments say."""
        self.reason = self._exec_reason([*envs])
        if self.reason is None:
            server = self._current("fork", envs[0])
            readiness = server.ready()
            say_missing(readiness)
            if readiness.problem is None:
                return server
            self._unfit = self.reason = readiness.problem
        if self._start_method != "exec" and self._script.kind != "binary":
            say_once("exec-workers", f"workers are started by exec, restarts take seconds longer: {self.reason}")
        return self._current("exec", envs[0])

    def _current(self, mode: Literal["fork", "exec"], env: Mapping[str, str]) -> ForkServer:
        server = self._server
        if server is not None:
            stale = mode == "fork" and load_time_part(server.environment) != load_time_part(env)
            if server.alive and server.mode == mode and not stale:
                return server
            if not server.alive:
                say("the fork server is gone; starting another")
            server.close()
        self._server = self._new_server(mode, env)
        return self._server

    def _new_server(self, mode: Literal["fork", "exec"], env: Mapping[str, str]) -> ForkServer:
        server = ForkServer(mode=mode)
        server.start(env, self._script)
        return server

    def _orders(
        self,
        args: Mapping[int, tuple[str, ...]],
        envs: Mapping[int, Mapping[str, str]],
        processes: WorkerProcesses,
    ) -> list[Order]:
        orders = []
        for local_rank in range(len(args)):
            script = self._script.with_args(args[local_rank])
            env = launcher_environment(envs[local_rank])
            orders.append(
                Order(
                    number=next(self._numbers),
                    script=script,
                    environment=env,
                    directory=os.getcwd(),
                    stdout=processes.stdouts[local_rank],
                    stderr=processes.stderrs[local_rank],
                    command=None if self.reason is None else self._command(script, env, local_rank),
                )
            )
        return orders

    def _command(self, script: Script, env: Mapping[str, str], local_rank: int) -> tuple[str, ...]:
        python = env.get("PYTHON_EXEC", sys.executable)
        if script.kind == "binary":
            command = (script.target, *script.args)
        else:
            words = (script.kind, script.target, *script.args)
            command = tuple(programs.command(programs.WORKER, *words, python=python))
        return command if self._numa_options is None else _bound(command, local_rank, self._numa_options)


def _bound(command: tuple[str, ...], local_rank: int, options: Any) -> tuple[str, ...]:
    """Put torch's NUMA binding in front of `command`, where this torch knows how."""
    try:
        from torch.numa import binding

        wrap = getattr(binding, "_maybe_wrap_command_args_with_numa_binding", None) or (
            binding.maybe_wrap_command_args_with_numa_binding
        )
    except (ImportError, AttributeError):
        say_once("numa", "this torch offers no NUMA binding of commands: the ranks run unbound")
        return command
    return tuple(wrap(command, gpu_index=local_rank, numa_options=options))
