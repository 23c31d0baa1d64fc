"""The ranks that a monitor watches: their pages, their processes, and whether they still live.

A page is written by the rank, so its pid is a claim. The pidfd pins whatever has that pid now; only then are
owner, start time and the mapping of the page compared, so the process that was checked is the one that gets
the signals, whatever becomes of the number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time
from pathlib import Path

import attrs

from resilience_sdk.recorder import witness_ring
from resilience_sdk.recorder.page_directory import parse_stem
from resilience_sdk.recorder.page_reader import PageReader, RankSnapshot
from resilience_sdk.system import hostinfo
from resilience_sdk.system.hostinfo import process_is_gone, process_start_ticks
from resilience_sdk.system.procfs import status_fields


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


_GARBLED = 3  # readings in a row after which nothing is known of a rank any more
_LOOK_FOR_PIDS_S = 0.02  # where the kernel does not tell of deaths
_SETTLING_S = 1.0  # a page this young may not be filled in yet
# struct pidfd_info of <linux/pidfd.h>, first version: mask, cgroup, eleven 32-bit ids, exit code
_PIDFD_GET_INFO = 0xC040_FF0B
_PIDFD_INFO_BYTES = 64
_PIDFD_INFO_EXIT = 1 << 3
_WAIT_STATUS_FIELD = 49  # exit_code, the 52nd of /proc/<pid>/stat, counted behind the name


class WatchedRank:
    """One rank process: its page, and a pinned process that tells when it ends."""

    def __init__(self, stem: Path, reader: PageReader, snapshot: RankSnapshot, target: Target | None) -> None:
        """Hold what `RankTable` has verified; `target` is None for a process that was gone already."""
        self.stem = stem
        self.reader = reader
        self.snapshot = snapshot
        self.target = target
        self.died_ns: int | None = None if target is not None else time.monotonic_ns()
        self.inode = 0
        """The file of the page, which the rank may make anew."""
        self.adrift = False
        """Whether that file was removed under the living rank; what it writes is read all the same."""
        self.wait_status: int | None = None
        """How it ended, where that could be read before the parent collected it."""
        self._garbled = 0

    @property
    def rank(self) -> int:
        """Global rank, as the page says now."""
        return self.snapshot.rank

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return self.died_ns is None

    def refresh(self) -> None:
        """Read the page anew; a garbled one leaves the last good reading in place."""
        fresh = self.reader.snapshot()
        if fresh is not None and fresh.pid == self.snapshot.pid:
            self.snapshot = fresh
            self._garbled = 0
        else:
            self._garbled += 1

    def reopen(self, inode: int) -> None:
        """Read the page that the rank has made in the place of a removed one, once it is the same rank's."""
        try:
            reader = PageReader(self.stem.with_name(self.stem.name + ".page"))
        except OSError:
            return
        fresh = reader.snapshot()
        if fresh is None or (fresh.pid, fresh.start_ticks) != (self.snapshot.pid, self.snapshot.start_ticks):
            reader.close()
            return
        self.reader.close()
        self.reader, self.inode, self.adrift = reader, inode, False

    @property
    def readable(self) -> bool:
        """Whether the page can be read; the last good reading of one that cannot looks like a rank that hangs."""
        return self._garbled < _GARBLED

    def close(self) -> None:
        """Release the page and the pinned process."""
        self.reader.close()
        if self.target is not None:
            self.target.close()


