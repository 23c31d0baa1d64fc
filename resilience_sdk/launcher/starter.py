"""Starts the workers of each attempt: by fork where that serves, else by exec. Imports no torch until ranks start.

The agent calls `prepare(env)` early, so that torch is preloaded while the launcher does other things. It starts
ranks within `serving_elastic(...)`: there torch builds their environment, and we start the processes. What torch's
agent then has as `_pcontext` is a `WorkerProcesses`. Its `WorkerSpec` has `entrypoint=script.target,
args=script.args`, strings as under torchrun.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from resilience_sdk.console import say, say_once
from resilience_sdk.launcher.forkserver import (
    ENTRY,
    ForkServer,
    launcher_environment,
    load_time_part,
    needs_exec,
    say_missing,
)
from resilience_sdk.launcher.protocol import Order
from resilience_sdk.launcher.script import Script

if TYPE_CHECKING:
    from resilience_sdk.launcher.processes import WorkerProcesses

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
        self._retake_signals: Callable[[], None] = lambda: None
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
        from resilience_sdk.launcher.processes import WorkerProcesses

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
            retake_signals=self._retake_signals,
            **{name: value for name, value in filters.items() if value},
        )
        processes.start()
        return processes

    @contextlib.contextmanager
    def serving_elastic(self, retake_signals: Callable[[], None] = lambda: None) -> Iterator[None]:
        """While entered, `LocalElasticAgent._start_workers` starts its processes through this object.

        `retake_signals` is called when torch has put its own handlers in place, before the first process starts.
        The module's name is exchanged, because the stock method calls a function and builds an environment
        that differs from release to release; copying it would be worse.
        """
        from torch.distributed.elastic.agent.server import local_elastic_agent as module

        original = module.start_processes
        module.start_processes = self.start
        self._retake_signals = retake_signals
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
            command = (python, "-u", ENTRY, "run", script.kind, script.target, *script.args)
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
