"""The probe of one directory or file.

Room, rights and speed. Each path has a process of its own, because a mount may hang for ever.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from resilience_sdk.core.words import GIB, size
from resilience_sdk.health.findings import Finding, Status, high, low
from resilience_sdk.health.probes import STORAGE, Context
from resilience_sdk.system.mounts import Mount, mount_of

# What these hold is gone when the machine restarts, and takes its memory until then.
IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})

_PREFIX = ".resilience-probe-"
_LEFT_AFTER_S = 600.0  # a try ends, or is killed, within a minute
_MOST_TIMED_ENTRIES = 10_000
BYTES = 4 << 20  # enough to see a rate, little enough for a slow disk
_CHUNK = 1 << 20
_FILES = 8
BUDGET_S = 0.6  # a try that has taken so long has seen enough; four of them end before the deadline of the probe


@attrs.frozen
class Throughput:
    """How much went through in how long."""

    count: int
    took_s: float


def metadata(directory: Path) -> Throughput:
    """Create, write, rename, look up, list and remove small files in a directory of its own; count the operations.

    Raises:
        OSError: One of them failed.
    """
    began = time.monotonic()
    count = 2
    place = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    try:
        for number in range(_FILES):
            first, second = place / f"{number}.new", place / str(number)
            first.touch()
            first.rename(second)
            second.stat()
            second.unlink()
            count += 4
            if time.monotonic() - began > BUDGET_S:
                break
        os.listdir(place)
        count += 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Throughput(count, time.monotonic() - began)


def write_and_read(directory: Path) -> tuple[Throughput, Throughput | None]:
    """Write a file to the disk itself, then read it from there; the read is None where memory would answer.

    Raises:
        OSError: There is no room, or no right, or the disk failed.
    """
    with _scratch_file(directory) as fd:
        block = os.urandom(_CHUNK)  # not zeros: file systems compress
        began, written = time.monotonic(), 0
        while written < BYTES and time.monotonic() - began <= BUDGET_S:
            written += os.write(fd, block)
        os.fsync(fd)
        wrote = Throughput(written, time.monotonic() - began)
        if not _forget(fd):
            return wrote, None
        return wrote, _read(fd)


def read(path: Path) -> Throughput:
    """Read the beginning of a file as the job would: opening a pipe waits for its writer.

    Raises:
        OSError: It cannot be opened or read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _forget(fd)
        return _read(fd)
    finally:
        os.close(fd)


def remove_left(directory: Path) -> int:
    """Remove what earlier tries left in a directory because they were killed; return how many things went.

    Only this user's, only what is named as ours, and only what is older by the clock of the file system than any try
    lives. Looks at a bounded number of entries for a bounded time; what cannot be removed stays.
    """
    gone, until = 0, time.monotonic() + BUDGET_S
    with contextlib.suppress(OSError), _scratch_file(directory) as fd:
        now = os.fstat(fd).st_mtime  # of the server, where there is one
        with os.scandir(directory) as entries:
            for entry in itertools.islice(entries, _MOST_TIMED_ENTRIES):
                if entry.name.startswith(_PREFIX):
                    with contextlib.suppress(OSError):
                        gone += _remove_if_left(entry, now)
                if time.monotonic() > until:
                    break
    return gone


def _remove_if_left(entry: os.DirEntry[str], now: float) -> bool:
    about = entry.stat(follow_symlinks=False)
    if about.st_uid != os.getuid() or now - about.st_mtime < _LEFT_AFTER_S:
        return False
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.path)
        return True
    for number in range(_FILES):
        for name in (f"{number}.new", str(number)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(entry.path, name))
    os.rmdir(entry.path)
    return True


def _read(fd: int) -> Throughput:
    with contextlib.suppress(OSError):  # a pipe has no place to go back to
        os.lseek(fd, 0, os.SEEK_SET)
    began, count = time.monotonic(), 0
    while count < BYTES and time.monotonic() - began <= BUDGET_S:
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            break
        count += len(chunk)
    return Throughput(count, time.monotonic() - began)


