"""The leases: at most one job uses a run directory at a time, and one process writes its checkpoints.

A small file that its job renews every 10 s. It is stale after 60 s, or at once when the process that wrote it
is provably gone (same host, boot and PID namespace), or when the job that wrote it comes back (a requeue).
Ages are differences of modification times of one file system, so clocks of two hosts are never compared.

All launchers of a multi-node job hold the same lease, since it is the job's: each renews it when nobody did.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection
from pathlib import Path

import attrs

from resilience_sdk.core.atomic_write import share_like_directory, write_whole
from resilience_sdk.core.console import printable, say_once
from resilience_sdk.core.json_records import from_text, to_values
from resilience_sdk.core.plain_file import NotAPlainFileError, open_plain, report_other_kind
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import DirectoryInUseError, RunDirectoryError
from resilience_sdk.system.file_lock import file_lock
from resilience_sdk.system.hostinfo import boot_id, host_name, pid_namespace, process_is_gone, process_start_ticks

RENEW_INTERVAL_S = 10.0
STALE_AFTER_S = 60.0
_TRIES = 20
_LOCK_PATIENCE_S = 5.0
_LOOK_AGAIN_S = 0.1
_MONITOR_LEAVES_S = 3.0  # it looks twice a second


@attrs.frozen
class LeaseHolder:
    """What a lease file says: the job, and the process that wrote it."""

    job: str
    host: str = ""
    boot_id: str = ""
    pid_namespace: str = ""
    pid: int | None = None
    start_ticks: int | None = None
    started_at: float | None = None

    def is_gone(self) -> bool:
        """Tell whether that process is provably gone, which only its own host can prove."""
        return self._is_here() and self.pid is not None and process_is_gone(self.pid, self.start_ticks)

    def is_another_here(self, kin: Collection[int] = ()) -> bool:
        """Tell whether that process is provably alive on this host, and neither this process nor one of `kin`."""
        if not self._is_here() or self.pid is None or self.pid in (os.getpid(), *kin):
            return False
        return not process_is_gone(self.pid, self.start_ticks)

    def __str__(self) -> str:
        """Return who it is, for a person."""
        return printable(f"job {self.job} (host {self.host}, pid {self.pid})")

    def _is_here(self) -> bool:
        return self.host == host_name() and self.boot_id == boot_id() and self.pid_namespace == pid_namespace()


class Lease:
    """This job's hold on a run directory. Not thread-safe: one thread acquires, renews and releases."""

    def __init__(self, path: Path, holder: LeaseHolder) -> None:
        """Use `Lease.acquire`."""
        self.path = path
        self.holder = holder
        self.unheld_s: float | None = None
        """For how long nobody had renewed the lease that this one took the place of; None where there was none."""

    @classmethod
    def acquire(cls, run_dir: RunDirectory, job_key: str, *, alone: bool = False, kin: Collection[int] = ()) -> Lease:
        """Take the lease of `run_dir` for the job `job_key`, or join it where that job has it already.

        `alone`: the job has this one process only, so that another living one with the same key is another job
        (two runs under one `RESILIENCE_JOB_ID`). What died, or ran on another host, may be its own past; and what
        the processes `kin` hold is this one's too.

        Raises:
            DirectoryInUseError: Another live job uses the directory.
            RunDirectoryError: The file cannot be written.
        """
        pid = os.getpid()
        holder = LeaseHolder(
            job=job_key,
            host=host_name(),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            pid=pid,
            start_ticks=process_start_ticks(pid),
            started_at=time.time(),
        )
        lease = cls(cls._file_in(run_dir), holder)
        try:
            lease._acquire_one_at_a_time(alone=alone, kin=kin)
        except OSError as error:
            cure = "remove it, or name" if isinstance(error, NotAPlainFileError) else "name"
            raise RunDirectoryError(
                f"cannot write {lease.path}: {error.strerror}; {cure} another directory with --run-dir"
            ) from None
        return lease

    def renew(self) -> bool:
        """Say that the job is alive; call it every `RENEW_INTERVAL_S`. Return False if another job took over.

        Never raises: a full disk must not end the run. It is said once.
        """
        try:
            found = _read(self.path)
            if self._other_job(found) is not None:
                return False
            if found is None or found.holder == self.holder or self._age(found) >= RENEW_INTERVAL_S:
                self._replace()
        except OSError as error:
            say_once(f"lease:{self.path}", f"cannot renew {self.path}: {error.strerror}; another job may take over")
        return True

    def release(self) -> None:
        """Give the directory up, if this process wrote the lease last; never raises."""
        with contextlib.suppress(OSError):
            found = _read(self.path)
            if found is not None and found.holder == self.holder:
                self.path.unlink()

    @staticmethod
    def _file_in(run_dir: RunDirectory) -> Path:
        return run_dir.lease

    def _other_job(self, found: _Found | None) -> LeaseHolder | None:
        holder = None if found is None else found.holder
        return None if holder is None or holder.job == self.holder.job else holder

    def _acquire_one_at_a_time(self, *, alone: bool, kin: Collection[int]) -> None:
        """Keep others who want the same lease out meanwhile, where the file system has locks.

        Without, three jobs that find the same stale lease may undo one another: one removes it and writes its
        own, the second takes that for the stale one, and the third comes between. So the winner looks again.
        """
        with contextlib.ExitStack() as held:
            locked = False
            with contextlib.suppress(OSError, ImportError):
                locked = held.enter_context(file_lock(self.path.parent, patience_s=_LOCK_PATIENCE_S))
            self._acquire(alone=alone, kin=kin)
            if locked:
                return
            time.sleep(_LOOK_AGAIN_S)
            found = _read(self.path)
            if found is not None and (other := self._other_job(found)) is not None:
                raise DirectoryInUseError(self._in_use(other, self._age(found)))

    def _acquire(self, *, alone: bool, kin: Collection[int]) -> None:
        for _ in range(_TRIES):
            if self._write_exclusively():
                return
            found = _read(self.path)
            if found is None:
                continue
            holder, age = found.holder, self._age(found)
            if holder is None:
                if age < STALE_AFTER_S:
                    time.sleep(0.02)  # its writer has created it and is about to fill it, or died in between
                    continue
            elif holder.job == self.holder.job:
                if alone and holder.is_another_here(kin):
                    raise DirectoryInUseError(self._in_use(holder, age))
                self.unheld_s = max(0.0, age)
                self._replace()
                return
            elif age < STALE_AFTER_S and not holder.is_gone():
                raise DirectoryInUseError(self._in_use(holder, age))
            self.unheld_s = max(0.0, age)
            self._set_stale_aside(found)
        raise RunDirectoryError(
            f"{self.path} cannot be read as a lease; if no job uses {self.path.parent}, remove that file"
        )

    def _in_use(self, holder: LeaseHolder, age_s: float) -> str:
        who = _writer_of(self.path.parent, holder)
        return (
            f"{self.path.parent} is in use by {who}, seen alive {max(0.0, age_s):.0f} s ago; name another "
            f"directory with --run-dir or run_dir=, or wait: the lease of a dead job ends after {STALE_AFTER_S:.0f} s"
        )

    def _set_stale_aside(self, found: _Found) -> None:
        """Remove the stale lease that was read, and only that one: another job may have been faster."""
        aside = self.path.with_name(f".lease-stale-{os.getpid()}-{time.monotonic_ns()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            caught = _read(aside)
            if caught is not None and caught.raw != found.raw and not self.path.exists():
                os.rename(aside, self.path)
            else:
                aside.unlink()

    def _write_exclusively(self) -> bool:
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        try:
            share_like_directory(fd, self.path.parent)
            os.write(fd, self._text().encode())
        except OSError:
            # Empty it would keep everybody out until it is stale.
            self.path.unlink()
            raise
        finally:
            os.close(fd)
        return True

    def _replace(self) -> None:
        write_whole(self.path, self._text())

    def _text(self) -> str:
        return json.dumps(to_values(self.holder)) + "\n"

    def _age(self, found: _Found) -> float:
        """Return seconds since the lease was written, both readings by the clock of its file system."""
        probe = self.path.with_name(f".lease-probe-{os.getpid()}-{time.monotonic_ns()}")
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            now = os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            os.unlink(probe)
        return now - found.written_at


class WriterLease(Lease):
    """One process's hold on the checkpoints in a run directory, whatever job holds the directory itself."""

    @staticmethod
    def _file_in(run_dir: RunDirectory) -> Path:
        return run_dir.writer

    def _in_use(self, holder: LeaseHolder, age_s: float) -> str:
        return (
            f"the checkpoints in {self.path.parent} are written by {holder}, seen alive {max(0.0, age_s):.0f} s ago: "
            "end that process, name another run_dir, or only read them: Checkpointer(..., read_only=True); what a "
            f"dead process held on another host is free after {STALE_AFTER_S:.0f} s"
        )


def refuse_other_jobs(run_dir: RunDirectory, job: str) -> None:
    """Raise `DirectoryInUseError` where a job other than `job` uses `run_dir`. Takes nothing.

    One that has just ended may still be held by its monitor: so it waits for a moment, where nobody writes there.
    """
    until = time.monotonic() + _MONITOR_LEAVES_S
    while (holder := current_holder(run_dir)) is not None and holder.job != job:
        if _living(run_dir.writer) is None and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
            continue
        raise DirectoryInUseError(
            f"{run_dir.path} is in use by {_writer_of(run_dir.path, holder)}: end that job, name another directory "
            f"with run_dir= or --run-dir, or wait: the lease of a dead job ends after {STALE_AFTER_S:.0f} s"
        )


def current_holder(run_dir: RunDirectory) -> LeaseHolder | None:
    """Return who holds `run_dir` by a lease that is not provably over, for `status`; None when nobody does.

    Only reads, so the age is by this host's clock and a reader without write permission gets an answer.
    """
    return _living(run_dir.lease)


def renewed_after_s(run_dir: RunDirectory) -> float | None:
    """Return for how many seconds a lease of `run_dir` was renewed beyond the journal's newest word; None: no lease.

    A job that ends by itself takes its lease with it: what is left is the last sign of a killed one. Both times are
    of one file system, and a copy of the directory, which has new ones, tells no more than the journal.
    """
    with contextlib.suppress(OSError):
        if (found := _read(run_dir.lease)) is not None:
            told_at = [path.stat().st_mtime for path in run_dir.journal.glob("*.jsonl")]
            return max(0.0, found.written_at - max(told_at)) if told_at else 0.0
    return None


def _writer_of(path: Path, holder: LeaseHolder) -> LeaseHolder:
    """Return the process of `holder`'s job that trains, where that is known: the lease may be a monitor's."""
    writer = _living(RunDirectory(path).writer)
    return writer if writer is not None and writer.job == holder.job else holder


def _living(path: Path) -> LeaseHolder | None:
    try:
        found = _read(path)
    except NotAPlainFileError as error:
        report_other_kind(error)
        return None
    except OSError:
        return None
    if found is not None and found.holder is not None and not found.holder.is_gone():
        return found.holder if time.time() - found.written_at < STALE_AFTER_S else None
    return None


@attrs.frozen
class _Found:
    """A lease file as it was read; `holder` is None when it is empty or torn."""

    raw: bytes
    written_at: float
    holder: LeaseHolder | None


def _read(path: Path) -> _Found | None:
    """Return the lease at `path`, None when there is none. Opening first revalidates a network cache."""
    try:
        fd = open_plain(path)
    except FileNotFoundError:
        return None
    try:
        written_at = os.fstat(fd).st_mtime
        raw = os.read(fd, 1 << 16)
    finally:
        os.close(fd)
    return _Found(raw, written_at, from_text(LeaseHolder, raw))
