"""The question whether a directory takes writes: a small file is written there, synced and removed."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs

PROBE_TIMEOUT_S = 5.0  # a mount that hangs blocks whoever touches it
_PROBE_BYTES = 1 << 20  # less than any checkpoint, more than what a full disk still takes


@attrs.frozen
class ProbeAnswer:
    """What the storage has answered. `why` and `number` (an error number) are None where it takes writes."""

    why: str | None = None
    number: int | None = None


class WriteProbe:
    """One try in a thread of its own, so that a storage that does not answer holds nobody up."""

    def __init__(self, directory: Path) -> None:
        """Begin. Raises `RuntimeError` where no thread is to be had."""
        self._directory = directory
        self._answer: ProbeAnswer | None = None
        self._done = threading.Event()
        threading.Thread(target=self._run, name="resilience-probe", daemon=True).start()

    def _run(self) -> None:
        try:
            write_scratch(self._directory)
            self._answer = ProbeAnswer()
        except OSError as error:
            self._answer = ProbeAnswer(error.strerror or str(error), error.errno)
        finally:
            self._done.set()

    def wait(self, timeout_s: float) -> ProbeAnswer | None:
        """Return the answer, None where there is none yet."""
        self._done.wait(timeout_s)
        return self._answer


def try_writing(directory: Path) -> ProbeAnswer:
    """Return whether `directory` takes writes; one that does not answer has timed out."""
    try:
        answer = WriteProbe(directory).wait(PROBE_TIMEOUT_S)
    except RuntimeError:  # no thread: nothing is known of the storage
        return ProbeAnswer()
    return ProbeAnswer("it does not answer", errno.ETIMEDOUT) if answer is None else answer


def write_scratch(directory: Path) -> None:
    """Write a file, sync it and remove it; raises `OSError`."""
    with _scratch_file(directory) as fd:
        data = memoryview(os.urandom(_PROBE_BYTES))  # not zeros: file systems compress
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    """Open a file that is removed in any case."""
    fd, name = tempfile.mkstemp(prefix=".resilience-probe-", dir=directory)
    try:
        yield fd
    finally:
        os.close(fd)
        os.unlink(name)