def _forget(fd: int) -> bool:
    """Ask the kernel to forget its copy in memory; tell whether it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    return False


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    """Open a file that nobody sees; where there is no such thing, one that is removed in any case."""
    try:
        fd, name = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    except (OSError, AttributeError):  # NFS and others have none, and an error that counts comes again
        fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
    try:
        yield fd
    finally:
        os.close(fd)
        if name is not None:
            os.unlink(name)


LOW_BYTES = GIB
CHECKPOINTS = 2  # there must be room for so many more: the newest good one is removed after the next is complete
MIN_INODES = 32
_MAX_ENTRIES = 1000
_OTHER_DIRECTORY = "name another directory with --run-dir"


def probe(context: Context) -> Iterator[Finding]:
    """Yield what is to be said of `context.only`: the run directory, or something that the job reads."""
    path = os.path.abspath(context.only)
    mount = mount_of(os.path.realpath(path), context.root)
    if context.run_dir is not None and path == os.path.abspath(context.run_dir):
        yield from run_directory(path, mount, elsewhere=context.has_nodes_elsewhere)
    else:
        yield data(path, mount)


def run_directory(path: str, mount: Mount | None, *, elsewhere: bool) -> Iterator[Finding]:
    """Yield whether the run directory, or the directory that it will be made in, can be written, and how fast."""
    yield _file_system(path, mount, elsewhere=elsewhere)
    try:
        place = next(place for place in (Path(path), *Path(path).parents) if place.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a directory")
        yield from _room(path, place)
        yield _metadata(path, metadata(place), mount)
        wrote, was_read = write_and_read(place)
    except OSError as error:
        yield cannot(path, "write", error)
        return
    yield rate(path, "write", wrote, mount, note="" if place == Path(path) else f" (it will be made in {place})")
    if was_read is not None:
        yield rate(path, "read", was_read, mount)
    remove_left(place)  # last, when all has been said


def data(path: str, mount: Mount | None) -> Finding:
    """Return whether a directory or file of data can be read, and how fast. Nothing is written there."""
    place = Path(path)
    try:
        file = _first_file(place) if place.is_dir() else place
        if file is None:
            return rate(path, "read", Throughput(0, 0.0), mount, note=" (it holds no file to read)")
        return rate(path, "read", read(file), mount)
    except OSError as error:
        return cannot(path, "read", error)


def _first_file(directory: Path) -> Path | None:
    """Return a file below a directory that has something in it; looks at a bounded number of entries."""
    places, seen = [directory], 0
    for place in places:
        with os.scandir(place) as entries:
            for entry in entries:
                seen += 1
                if entry.is_file() and entry.stat().st_size:
                    return Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    places.append(Path(entry.path))
                if seen >= _MAX_ENTRIES:
                    return None
    return None


def _file_system(path: str, mount: Mount | None, *, elsewhere: bool) -> Finding:
    if mount is None:
        return STORAGE.found("file_system", Status.UNAVAILABLE, "not known", subject=path)
    status, problem, cure = Status.OK, "", ""
    if mount.is_read_only:
        status, problem, cure = Status.FAILED, ", read-only", _CURES[errno.EROFS]
    elif elsewhere and not mount.is_shared:
        status, problem = Status.DEGRADED, ": each node has its own, so a job can resume only on the same nodes"
        cure = "name a directory on a file system that all nodes share with --run-dir"
    elif mount.kind in IN_MEMORY:
        status, problem = Status.DEGRADED, ": in memory, so checkpoints are lost when the machine restarts"
        cure = "name a directory on a disk with --run-dir"
    return STORAGE.found("file_system", status, f"{mount}{problem}", mount.kind, subject=path, cure=cure)


def _room(path: str, place: Path) -> Iterator[Finding]:
    info = os.statvfs(place)
    free = info.f_bavail * info.f_frsize
    needs = _newest_checkpoint(Path(path))
    limit = max(LOW_BYTES, CHECKPOINTS * needs)
    per_checkpoint = f", a checkpoint takes {size(needs)}" if needs else ""
    evidence = f"{size(free)} of {size(info.f_blocks * info.f_frsize)} free{per_checkpoint}"
    cure = f"remove what is not needed (`du -xsh {place}/* | sort -h | tail`), or {_OTHER_DIRECTORY}"
    yield STORAGE.found("free_space", low(free, degraded=limit), evidence, free, subject=path, limit=limit, cure=cure)
    if count := info.f_files:
        status = low(info.f_favail, degraded=STORAGE.limit("free_inodes"), failed=MIN_INODES)
        evidence = f"{info.f_favail} more files can be made, of {count}"
        cure = f"remove small files (`du -x --inodes -d 1 {place} | sort -n | tail`), or {_OTHER_DIRECTORY}"
        yield STORAGE.found("free_inodes", status, evidence, info.f_favail, subject=path, cure=cure)


def _newest_checkpoint(run_dir: Path) -> int:
    """Return how many bytes the newest checkpoint takes, 0 where there is none."""
    steps = sorted((run_dir / "checkpoints").glob("step-*"))
    try:
        return sum(file.stat().st_size for file in steps[-1].rglob("*") if file.is_file()) if steps else 0
    except OSError:
        return 0  # it is being replaced at this moment


def _metadata(path: str, done: Throughput, mount: Mount | None) -> Finding:
    each = done.took_s / done.count
    evidence = f"{1000 * each:.2g} ms for each of {done.count} operations (create, rename, stat, list, remove)"
    status = high(each, degraded=STORAGE.limit("metadata"))
    return STORAGE.found("metadata", status, evidence, round(each, 6), subject=path, cure=_slow_cure(mount))


def rate(path: str, what: str, done: Throughput, mount: Mount | None, note: str = "") -> Finding:
    """Return what is said of a write or a read that took so long."""
    # A file of a few bytes says nothing of a rate, only that it can be read.
    is_slow = done.took_s > BYTES / STORAGE.limit(what)
    did = "written and synced" if what == "write" else "read"
    return STORAGE.found(
        what,
        Status.DEGRADED if is_slow else Status.OK,
        f"{size(done.count)} {did} in {1000 * done.took_s:.2g} ms{note}",
        round(done.count / max(done.took_s, 1e-9)) if done.count else None,
        subject=path,
        cure=_slow_cure(mount),
        data={"took_s": done.took_s, "bytes": done.count},
    )


def _slow_cure(mount: Mount | None) -> str:
    where = f" ({mount.source})" if mount is not None and mount.is_shared else ""
    return f"see who else uses the storage{where}, and its own health; use a faster directory for checkpoints and data"


_CURES = {
    errno.ENOSPC: f"make room (`df -h`, `df -i`), or {_OTHER_DIRECTORY}",
    errno.EDQUOT: f"your quota is used up: remove files (`quota -s`, `lfs quota`), or {_OTHER_DIRECTORY}",
    errno.EROFS: f"mount it for writing (`dmesg -T` says why it is not), or {_OTHER_DIRECTORY}",
    errno.EACCES: "give yourself the right (`ls -ld`, `chmod`, `chown`), or name another path",
    errno.EPERM: "give yourself the right (`ls -ld`, `lsattr -d`), or name another path",
    errno.ENOENT: "correct the path; on a node where it should be: mount it",
    errno.ENOTDIR: f"move the file away, or {_OTHER_DIRECTORY}",
    errno.ESTALE: "unmount and mount it again: the server has replaced it",
    errno.EIO: "the storage itself fails: see `dmesg -T`, and leave this node or disk out",
}


def cannot(path: str, what: str, error: OSError) -> Finding:
    """Return what is said of a write or a read that failed."""
    did, code = "written" if what == "write" else "read", error.errno or 0
    cure = _CURES.get(code, "see `dmesg -T` and the storage's own health, or name another path")
    evidence, told = f"cannot be {did}: {error.strerror or error}", {"errno": errno.errorcode.get(code)}
    return STORAGE.found(what, Status.FAILED, evidence, subject=path, cure=cure, data=told)
