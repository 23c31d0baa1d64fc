"""The writer's lease: one process holds the checkpoints of a run directory from its first resume or save on.

Two that write there would resume from one another's state, and delete what the other is about to commit. The hold is
a lease beside that of the job (see `lease`), since it is about processes: two of them may have one job key.
"""

from __future__ import annotations

import multiprocessing.util
import os
import threading
import weakref

import attrs

from resilience_sdk.core.console import say_once
from resilience_sdk.core.lease import RENEW_INTERVAL_S, Lease, WriterLease
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import CheckpointError


@attrs.frozen
class Claim:
    """In whose name a process writes checkpoints."""

    job: str
    alone: bool
    """Another living process with this job key is a writer of its own: nobody sees to it that there is only one."""
    kin: frozenset[int] = frozenset()
    """Processes whose hold is this one's too: who started it."""


class WriterHold:
    """This process's hold, shared by all its checkpointers of one run directory. It ends with the last of them.

    A thread renews it. Where none can be had it lasts for a minute on other hosts, on this one as long as the process.
    """

    def __init__(self, lease: Lease) -> None:
        """Use `hold_checkpoints`."""
        self.in_flight: set[str] = set()
        """Tokens of what a checkpointer of this process writes now: no leftovers for another one of them."""
        self._lost = threading.Event()
        ended = threading.Event()
        # At the end of the process, too; and not in a child that it forks, whose hold this is not.
        multiprocessing.util.Finalize(self, _end, (lease, ended), exitpriority=0)
        try:
            threading.Thread(
                target=_renew, args=(lease, ended, self._lost), name="resilience-writer", daemon=True
            ).start()
        except RuntimeError as error:
            say_once(
                f"writer:{lease.path}", f"{lease.path} is not renewed ({error}): another host may write there, too"
            )

    def check(self) -> None:
        """Raise `CheckpointError` where another process has taken over, as it may from one that was long frozen."""
        if self._lost.is_set():
            raise CheckpointError("another process writes the checkpoints there now, since this one was silent")


def hold_checkpoints(run_dir: RunDirectory, claim: Claim) -> WriterHold:
    """Become the one writer of the checkpoints in `run_dir`. Any thread.

    Raises `DirectoryInUseError` where another process is, `RunDirectoryError` where it cannot be told.
    """
    place = os.path.realpath(run_dir.path)
    hold = _holds.get(place)
    if hold is None:
        hold = WriterHold(WriterLease.acquire(run_dir, claim.job, alone=claim.alone, kin=claim.kin))
        _holds[place] = hold
    return hold


# By place. A forked child finds what its parent held: it is of the same job.
_holds: weakref.WeakValueDictionary[str, WriterHold] = weakref.WeakValueDictionary()


def _renew(lease: Lease, ended: threading.Event, lost: threading.Event) -> None:
    while not ended.wait(RENEW_INTERVAL_S):
        if not lease.path.parent.exists():
            return  # removed by its owner: nothing is left to hold
        if not lease.renew():
            lost.set()
            return


def _end(lease: Lease, ended: threading.Event) -> None:
    ended.set()
    lease.release()