class RankTable:
    """Finds pages in the page directory and verifies that each belongs to a living process of ours."""

    def __init__(self, pages: Path) -> None:
        """Watch `pages`."""
        self._pages = pages
        self._known: dict[str, WatchedRank | None] = {}
        self._deaths = select.epoll() if hasattr(select, "epoll") else None  # without it there are no pidfds either
        self._refused: list[str] = []

    def take_refused(self) -> list[str]:
        """Return and forget the reasons why pages were refused."""
        refused, self._refused = self._refused, []
        return refused

    def scan(self) -> list[WatchedRank]:
        """Look for new pages and return the ranks that appeared."""
        new: list[WatchedRank] = []
        now_ns = time.monotonic_ns()
        names: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError):  # removed: the pages that are known are still mapped
            names = {entry.name: entry.inode() for entry in os.scandir(self._pages) if entry.name.endswith(".page")}
        newest = max((stem[0] for name in names if (stem := parse_stem(name.removesuffix(".page")))), default=-1)
        for name in [known for known in self._known if known not in names]:
            if not self._is_lost(name, newest):
                self._forget(name)
        for name, inode in names.items():
            known = self._known.get(name)
            if known is not None and known.inode != inode:
                known.reopen(inode)
        for name in sorted(names.keys() - self._known.keys()):
            try:
                self._known[name] = watched = self._open(self._pages / name)
                if watched is not None:
                    watched.inode = names[name]
            except _NotYetError:
                continue
            if watched is not None:
                if not watched.alive:
                    watched.died_ns = now_ns  # one time for all: nobody saw in which order they went
                new.append(watched)
        return new

    def all(self) -> list[WatchedRank]:
        """Return all verified ranks whose page is still there, living or dead."""
        return [watched for watched in self._known.values() if watched is not None]

    def wait(self, timeout_s: float) -> list[WatchedRank]:
        """Sleep until a rank dies, at most `timeout_s`; return those that died, in the order of their deaths."""
        died: list[WatchedRank] = []
        living = {w.target.pidfd: w for w in self.all() if w.target is not None and w.alive and w.target.pidfd >= 0}
        unpinned = [w for w in self.all() if w.target is not None and w.alive and w.target.pidfd < 0]
        if self._deaths is None or unpinned:
            died += self._wait_for_pids(unpinned, timeout_s)
            timeout_s = 0.0
        for fd, _ in self._deaths.poll(max(0.0, timeout_s)) if self._deaths is not None else ():
            watched = living.get(fd)  # the kernel lists them as they became ready
            if watched is not None and self._deaths is not None:
                self._note_death(watched)
                self._deaths.unregister(fd)
                died.append(watched)
        return died

    def _wait_for_pids(self, ranks: list[WatchedRank], timeout_s: float) -> list[WatchedRank]:
        """Like `wait`, for processes of which only the number is known: look now and then."""
        end = time.monotonic() + timeout_s
        while True:
            died = [watched for watched in ranks if watched.target is not None and not watched.target.alive]
            left_s = end - time.monotonic()
            if died or left_s <= 0:
                break
            time.sleep(min(_LOOK_FOR_PIDS_S, left_s))
        for watched in died:
            self._note_death(watched)
        return died

    def _note_death(self, watched: WatchedRank) -> None:
        watched.wait_status = wait_status(watched.target) if watched.target is not None else None
        watched.died_ns = time.monotonic_ns()
        watched.refresh()

    def _open(self, path: Path) -> WatchedRank | None:
        """Return a verified rank, or None (and the reason in `_refused`); raise _NotYetError to ask again later."""
        name = parse_stem(path.stem)
        if name is None:
            self._refuse(path, "not the name of a rank page")
            return None
        try:
            reader = PageReader(path)
        except FileNotFoundError:
            raise _NotYetError from None  # removed since it was listed
        except OSError as error:
            self._refuse(path, str(error), may_settle=True)
            return None
        snapshot = reader.snapshot()
        if snapshot is None:
            reader.close()
            self._refuse(path, "not a rank page, or one of another version", may_settle=True)
            return None
        if (snapshot.attempt, snapshot.pid) != (name[0], name[2]):
            reader.close()
            self._refuse(path, f"the page itself says attempt {snapshot.attempt} and process {snapshot.pid}")
            return None
        stem = path.with_suffix("")
        target = open_target(snapshot.rank, snapshot.pid, snapshot.start_ticks, stem)
        if target is None and not hostinfo.process_is_gone(snapshot.pid, snapshot.start_ticks):
            reader.close()
            if _is_ending(snapshot.pid, snapshot.start_ticks):
                raise _NotYetError
            self._refuse(path, f"process {snapshot.pid}, which it claims, does not have it mapped")
            return None
        if target is not None and target.pidfd >= 0 and self._deaths is not None:
            self._deaths.register(target.pidfd, select.EPOLLIN)
        return WatchedRank(stem, reader, snapshot, target)

    def _refuse(self, path: Path, why: str, *, may_settle: bool = False) -> None:
        if may_settle:
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime < _SETTLING_S:
                    raise _NotYetError
        self._refused.append(f"{path.name}: {why}")

    def _is_lost(self, name: str, newest: int) -> bool:
        """Tell whether a page was removed under its rank, and not by who is done with it.

        A rank that has died since then counts until the next attempt begins.
        """
        watched = self._known[name]
        if watched is None:
            return False
        if watched.alive and not watched.adrift:
            watched.refresh()
            watched.adrift = watched.snapshot.exit_state == "running"
        return watched.adrift and (watched.alive or newest <= watched.snapshot.attempt)

    def _forget(self, name: str) -> None:
        watched = self._known.pop(name)
        if watched is not None:
            if watched.target is not None and watched.alive and self._deaths is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._deaths.unregister(watched.target.pidfd)
            watched.close()


