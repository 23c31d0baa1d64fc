"""The rank processes for the elastic agent: a `PContext` whose workers come from our own fork server.

Unlike torch's own contexts it never stops the other ranks when it sees one fail: the agent does, in its own
order and with its own grace, after it has looked at them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from signal import SIGKILL, Signals
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from resilience_sdk.core.console import say
from resilience_sdk.launcher.forkserver import ForkServer, WorkerExit, kill_group
from resilience_sdk.launcher.forkserver_wire import Order
from resilience_sdk.launcher.signals import SignalInbox
from resilience_sdk.postmortem.facts import ServerEnd

# (local rank -> its arguments, environment, redirects) -> one order each, numbered by local rank
OrderMaker = Callable[[Mapping[int, tuple[str, ...]], Mapping[int, Mapping[str, str]], "WorkerProcesses"], list[Order]]


class WorkerProcesses(PContext):
    """The local ranks of one attempt. Used from the launcher's main thread only."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: dict[int, tuple[str, ...]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: dict[int, str] | None = None,
        *,
        server: ForkServer,
        make_orders: OrderMaker,
        inbox: SignalInbox | None,
        **filters: Any,  # duplicate_*_filters of torch >= 2.9
    ) -> None:
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, **filters)
        self._server = server
        self._make_orders = make_orders
        self._inbox = inbox
        self._pids: dict[int, int] = {}
        self._exits: dict[int, WorkerExit] = {}

    def _start(self) -> None:
        # torch's handlers, in place by now, raise out of whatever runs: ranks that start would be left behind.
        if self._inbox is not None:
            self._inbox.retake()
        orders = self._make_orders(self.args, self.envs, self)
        numbers = {order.number: local_rank for local_rank, order in enumerate(orders)}
        if self._inbox is not None:
            self._inbox.only_note()  # from here on there are ranks, which may have something to lose
        pids = self._server.launch(orders)
        self._pids = {numbers[number]: pid for number, pid in pids.items()}
        self._local_rank_of = numbers

    def exits(self) -> dict[int, WorkerExit]:
        """Return every exit seen so far by local rank. Looks, but signals nobody."""
        self._collect(0.0)
        return dict(self._exits)

    def fileno(self) -> int:
        """Return a descriptor that is readable when exits may be there to collect.

        Ask `exits()` once before waiting on it: an early exit may have been read while the ranks were
        started.
        """
        return self._server.fileno()

    def signal(self, local_rank: int, signum: int) -> bool:
        """Send `signum` to one rank alone, not to what it started; tell whether it still ran."""
        self._collect(0.0)
        if local_rank in self._exits or local_rank not in self._pids:
            return False
        try:
            os.kill(self._pids[local_rank], signum)
        except ProcessLookupError:
            return False
        return True

    def server_end(self) -> ServerEnd | None:
        """Return how the fork server ended; None while it runs."""
        return self._server.end()

    def pids(self) -> dict[int, int]:
        """Return the process id of each local rank; it is its session and process group as well."""
        return dict(self._pids)

    def _collect(self, wait_s: float) -> None:
        for exit_ in self._server.exits(wait_s):
            local_rank = self._local_rank_of.get(exit_.number)
            if local_rank is not None:  # else of an earlier attempt, killed at its end
                self._exits[local_rank] = exit_

    def _poll(self) -> RunProcsResult | None:
        self._collect(0.0)
        failures = {
            local_rank: _failure(local_rank, exit_, self.error_files[local_rank])
            for local_rank, exit_ in self._exits.items()
            if exit_.code != 0
        }
        if not failures and len(self._exits) < self.nprocs:
            return None
        return RunProcsResult(
            return_values={} if failures else dict.fromkeys(range(self.nprocs)),
            failures=failures,
            stdouts=self.stdouts,
            stderrs=self.stderrs,
        )

    def _close(self, death_sig: Signals, timeout: float = 30) -> None:
        """Signal the groups of the ranks that run, give them `timeout` seconds, then SIGKILL.

        What a crashed rank had started is killed as well: it would keep ports, memory and devices from the
        next attempt. What a rank left behind that ended with 0 is kept, as under torchrun.
        """
        self._collect(0.0)
        for local_rank, exit_ in self._exits.items():
            if exit_.code != 0 and not exit_.server_lost:
                _kill_leftovers(self._pids[local_rank])
        for pid in self._running().values():
            kill_group(pid, death_sig)
        self._await_end(timeout)
        for local_rank, pid in self._running().items():
            say(f"local rank {local_rank} (pid {pid}) outlived {death_sig.name} by {timeout:g} s: SIGKILL")
            kill_group(pid, SIGKILL)
        # A process in uninterruptible sleep survives even that, and the launcher must not wait for it for
        # ever.
        self._await_end(5.0)
        for local_rank, pid in self._running().items():
            say(f"local rank {local_rank} (pid {pid}) did not end after SIGKILL (uninterruptible sleep); left")

    def _running(self) -> dict[int, int]:
        return {local_rank: pid for local_rank, pid in self._pids.items() if local_rank not in self._exits}

    def _await_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._running() and (left := deadline - time.monotonic()) > 0:
            self._collect(left)


def _failure(local_rank: int, exit_: WorkerExit, error_file: str) -> ProcessFailure:
    """Return torch's record of a failed rank; its error file may be empty or torn, which torch itself dies of."""
    try:
        return ProcessFailure(local_rank, exit_.pid, exit_.code, error_file)
    except Exception:  # noqa: BLE001 - whatever a rank has left there
        return ProcessFailure(local_rank, exit_.pid, exit_.code, "")


def _kill_leftovers(pid: int) -> None:
    """Kill the rest of a dead worker's group; its number cannot be another's while the group has members."""
    try:
        os.killpg(pid, SIGKILL)
    except OSError:
        return
