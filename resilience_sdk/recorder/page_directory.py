"""The private directory in memory that holds the pages of a job.

Found by all its processes alike, and made again when it is removed.

Whoever notices first makes it again: the monitor, which still has the pages mapped and goes on with them; the launcher;
the helper thread of a rank, which then brings its page along.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from resilience_sdk.core import environ, job_config
from resilience_sdk.core.console import say_once
from resilience_sdk.core.job_config import JobConfig

_NETWORK_FILE_SYSTEM = re.compile(r"nfs4?|cifs|smb3|smbfs|lustre|gpfs|ceph|beegfs|afs|9p|fuse\.sshfs|pvfs2|wekafs")
_MIN_FREE_BYTES = 1 << 20  # pages and stack dumps of a node's ranks take tens of KiB each
_NAMES = 10  # that are tried in one place, where another user has taken the first ones
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
        for own in _own_directories(base):
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
    if _NETWORK_FILE_SYSTEM.fullmatch(kind := _file_system_of(base)):
        raise OSError(95, f"is on a network file system ({kind})")
    name = hashlib.sha256(job_key.encode()).hexdigest()[:16]
    # Who comes later uses what the first one of the job has found good enough, and under the name that it found free.
    for own in _own_directories(base):
        if _is_private(own) and _is_private(own / name):
            return own / name
    room = os.statvfs(base)
    if (free := room.f_bavail * room.f_frsize) < _MIN_FREE_BYTES:
        raise OSError(28, f"has {free // 1024} KiB free, {_MIN_FREE_BYTES // 1024} are needed")
    refused: OSError | None = None
    for own in _own_directories(base):
        try:
            make_private(own / name)
        except PermissionError as error:
            refused = refused or error
            continue
        except FileNotFoundError:
            make_private(own / name)  # the last job of this user has just removed it
        if refused is not None:
            say_once("pages taken", f"the rank pages are in {own}: {refused.strerror}")
        return own / name
    raise refused or PermissionError(1, "has no name for a directory of ours")


def make_private(job: Path) -> None:
    """Make the page directory of a job, and the user's own around it, as far as they are not there.

    Any number of processes may do so at once. Raises PermissionError where one of them is not private to this user.
    """
    for directory in (job.parent, job):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        check_private(directory)


def _own_directories(base: Path) -> Iterator[Path]:
    """Yield the names of this user's directory in `base`, in the order in which all processes try them.

    Anybody may take a name in a place for all. The number tells nothing: a directory counts if it is private.
    """
    for number in range(_NAMES):
        yield base / (f"resilience-{os.getuid()}.{number}" if number else f"resilience-{os.getuid()}")


def _is_private(directory: Path) -> bool:
    try:
        check_private(directory)
    except OSError:
        return False
    return True


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


LOST = "page directory"


def is_there(pages: Path) -> bool:
    """Tell whether what the job agreed on stands in its page directory. One system call."""
    return os.path.exists(f"{pages}/{job_config.FILE}")


def make_again(pages: Path, config: JobConfig) -> bool:
    """Make the page directory and what the job agreed on again, unless they are there; tell whether this did it.

    Any number of processes may call it at once: one of them makes it. Raises OSError where it cannot be made, or where
    somebody else has taken its name.
    """
    if is_there(pages):
        return False
    make_private(pages)
    with job_config.locked(pages):
        if is_there(pages):
            return False
        job_config.write(pages, config)
        # Its time is that of the job's beginning: what was asked of the job since then still counts.
        began = time.time() - (time.monotonic_ns() - config.began_ns) / 1e9
        os.utime(pages / job_config.FILE, (began, began))
    return True


def words_of_loss(pages: Path) -> str:
    """Return what to tell, once, where the directory was made again."""
    return (
        f"the page directory {pages} was removed while the job runs (by a cleaner of temporary files, or RemoveIPC at "
        f"a logout) and is made again; meanwhile a hang may be told late. Keep cleaners away from it, or name another "
        f"place with {environ.PAGE_DIR}"
    )


def words_of_failure(pages: Path, error: OSError) -> str:
    """Return what to tell, once, where it cannot be made again."""
    return (
        f"the page directory {pages} was removed while the job runs and cannot be made again "
        f"({error.strerror or error}): settings and checkpoints hold, hangs may go untold. Name another place with "
        f"{environ.PAGE_DIR} for the next run"
    )