class _NotYetError(Exception):
    """A page is too young to be judged, or about to go."""


def _is_ending(pid: int, start_ticks: int) -> bool:
    """Tell whether the process of that pid and start has given its memory back, on its way to being a zombie."""
    try:
        return not Path(f"/proc/{pid}/maps").read_bytes() and hostinfo.process_start_ticks(pid) == start_ticks
    except OSError:
        return False


def wait_status(target: Target) -> int | None:
    """Return the wait status of a process that has ended, which is not a child of ours; None if nobody can tell.

    It is in /proc until the parent has collected it; from then on Linux 6.15 and later keep it with the pidfd.
    """
    status = _collected_status(target)
    if status is None:
        fields = hostinfo.stat_fields(target.pid)
        is_it = len(fields) > _WAIT_STATUS_FIELD and int(fields[19]) == target.start_ticks
        if is_it and fields[0] in ("Z", "X"):
            return int(fields[_WAIT_STATUS_FIELD])
        status = _collected_status(target)  # collected between the two looks
    return status


def _collected_status(target: Target) -> int | None:
    info = bytearray(_PIDFD_INFO_BYTES)
    struct.pack_into("=Q", info, 0, _PIDFD_INFO_EXIT)
    with contextlib.suppress(OSError, ValueError):  # no pidfd, or a kernel that does not tell
        fcntl.ioctl(target.pidfd, _PIDFD_GET_INFO, info)
        mask, status = struct.unpack_from("=Q52xi", info)
        if mask & _PIDFD_INFO_EXIT:
            return int(status)
    return None


def remove_files(stem: Path) -> None:
    """Remove all files of one rank process from the page directory."""
    for suffix in (
        ".page",
        ".stack",
        ".threads",
        ".fifo",
        ".fr.json",
        ".error.json",
        ".ending.json",
        ".held.json",
        ".kernels.json",
        ".role",
        witness_ring.SUFFIX,
    ):
        with contextlib.suppress(OSError):
            os.unlink(f"{stem}{suffix}")


def is_clean(watched: WatchedRank) -> bool:
    """Tell whether a dead rank ended well, by its own word and its exit status where that is known."""
    if watched.wait_status is not None:
        return watched.wait_status == 0
    return watched.snapshot.exit_state == "clean"


def exit_code(watched: WatchedRank) -> int | None:
    """Return the exit code of a dead rank, negative for a signal; None where nobody could tell."""
    return None if watched.wait_status is None else os.waitstatus_to_exitcode(watched.wait_status)
