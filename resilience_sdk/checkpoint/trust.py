"""Whose files may be loaded: ours or root's, and only where nobody else can write.

A checkpoint is turned into the state of a program that has our rights. So its files, and the directory that
they lie in, must be such that only we or root can have put them there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from resilience_sdk.checkpoint.manifest import InvalidCheckpointError

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


def check_directory(path: Path) -> None:
    """Raise `InvalidCheckpointError` unless `path` is a directory that nobody else can write."""
    status = _status(path)
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidCheckpointError(f"{path} is no directory")
    _check(status, path)


def open_trusted(path: Path) -> BinaryIO:
    """Open a regular file for reading that only we or root can have written.

    The rule is checked on the open file, so nobody can swap it in between. Raises `InvalidCheckpointError`
    with the reason and the cure.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise InvalidCheckpointError(f"{path.name} is no regular file")
        _check(status, path)
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
