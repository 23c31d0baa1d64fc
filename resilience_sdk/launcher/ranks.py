"""The rank processes of one attempt on this node: who died in which order, and how all are ended.

Elastic polls its workers one by one and then waits up to 30 s for those that ignore SIGTERM. Here one
`select` answers within a millisecond of a death, and ending the ranks has deadlines of our own.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from resilience_sdk.hostinfo import process_start_ticks
from resilience_sdk.launcher import sessions

if TYPE_CHECKING:
    from resilience_sdk.launcher.processes import WorkerProcesses

_KILL_WAIT_S = 5.0  # a killed process that is still there after this sits in the kernel


@attrs.frozen
class RankExit:
    """The end of one rank process. `exit_code` is negative for a signal, `at_ns` is CLOCK_MONOTONIC."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    order: int  # 0 is the first of this node to go
    at_ns: int
    ended_by_us: bool  # after we had signalled it


class RankProcesses:
    """Watches and ends the processes of one attempt. One thread only."""

    def __init__(self, workers: WorkerProcesses, ranks: Mapping[int, int], *, wakeup: int | None = None) -> None:
        """Watch these workers; `ranks` maps local to global ranks.

        `wakeup` is one more descriptor whose readability ends a wait.
        """
        self.exits: list[RankExit] = []
        self.unkillable: tuple[int, ...] = ()  # pids that outlived SIGKILL
        self._workers = workers
        self._ranks = dict(ranks)
        self.pids = {self._ranks[local_rank]: pid for local_rank, pid in workers.pids().items()}
        self._born = {pid: process_start_ticks(pid) for pid in self.pids.values()}
        self._running = dict(self.pids)
        self._signalled = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(workers.fileno(), selectors.EVENT_READ)
        if wakeup is not None:
            self._selector.register(wakeup, selectors.EVENT_READ)

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks whose process has not ended."""
        return tuple(sorted(self._running))

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes by rank of those that have ended."""
        return {end.rank: end.exit_code for end in self.exits}

    def wait(self, timeout_s: float) -> list[RankExit]:
        """Wait until a rank ends, `wakeup` is readable or the time is over; return the new ends."""
        gone = self._collect()
        if gone or not self._running:
            return gone
        self._selector.select(max(0.0, timeout_s))
        return self._collect()

    def end(self, grace_s: float, *, first: int = signal.SIGTERM, hurry: Callable[[], bool] | None = None) -> None:
        """End every rank and what it started: `first`, up to `grace_s` seconds, SIGKILL for whole sessions.

        `hurry` is asked after each wait and cuts the grace short.
        """
        self.signal(first)
        deadline = time.monotonic() + grace_s
        while self._running and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
            if hurry is not None and hurry():
                break
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to each running rank itself; a stopped one is continued so that it can take it.

        Not to its children: a DataLoader worker that dies of it would break the rank's last save.
        """
        self._signalled = True
        for pid in self._running.values():
            with contextlib.suppress(OSError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL every running rank, and what is left in the sessions of all that did not end with 0."""
        self._signalled = True
        for pid in self._running.values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_WAIT_S
        while self._running and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        self.unkillable = tuple(self._running.values())
        # What a rank that ended well left running on purpose (a dashboard, say) is kept, as under torchrun.
        well = {end.pid for end in self.exits if end.exit_code == 0}
        sessions.kill_members({pid: ticks for pid, ticks in self._born.items() if pid not in well})

    def close(self) -> None:
        """Give back descriptors and elastic's log tails. All ranks should have ended."""
        self._selector.close()
        self._workers.close(signal.SIGKILL, 0)

    def _collect(self) -> list[RankExit]:
        gone: list[RankExit] = []
        for local_rank, seen in self._workers.exits().items():
            rank = self._ranks[local_rank]
            if rank not in self._running:
                continue
            pid = self._running.pop(rank)
            gone.append(RankExit(rank, local_rank, pid, seen.code, len(self.exits), seen.seen_ns, self._signalled))
            self.exits.append(gone[-1])
        return gone
