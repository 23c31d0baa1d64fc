"""The ends of logs: what the ranks and the kernel wrote while an attempt ran. Reads files; never raises for them.

What a rank prints is not captured unless the user asks for it: a pipe through the launcher could block a rank. It
is found where it went anyway: in the rank's own log file (`--redirects`, `--tee`), else in the file that the
launcher's own standard error is (`2> job.err`, or a scheduler's job log). Not on a terminal.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from resilience_sdk.attribution.exits import Classification
from resilience_sdk.attribution.log_tail import MOST_BYTES, KernelFindings, LogFindings, read_kernel, read_tail

_KERNEL_LOG = "/dev/kmsg"
_MOST_RECORDS = 5000
_RECORD_BYTES = 8192  # the kernel gives one record a read, and none is longer
_STANDARD_ERROR = "/proc/self/fd/2"
_BUDGET_S = 0.6  # for all logs of one attempt: the next one waits for it


@attrs.frozen
class Mark:
    """Where the logs stood when an attempt began."""

    kernel: int | None  # descriptor that stands at the newest record; None where the kernel's log may not be read
    own_size: int  # bytes in our standard error, where that is a file


def mark(kernel_log: str = _KERNEL_LOG) -> Mark:
    """Note where the logs stand. `close` the mark when the attempt is over."""
    kernel: int | None = None
    with contextlib.suppress(OSError):
        kernel = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(kernel, 0, os.SEEK_END)
    return Mark(kernel, _own_size() or 0)


def close(marked: Mark) -> None:
    """Give the descriptor back."""
    if marked.kernel is not None:
        with contextlib.suppress(OSError):
            os.close(marked.kernel)


def kernel_findings(marked: Mark, pids: Iterable[int], *, oom_seen: bool | None) -> KernelFindings:
    """Return what the kernel said since then of these processes and of the node."""
    if marked.kernel is None:
        return KernelFindings()
    return read_kernel(_kernel_messages(marked.kernel), pids, oom_seen=oom_seen)


def rank_findings(files: Mapping[int, Sequence[str]]) -> dict[int, Classification]:
    """Return what the logs of these ranks say of their ends, by rank, in the order given, while there is time."""
    deadline = time.monotonic() + _BUDGET_S
    found: dict[int, Classification] = {}
    for rank, names in files.items():
        for name in names:
            if time.monotonic() > deadline:
                return found
            told = read_tail(_tail(name), f"log of rank {rank}", rank)
            if told is not None and (rank not in found or found[rank].symptom):
                found[rank] = told.known
    return found


def own_findings(marked: Mark) -> LogFindings | None:
    """Return what all that was written to our standard error since then says, where that is a file."""
    size = _own_size()
    if size is None or size <= marked.own_size:
        return None
    return read_tail(_tail(_STANDARD_ERROR, marked.own_size), "the launcher's standard error")


def _own_size() -> int | None:
    with contextlib.suppress(OSError):
        status = os.fstat(2)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _tail(name: str, since: int = 0) -> bytes:
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                file.seek(max(since, status.st_size - MOST_BYTES))
                return file.read(MOST_BYTES)
    return b""


def _kernel_messages(fd: int) -> Iterator[str]:
    """Yield the messages of the records `prio,seq,time,flags;message` from where the descriptor stands."""
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(fd, _RECORD_BYTES)
        except BrokenPipeError:
            continue  # it was overwritten by newer ones; the next read goes on with those
        except OSError:
            return
        if not record:
            return
        for line in record.decode(errors="replace").splitlines():
            head, semicolon, message = line.partition(";")
            if semicolon and head[:1].isdigit():
                yield message
