"""A rank process that may be asked or signalled: pinned by a pidfd, and proven to be ours.

A page is written by the rank, so its pid is a claim. The pidfd pins whatever has that pid now; only then are
owner, start time and the mapping of the page compared, so the process that was checked is the one that gets
the signals, whatever becomes of the number.
"""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import attrs

from resilience_sdk.hostinfo import process_is_gone, process_start_ticks
from resilience_sdk.monitor.procfs import status_fields


@attrs.frozen
class Target:
    """One verified rank process. `stem`: its files in the page directory, without suffix."""

    rank: int
    pid: int
    start_ticks: int
    pidfd: int
    """What pins the process; -1 where the platform has no pidfds, so that only its number is known."""
    stem: Path

    def file(self, suffix: str) -> Path:
        """Return one of the rank's files, e.g. `file(".stack")`."""
        return self.stem.with_name(self.stem.name + suffix)

    @property
    def alive(self) -> bool:
        """Whether the pinned process still runs; a zombie does not."""
        if self.pidfd < 0:
            return not process_is_gone(self.pid, self.start_ticks or None)
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return not poller.poll(0)

    def send(self, number: int) -> bool:
        """Send a signal through the pidfd; False when the process is gone. Raises OSError otherwise."""
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            elif self.alive:
                os.kill(self.pid, number)
            else:
                return False
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Give the pidfd back; to be called once, by whoever opened the target."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def open_target(rank: int, pid: int, start_ticks: int, stem: Path) -> Target | None:
    """Pin the process and return it, or None unless it is the one that wrote the page.

    Same start time, same user, and the page mapped into it: then it is no other process with a reused pid,
    and no pid that somebody wrote into a page. Without /proc there is only the word of the page, which lies in a
    directory that nobody else can write to; without pidfds the process is not pinned.
    """
    if pid <= 0:
        return None
    pidfd = -1
    if hasattr(os, "pidfd_open") and hasattr(signal, "pidfd_send_signal"):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
    target = Target(rank, pid, start_ticks, pidfd, stem)
    is_its = is_ours(target) and _maps(pid, target.file(".page")) if start_ticks else target.alive and not _has_proc()
    if is_its:
        return target
    target.close()
    return None


def is_ours(target: Target) -> bool:
    """Tell whether the pid still is the process that was pinned, and runs as our user."""
    uids = status_fields(target.pid).get("Uid", "").split()[:2]
    return uids == [str(os.getuid()), str(os.geteuid())] and process_start_ticks(target.pid) == target.start_ticks


def _has_proc() -> bool:
    return process_start_ticks(os.getpid()) is not None


def _maps(pid: int, page: Path) -> bool:
    """Tell whether the process has the page mapped.

    Compared by directory and name: inodes in `maps` are those of the lower layer on overlay file systems, and
    a page that was deleted and made anew by another process is shown as `(deleted)`.
    """
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return False
    return any(line.endswith(f"/{page.parent.name}/{page.name}") for line in text.splitlines())
