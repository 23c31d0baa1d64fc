"""The probe of one directory or file; each path has a process of its own, because a mount may hang for ever."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from resilience_sdk.health import grading
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.grading import GIB, judged, size
from resilience_sdk.health.job import has_nodes_elsewhere
from resilience_sdk.health.probes import Context
from resilience_sdk.health.storage import timing
from resilience_sdk.health.storage.mounts import IN_MEMORY, Mount, mount_of

PROBE = "storage"
LOW_BYTES = GIB
CHECKPOINTS = 2  # there must be room for so many more: the newest good one is removed after the next is complete
LOW_INODES, LEAST_INODES = 1000, 32  # a sharded checkpoint makes a file for each rank
SLOW_OPERATION_S = 0.050  # local disks take 0.05 ms, a healthy parallel file system 1 ms
SLOW_RATE = 20e6  # bytes a second
_MOST_ENTRIES = 1000
_OTHER_DIRECTORY = "name another directory with --run-dir"


def probe(context: Context) -> Iterator[Finding]:
    """Yield what is to be said of `context.only`: the run directory, or something that the job reads."""
    path = os.path.abspath(context.only)
    mount = mount_of(os.path.realpath(path), context.root)
    if context.run_dir is not None and path == os.path.abspath(context.run_dir):
        yield from run_directory(path, mount, elsewhere=has_nodes_elsewhere(context))
    else:
        yield from data(path, mount)


def run_directory(path: str, mount: Mount | None, *, elsewhere: bool) -> Iterator[Finding]:
    """Yield whether the run directory, or the directory that it will be made in, can be written, and how fast."""
    yield _file_system(path, mount, elsewhere=elsewhere)
    try:
        place = _existing(Path(path))
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a directory")
        yield from _room(path, place)
        yield _metadata(path, timing.metadata(place), mount)
        wrote, was_read = timing.write_and_read(place)
    except OSError as error:
        yield _cannot(path, "write", error)
        return
    yield _rate(path, "write", wrote, mount, note="" if place == Path(path) else f" (it will be made in {place})")
    if was_read is not None:
        yield _rate(path, "read", was_read, mount)
    timing.remove_left(place)  # last, when all has been said


def data(path: str, mount: Mount | None) -> Iterator[Finding]:
    """Yield whether a directory or file of data can be read, and how fast. Nothing is written there."""
    place = Path(path)
    try:
        file = _first_file(place) if place.is_dir() else place
        if file is None:
            yield _rate(path, "read", timing.Rate(0, 0.0), mount, note=" (it holds no file to read)")
            return
        yield _rate(path, "read", timing.read(file), mount)
    except OSError as error:
        yield _cannot(path, "read", error)


def _existing(path: Path) -> Path:
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))


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
                if seen >= _MOST_ENTRIES:
                    return None
    return None


def _file_system(path: str, mount: Mount | None, *, elsewhere: bool) -> Finding:
    if mount is None:
        return Finding(probe=PROBE, check="file_system", subject=path, status=Status.UNAVAILABLE, evidence="not known")
    status, problem, cure = Status.OK, "", ""
    if mount.is_read_only:
        status, problem = Status.FAILED, ", read-only"
        cure = f"mount it for writing (`dmesg -T` says why it is not), or {_OTHER_DIRECTORY}"
    elif elsewhere and not mount.is_shared:
        status, problem = Status.DEGRADED, ": each node has its own, so a job can resume only on the same nodes"
        cure = "name a directory on a file system that all nodes share with --run-dir"
    elif mount.kind in IN_MEMORY:
        status, problem = Status.DEGRADED, ": in memory, so checkpoints are lost when the machine restarts"
        cure = "name a directory on a disk with --run-dir"
    return Finding(
        probe=PROBE,
        check="file_system",
        subject=path,
        status=status,
        value=mount.kind,
        evidence=f"{mount}{problem}",
        cure=cure,
        must=True,
    )


def _room(path: str, place: Path) -> Iterator[Finding]:
    info = os.statvfs(place)
    free = info.f_bavail * info.f_frsize
    needs = _newest_checkpoint(Path(path))
    threshold = max(LOW_BYTES, CHECKPOINTS * needs)
    status = grading.low(free, degraded=threshold)
    per_checkpoint = f", a checkpoint takes {size(needs)}" if needs else ""
    yield judged(
        probe=PROBE,
        check="free_space",
        subject=path,
        status=status,
        value=free,
        unit="bytes",
        threshold=threshold,
        evidence=f"{size(free)} of {size(info.f_blocks * info.f_frsize)} free{per_checkpoint}",
        cure=f"remove what is not needed (`du -xsh {place}/* | sort -h | tail`), or {_OTHER_DIRECTORY}",
    )
    if info.f_files:
        status = grading.low(info.f_favail, degraded=LOW_INODES, failed=LEAST_INODES)
        yield judged(
            probe=PROBE,
            check="free_inodes",
            subject=path,
            status=status,
            value=info.f_favail,
            unit="files",
            threshold=LOW_INODES,
            evidence=f"{info.f_favail} more files can be made, of {info.f_files}",
            cure=f"remove small files (`du -x --inodes -d 1 {place} | sort -n | tail`), or {_OTHER_DIRECTORY}",
            must=True,
        )


def _newest_checkpoint(run_dir: Path) -> int:
    """Return how many bytes the newest checkpoint takes, 0 where there is none."""
    steps = sorted((run_dir / "checkpoints").glob("step-*"))
    try:
        return sum(file.stat().st_size for file in steps[-1].rglob("*") if file.is_file()) if steps else 0
    except OSError:
        return 0  # it is being replaced at this moment


def _metadata(path: str, done: timing.Rate, mount: Mount | None) -> Finding:
    each = done.took_s / done.count
    return judged(
        probe=PROBE,
        check="metadata",
        subject=path,
        status=grading.high(each, degraded=SLOW_OPERATION_S),
        value=round(each, 6),
        unit="s per operation",
        threshold=SLOW_OPERATION_S,
        evidence=f"{1000 * each:.2g} ms for each of {done.count} operations (create, rename, stat, list, remove)",
        cure=_slow_cure(mount),
    )


def _rate(path: str, what: str, done: timing.Rate, mount: Mount | None, note: str = "") -> Finding:
    # A file of a few bytes says nothing of a rate, only that it can be read.
    is_slow = done.per_s < SLOW_RATE and done.took_s > timing.BYTES / SLOW_RATE
    synced = " and synced" if what == "write" else ""
    return judged(
        probe=PROBE,
        check=what,
        subject=path,
        status=Status.DEGRADED if is_slow else Status.OK,
        value=round(done.per_s) if done.count else None,
        unit="bytes per s" if done.count else "",
        threshold=SLOW_RATE,
        evidence=f"{size(done.count)} {'written' if what == 'write' else 'read'}{synced} "
        f"in {1000 * done.took_s:.2g} ms{note}",
        cure=_slow_cure(mount),
        must=True,
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


def _cannot(path: str, what: str, error: OSError) -> Finding:
    return Finding(
        probe=PROBE,
        check=what,
        subject=path,
        status=Status.FAILED,
        evidence=f"cannot be {'written' if what == 'write' else 'read'}: {error.strerror or error}",
        cure=_CURES.get(error.errno or 0, "see `dmesg -T` and the storage's own health, or name another path"),
        must=True,
        data={"errno": errno.errorcode.get(error.errno or 0)},
    )
