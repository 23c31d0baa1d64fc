"""Where the pages of a job live: a private directory in memory, found by all its processes alike."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from resilience_sdk import environ

_NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "ceph",
        "beegfs",
        "afs",
        "9p",
        "fuse.sshfs",
        "pvfs2",
        "wekafs",
    }
)
_LEAST_FREE_BYTES = 1 << 20  # pages and stack dumps of a node's ranks take tens of KiB each
_STEM = re.compile(r"a(\d+)-r(\d+)-(\d+)$")


def job_page_directory(job_key: str, env: Mapping[str, str]) -> Path:
    """Return (and create) the private page directory of a job.

    A file system that is all but full is passed over: the `/dev/shm` of a container is small, and other
    libraries fill it. Raises OSError naming every place that was tried when none can be used.
    """
    refused: list[str] = []
    for base in _bases(env):
        try:
            return _job_directory(base, job_key)
        except OSError as error:
            refused.append(f"{base}: {error.strerror or error}")
    raise OSError(
        "no directory can hold the rank pages ("
        + "; ".join(refused)
        + f"); set {environ.PAGE_DIR} to a local, writable one with room"
    )


def page_directories(env: Mapping[str, str]) -> Iterator[Path]:
    """Yield the page directories of all jobs of this user on this host; for who only looks: makes nothing."""
    for base in _bases(env):
        own = base / f"resilience-{os.getuid()}"
        with contextlib.suppress(OSError):
            check_private(own)
            for job in sorted(own.iterdir()):
                with contextlib.suppress(OSError):
                    check_private(job)
                    yield job


def page_stem(attempt: int, rank: int, pid: int) -> str:
    """Return the common name, without suffix, of all files of one rank process."""
    return f"a{attempt}-r{rank}-{pid}"


def parse_stem(stem: str) -> tuple[int, int, int] | None:
    """Return `(attempt, rank, pid)` of a stem, or None for a foreign name."""
    match = _STEM.fullmatch(stem)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _bases(env: Mapping[str, str]) -> Iterator[Path]:
    if explicit := env.get(environ.PAGE_DIR):
        yield Path(explicit)
        return
    yield Path("/dev/shm")  # noqa: S108 - a 0700 directory of ours is made and checked inside
    if runtime := env.get("XDG_RUNTIME_DIR"):
        yield Path(runtime)
    yield Path(tempfile.gettempdir())


def _job_directory(base: Path, job_key: str) -> Path:
    if not base.is_dir():
        raise NotADirectoryError(20, "is not a directory")
    if (kind := _file_system_of(base)) in _NETWORK_FILE_SYSTEMS:
        raise OSError(95, f"is on a network file system ({kind})")
    own = base / f"resilience-{os.getuid()}"
    job = own / hashlib.sha256(job_key.encode()).hexdigest()[:16]
    # Who comes later uses what the first one of the job has found good enough.
    if not job.is_dir() and (free := _free_bytes(base)) < _LEAST_FREE_BYTES:
        raise OSError(28, f"has {free // 1024} KiB free, {_LEAST_FREE_BYTES // 1024} are needed")
    for directory in (own, job):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        check_private(directory)
    return job


def check_private(directory: Path) -> None:
    """Raise PermissionError unless `directory` is a real directory that only this user can use."""
    info = directory.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise PermissionError(1, f"{directory} is not a directory")
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(
            1,
            f"{directory} belongs to uid {info.st_uid} with mode {info.st_mode & 0o777:o}, wanted is our own with 700",
        )


def _free_bytes(directory: Path) -> int:
    """Return how much this user may still write there."""
    info = os.statvfs(directory)
    return info.f_bavail * info.f_frsize


def _file_system_of(path: Path) -> str:
    """Return the type of the file system that holds `path`, or an empty string where it cannot be known."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    real = path.resolve()
    best, kind = "", ""
    for line in mounts:
        fields = line.split(" ")
        if len(fields) > 2:
            point = fields[1].replace("\\040", " ")
            if len(point) >= len(best) and real.is_relative_to(point):
                best, kind = point, fields[2]
    return kind
