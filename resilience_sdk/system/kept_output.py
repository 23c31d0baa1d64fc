"""Standard output and error of a rank that outlive their reader.

Ranks write into what their launcher was given: a pipe to `head` or `tee`, a terminal, a file. When the reader of a pipe
goes away, a terminal is closed or a disk is full, the next `print` would raise, and end a training for its words. Here
such words go into a file of the run directory.

Nothing stands between a rank and its output: the object that writes tries the other place where the first one fails,
and whoever watches the descriptor puts the file in its place as soon as nobody can read it any more, which what is
written in C, or by a program that the rank starts, then finds.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from resilience_sdk.system import same_device

_UNREAD = frozenset({errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ESTALE, errno.ENOTRECOVERABLE})
_STREAMS = (("stdout", 1), ("stderr", 2))


class KeptOutput:
    """The two descriptors of a process, and the file that takes what they cannot."""

    def __init__(
        self, path: Path, screens: Mapping[int, int] | None = None, on_switch: Callable[[str], None] = lambda _: None
    ) -> None:
        """Use `path`, which is made when it is needed; `on_switch` hears once why, as a sentence.

        `screens`: where a descriptor went before it was led into a file. What that file has no room for goes there.
        """
        self.path = path
        self._screens = {fd: (screen, _identity(screen)) for fd, screen in (screens or {}).items()}
        self.on_switch = on_switch
        self._is_told = False
        self._inherited = {fd: _identity(fd) for _, fd in _STREAMS}

    def watched(self) -> list[int]:
        """Return the descriptors whose reader may go away for good: pipes without a name, sockets, terminals.

        As they were inherited: what the program has put in their place is its own.
        """
        return [fd for _, fd in _STREAMS if self._is_inherited(fd) and _may_be_left(fd)]

    def look(self) -> None:
        """Put the file in the place of those descriptors that nobody can read any more. Raises OSError."""
        left = [fd for fd in self.watched() if is_left(fd)]
        for fd in left:
            self._switch(fd)
        if left:  # once all are mended, since it is said on one of them
            self._tell(left[0], errno.EPIPE)

    def take(self, fd: int, error: OSError, data: Any) -> int | None:
        """Write what a descriptor has refused with `error`; None where that is none of ours to mend."""
        if error.errno not in _UNREAD | _NO_ROOM or not self._is_inherited(fd):
            return None
        if error.errno in _UNREAD and _may_be_left(fd):
            self._switch(fd)
            self._tell(fd, error.errno)
            return os.write(fd, data)
        # A file may have room again, and a named pipe a reader: the next words are tried there first.
        screen = self._screen_of(fd)
        self._tell(fd, error.errno or 0, str(self.path) if screen is None else "the screen")
        if screen is not None:
            with contextlib.suppress(OSError):
                return os.write(screen, data)
        with contextlib.suppress(OSError):
            target = self._open()
            try:
                return os.write(target, data)
            finally:
                os.close(target)
        return memoryview(data).nbytes  # no place is left for it; a training is worth more than its words

    def _is_inherited(self, fd: int) -> bool:
        return self._inherited.get(fd) is not None and self._inherited[fd] == _identity(fd)

    def _switch(self, fd: int) -> None:
        try:
            target = self._open()
        except OSError:
            target = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(target, fd, inheritable=True)
        os.close(target)

    def _open(self) -> int:
        same_device.check(self.path)
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        target = os.open(self.path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(target).st_mode):
            os.close(target)
            raise OSError(errno.EINVAL, "is not a file", str(self.path))
        os.set_blocking(target, True)
        return target

    def _screen_of(self, fd: int) -> int | None:
        screen, known = self._screens.get(fd, (None, None))
        return screen if screen is not None and known is not None and _identity(screen) == known else None

    def _tell(self, fd: int, code: int, where: str = "") -> None:
        if self._is_told:
            return
        self._is_told = True
        name = "standard output" if fd == 1 else "standard error"
        why = "has no reader any more" if code in _UNREAD else f"takes no more ({os.strerror(code)})"
        with contextlib.suppress(Exception):
            self.on_switch(f"{name} {why}: what this rank prints goes on to {where or self.path}")


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_left(fd: int) -> bool:
    """Tell whether nobody can read any more what is written to a descriptor."""
    poll = select.poll()
    poll.register(fd, 0)
    try:
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
    except OSError:
        return False


def _may_be_left(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISFIFO(mode):
            return not sys.platform.startswith("linux") or os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
        return stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and os.ttyname(fd) != "")
    except OSError as error:
        return error.errno == errno.EIO  # a terminal that was closed has no name any more


class _KeptFile(io.FileIO):
    """The raw end of a stream, which writes elsewhere what its descriptor refuses."""

    def __init__(self, fd: int, kept: KeptOutput) -> None:
        super().__init__(fd, "wb", closefd=False)
        self._kept = kept

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            written = self._kept.take(self.fileno(), error, data)
            if written is None:
                raise
            return written


def keep_streams(kept: KeptOutput) -> None:
    """Have `sys.stdout` and `sys.stderr` write by way of `kept`, where they are what the interpreter has made."""
    for name, fd in _STREAMS:
        old = getattr(sys, name)
        with contextlib.suppress(Exception):  # a stream of another kind stays as it is
            if type(old) is not io.TextIOWrapper or old is not getattr(sys, f"__{name}__") or old.fileno() != fd:
                continue
            with contextlib.suppress(OSError):
                old.flush()
            raw = _KeptFile(fd, kept)
            raw.name = f"<{name}>"
            is_raw = isinstance(old.buffer, io.FileIO)
            new = io.TextIOWrapper(
                raw if is_raw else io.BufferedWriter(raw),
                encoding=old.encoding,
                errors=old.errors,
                newline="\n",
                line_buffering=old.line_buffering,
                write_through=old.write_through,
            )
            new.mode = "w"  # type: ignore[misc]
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
