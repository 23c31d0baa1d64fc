"""The rank processes of one attempt on this node: who died first, how all are ended, and what they leave behind.

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

from resilience_sdk.postmortem.facts import RankExit
from resilience_sdk.system.hostinfo import process_start_ticks, stat_fields
from resilience_sdk.system.procfs import has_signal, status_fields

if TYPE_CHECKING:
    from resilience_sdk.launcher.attempt import AttemptFiles
    from resilience_sdk.launcher.worker_processes import WorkerProcesses
    from resilience_sdk.postmortem.facts import ServerEnd

_ROUNDS = 5  # a member may fork while we kill


def kill_members(leaders: Mapping[int, int | None]) -> None:
    """SIGKILL all processes in the sessions or groups led by these pids (mapped to their start ticks).

    A process that began before the leader did is none of its children, so a recycled pid is left alone.
    Where /proc cannot tell, the whole group is signalled.
    """
    for _ in range(_ROUNDS):
        members = _members(leaders)
        if members is None:
            for leader in leaders:
                with contextlib.suppress(OSError):
                    os.killpg(leader, signal.SIGKILL)
            return
        if not members:
            return
        for pid in members:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def any_left(leader: int, born: int | None) -> bool:
    """Tell whether a process other than `leader` lives in the session or group that it led; False if unknown."""
    return bool(_members({leader: born}))


def _members(leaders: Mapping[int, int | None]) -> list[int] | None:
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    own = os.getpid()
    members = []
    for pid in pids:
        fields = stat_fields(pid)
        if not fields or pid == own or fields[0] in "ZX":
            continue
        for leader in {int(fields[2]), int(fields[3])} & leaders.keys():
            born = leaders[leader]
            if pid != leader and (born is None or int(fields[19]) >= born):
                members.append(pid)
                break
    return members


def handles(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal; True where nobody can tell."""
    caught = status_fields(pid).get("SigCgt")
    return caught is None or has_signal(caught, number)


def number_for(pid: int, number: int) -> int:
    """Return the signal that a rank gets in the place of `number`: SIGTERM where it does nothing on that."""
    as_it_is = number in (signal.SIGINT, signal.SIGTERM) or handles(pid, number)
    return number if as_it_is else signal.SIGTERM


_HURRY_LOOK_S = 0.25  # how often it is asked whether the rest of a grace is cut short
_KILL_WAIT_S = 5.0  # a killed process that is still there after this sits in the kernel


class RankProcesses:
    """Watches and ends the processes of one attempt. One thread only."""

    def __init__(
        self,
        workers: WorkerProcesses,
        ranks: Mapping[int, int],
        *,
        wakeup: int | None = None,
        files: AttemptFiles | None = None,
        attempt: int = 0,
    ) -> None:
        """Watch these workers; `ranks` maps local to global ranks.

        `wakeup` is one more descriptor whose readability ends a wait. `files` tell what the script of a
        rank had left with before its process aborted.
        """
        self.exits: list[RankExit] = []
        self.unkillable: tuple[int, ...] = ()  # pids that outlived SIGKILL
        self._workers = workers
        self._ranks = dict(ranks)
        self._files = files
        self._attempt = attempt
        self.pids = {self._ranks[local_rank]: pid for local_rank, pid in workers.pids().items()}
        self._born = {pid: process_start_ticks(pid) for pid in self.pids.values()}
        self._running = dict(self.pids)
        self._signalled = False
        self._finished: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(workers.fileno(), selectors.EVENT_READ)
        if wakeup is not None:
            self._selector.register(wakeup, selectors.EVENT_READ)

    @property
    def running(self) -> tuple[int, ...]:
        """Ranks whose process has not ended."""
        return tuple(sorted(self._running))

    @property
    def server_end(self) -> ServerEnd | None:
        """How the fork server ended; None while it runs."""
        return self._workers.server_end()

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes by rank of those that have ended."""
        return {end.rank: end.exit_code for end in self.exits if end.exit_code is not None}

    def wait(self, timeout_s: float) -> list[RankExit]:
        """Wait until a rank ends, `wakeup` is readable or the time is over; return the new ends."""
        gone = self._collect()
        if gone or not self._running:
            return gone
        self._selector.select(max(0.0, timeout_s))
        return self._collect()

    def end(
        self,
        grace_s: float,
        *,
        first: int = signal.SIGTERM,
        hurry: Callable[[], bool] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        at_the_end: Callable[[], None] = lambda: None,
    ) -> None:
        """End every rank and what it started: `first`, up to `grace_s` seconds, SIGKILL for whole sessions.

        `hurry` is asked after each wait and cuts the grace short, `meanwhile` called where the grace goes on;
        `at_the_end` is called when it is over and ranks still run.
        """
        self.signal(first)
        deadline = time.monotonic() + grace_s
        while self._running and (left := deadline - time.monotonic()) > 0:
            self.wait(left if hurry is None else min(left, _HURRY_LOOK_S))
            if hurry is not None and hurry():
                break
            meanwhile()
        else:
            if self._running:
                at_the_end()
        self.kill()

    def signal(self, number: int) -> None:
        """Send a signal to each running rank itself; a stopped one is continued so that it can take it.

        Not to its children: a DataLoader worker that dies of it would break the rank's last save. A rank that does
        nothing on this signal gets SIGTERM, for which it may have a handler.
        """
        self._signalled = True
        for pid in self._running.values():
            with contextlib.suppress(OSError):
                os.kill(pid, number_for(pid, number))
                os.kill(pid, signal.SIGCONT)

    def finish(self, rank: int) -> None:
        """SIGKILL a rank that has finished its training, and so counts as finished, and the rest of its session."""
        if (pid := self._running.get(rank)) is not None:
            self._finished.add(rank)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            kill_members({pid: self._born.get(pid)})

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
        kill_members({pid: ticks for pid, ticks in self._born.items() if pid not in well})

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
            left_with = self._left_with(rank, pid) if seen.code == -signal.SIGABRT else None
            is_late = rank in self._finished
            if is_late:
                left_with = 0
            gone.append(
                RankExit(
                    rank,
                    local_rank,
                    pid,
                    seen.code if left_with is None else left_with,
                    len(self.exits),
                    seen.seen_ns,
                    self._signalled,
                    aborted_at_exit=left_with is not None and not is_late,
                    ended_late=is_late,
                    server_lost=seen.server_lost,
                )
            )
            self.exits.append(gone[-1])
        return gone

    def _left_with(self, rank: int, pid: int) -> int | None:
        """Return what the script of a rank had left with before its process aborted; None where it had not ended."""
        return None if self._files is None else self._files.script_exit_code(self._attempt, rank, pid)
