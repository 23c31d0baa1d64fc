"""The commit: files are checked, synced and renamed such that a checkpoint is there as a whole or not at all.

A checkpoint is turned into the state of a program that has our rights. So its files, and the directory that
they lie in, must be such that only we or root can have put them there.

Everything is written into a directory `.tmp-...` beside the finished ones, each file synced; then the
manifest, then the directory itself; then one rename gives it its name, and the parent directory is synced. A
writer that is killed anywhere in between leaves a name that no resume looks at and that `clean_leftovers`
removes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import BinaryIO

from resilience_sdk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    encode_manifest,
    step_name,
    step_of,
)
from resilience_sdk.checkpoint.whole_directory import put_back, remove_tree, replace, sync_directory
from resilience_sdk.core.linked_directories import link_fault
from resilience_sdk.core.plain_file import open_plain

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def find_trust_fault(status: os.stat_result, path: Path, user: int) -> str | None:
    """Return why a file or directory of this status must not be loaded by `user`, with the cure, or None."""
    if status.st_uid not in (user, 0):
        return (
            f"{path} belongs to user {status.st_uid}, and only files of user {user} or root are loaded: "
            f"if you trust it, copy it (cp -r) so that you own it"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        return f"{path} can be written by others (mode {mode:04o}): if you trust it, run chmod -R go-w on it"
    return None


def check_directory(path: Path, *, may_be_link: bool = False) -> None:
    """Raise `InvalidCheckpointError` unless `path` is a directory that nobody else can write.

    `may_be_link`: or a link of ours or root's to one, such as to other storage.
    """
    status = _status(path)
    if may_be_link and stat.S_ISLNK(status.st_mode):
        if (fault := link_fault(path)) is not None:
            raise InvalidCheckpointError(fault, untrusted=path.exists())
        status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidCheckpointError(f"{path} is no directory")
    _check(status, path)


def open_trusted(path: Path) -> BinaryIO:
    """Open a regular file for reading that only we or root can have written.

    The rule is checked on the open file, so nobody can swap it in between. Raises `InvalidCheckpointError`
    with the reason and the cure.
    """
    try:
        file = os.fdopen(open_plain(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        _check(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat(follow_symlinks=False)
    except OSError as error:
        raise _unreadable(path, error) from error


def _check(status: os.stat_result, path: Path) -> None:
    fault = find_trust_fault(status, path, os.geteuid())
    if fault is not None:
        raise InvalidCheckpointError(fault, untrusted=True)


def _unreadable(path: Path, error: OSError) -> InvalidCheckpointError:
    reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
    return InvalidCheckpointError(f"{path.name} {reason}")


# Three prefixes, so that whoever finds a leftover knows what it may still be good for.
_UNFINISHED = ".tmp-"  # being written: worthless when its writer is gone
_REPLACED = ".old-"  # was valid under its name until another took that name
_DOOMED = ".del-"  # being deleted


class CheckedWriter:
    """A write-only binary file that sums what passes, so that no byte is read back for its checksum.

    It has what `torch.save` needs (`write`, `flush`). The first `OSError` is kept in `error`, because torch's
    own writer turns it into one that no longer says what was wrong.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb")
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data` and return its length in bytes; raises `OSError`."""
        try:
            self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        self.crc32 = zlib.crc32(data, self.crc32)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        """Hand buffered bytes to the system; raises `OSError`."""
        self._file.flush()

    def finish(self) -> None:
        """Bring everything to stable storage and close; raises `OSError`."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close without caring for what was buffered; never raises."""
        with contextlib.suppress(OSError):
            self._file.close()


def write_file(directory: Path, name: str, fill: Callable[[CheckedWriter], None], *, mode: int = 0o600) -> FileEntry:
    """Create `directory/name`, let `fill` write it, sync it, and return its entry for the manifest.

    Raises the `OSError` that stopped the writing, or what `fill` raised.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    writer = CheckedWriter(os.open(directory / name, flags, mode))
    try:
        fill(writer)
        writer.finish()
    except Exception as error:
        if writer.error is not None and error is not writer.error:
            raise writer.error from error
        raise
    finally:
        writer.abandon()
    return FileEntry(name=name, size=writer.size, crc32=writer.crc32)


def begin(checkpoints: Path, step: int, token: str, *, mode: int = 0o700) -> Path:
    """Make and return the unfinished directory of one save; `token` tells it from any earlier try."""
    path = checkpoints / f"{_UNFINISHED}{step_name(step)}-{token}"
    path.mkdir(mode=mode)
    return path


def commit(unfinished: Path, manifest: Manifest, token: str, *, mode: int = 0o600) -> Path:
    """Seal an unfinished directory with its manifest and give it its name; return the new path.

    One that has the name already steps aside first and is deleted afterwards; should the writer be killed
    between the two renames, `clean_leftovers` puts it back. Raises `OSError`; nothing is then visible.
    """
    checkpoints = unfinished.parent
    target = checkpoints / step_name(manifest.step)
    data = encode_manifest(manifest)
    write_file(unfinished, MANIFEST_NAME, lambda writer: _write_once(writer, data), mode=mode)
    for name in manifest.directories:
        sync_directory(unfinished / name)
    sync_directory(unfinished)
    replace(unfinished, target, checkpoints / f"{_REPLACED}{target.name}-{token}")
    return target


def _write_once(writer: CheckedWriter, data: bytes) -> None:
    writer.write(data)


def delete(path: Path, token: str) -> bool:
    """Delete a finished checkpoint and tell whether it is gone from view; never raises.

    It loses its name first: one that is half deleted must not look like one that is damaged.
    """
    doomed = path.parent / f"{_DOOMED}{path.name}-{token}"
    try:
        path.rename(doomed)
    except OSError:
        return False
    remove_tree(doomed)
    return True


def discard(unfinished: Path) -> None:
    """Remove what a failed save has written, if it is there; never raises.

    It loses its name first: another rank may still put a file there, and then a directory could not be removed.
    """
    doomed = unfinished.parent / f"{_DOOMED}{unfinished.name[len(_UNFINISHED) :]}"
    with contextlib.suppress(OSError):
        unfinished.rename(doomed)
        remove_tree(doomed)
    remove_tree(unfinished)  # where it could not be renamed


def clean_leftovers(checkpoints: Path, in_flight: Collection[str] = ()) -> tuple[str, ...]:
    """Remove what killed writers left, put back what a killed replacement had set aside; return the names.

    Only while no other process saves into this directory (rank 0, before its first save of an attempt); `in_flight`
    are the tokens of the saves of this one. What cannot be removed stays: it is never taken for a checkpoint. Raises
    `OSError` if the directory cannot be listed.
    """
    cleaned = []
    for path in sorted(checkpoints.iterdir()):
        if path.name.rpartition("-")[2] in in_flight:
            continue
        name = path.name[len(_REPLACED) :].rpartition("-")[0] if path.name.startswith(_REPLACED) else ""
        if step_of(name) is not None:
            with contextlib.suppress(OSError):
                put_back(checkpoints / name, path, os.path.lexists)
        if path.name.startswith((_UNFINISHED, _REPLACED, _DOOMED)):
            remove_tree(path)
            cleaned.append(path.name)
    return tuple(cleaned)
