"""Plain files: how the product opens a file, so that nothing in its place can block whoever does.

A FIFO, socket or device under the name of a file makes `open` or `read` wait for somebody who never comes. So a name is
looked at before it is opened and the open file after it, nothing is waited for in between, and only a regular file is
handed out. `tests/test_architecture.py` holds that the product opens files here, or says there why not.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from resilience_sdk.core.console import say_once

_Name = str | os.PathLike[str]

_KINDS = (
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Nothing is waited for, and a terminal does not become that of the process.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class NotAPlainFileError(OSError):
    """Under the name of a file stands something else; `strerror` says what, as in `it is a FIFO, not a file`."""


def kind_of(mode: int) -> str | None:
    """Return what something is by its mode, as `a FIFO`; None for a regular file."""
    return next((words for is_kind, words in _KINDS if is_kind(mode)), None)


def refuse_other_kinds(path: _Name, *, follow: bool = True) -> None:
    """Raise `NotAPlainFileError` where something other than a regular file has the name; nothing there is fine."""
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except OSError:
        return  # opening it says why
    if (kind := kind_of(mode)) is not None:
        raise NotAPlainFileError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))


def open_plain(path: _Name, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a regular file and return its descriptor, which is not inherited; `flags` as for `os.open`.

    Never waits for another process. Raises OSError, of which `NotAPlainFileError` says what has the name.
    """
    is_new = flags & os.O_CREAT and flags & os.O_EXCL
    if not is_new:
        refuse_other_kinds(path, follow=not flags & _NO_LINK)
    fd = os.open(path, flags | _AT_ONCE, mode)
    try:
        kind = kind_of(os.fstat(fd).st_mode)  # what was put there meanwhile
        if kind is not None:
            raise NotAPlainFileError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def plain(path: str, flags: int) -> int:
    """Open a regular file: the `opener` of Python's `open`."""
    return open_plain(path, flags)


def private(path: str, flags: int) -> int:
    """Open a regular file that is no link, for this user alone where it is made: the `opener` of Python's `open`."""
    return open_plain(path, flags | _NO_LINK)


def open_to_read(path: _Name) -> BinaryIO:
    """Open a regular file for reading; raises OSError, also for what is none."""
    return open(path, "rb", opener=plain)


def read_bytes(path: _Name) -> bytes:
    """Return the content of a regular file; raises OSError.

    That something else has the name is reported once: many pass over what cannot be read, and this does not pass.
    """
    try:
        with open(path, "rb", opener=plain) as file:
            return file.read()
    except NotAPlainFileError as error:
        report_other_kind(error)
        raise


def report_other_kind(error: NotAPlainFileError) -> None:
    """Report once that something other than a file has a name that was to be read."""
    say_once(f"not plain:{error.filename}", f"{error.filename} is not read: {error.strerror}; remove it")


def read_text(path: _Name, *, errors: str = "strict") -> str:
    """Return the text of a regular file; raises OSError, or ValueError for what is no UTF-8. As `read_bytes`."""
    return read_bytes(path).decode("utf-8", errors)
