"""The program that tries whether a place on a disk answers.

It may be stuck in the kernel for ever, so nobody waits for it. It says what it has found line by line, as words that
`monitor.save_storage` reads: what is missing there did not answer.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

PREFIX = ".resilience-probe-"
_KINDS = (
    (stat.S_ISFIFO, "fifo"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
    (stat.S_ISDIR, "directory"),
)


def main(path: str) -> int:
    """Try the file, its directory and a small write beside it; always 0, as the lines say it all."""
    began = time.monotonic()
    try:
        mode = os.lstat(path).st_mode
        _say("file", next((name for is_kind, name in _KINDS if is_kind(mode)), "file"))
    except OSError as error:
        _say("file", "none" if isinstance(error, FileNotFoundError) else f"error {error.strerror}")
    directory = os.path.dirname(path) or "/"
    try:
        os.stat(directory)
        _say("stat", f"{time.monotonic() - began:.3f}")
        name = os.path.join(directory, f"{PREFIX}{os.getpid()}")
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, b"?")
            os.fsync(fd)
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name)
        _say("write", f"{time.monotonic() - began:.3f}")
    except OSError as error:
        _say("error", error.strerror or type(error).__name__)
    return 0


def _say(what: str, text: str) -> None:
    sys.stdout.write(f"{what} {text}\n")
    sys.stdout.flush()
