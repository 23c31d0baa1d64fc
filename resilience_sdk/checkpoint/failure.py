"""The reason why a save was not made: in words, its error number, and whether time may cure it.

A full disk, a quota that is used up and a storage that does not answer pass: somebody makes room, a server comes
back. A descriptor that is not to be had, a permission and a mount that is read-only do not pass by themselves.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.system.storage_probe import try_writing

# By name, as no system but Linux has all of them.
_PASSING = frozenset(
    number
    for name in (
        *("ENOSPC", "EDQUOT", "EIO", "EREMOTEIO", "EAGAIN", "EINTR", "ETIMEDOUT", "ESTALE", "ENOLCK"),
        *("ENOTCONN", "ESHUTDOWN", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
    )
    if (number := getattr(errno, name, None)) is not None
)
# Errors of other languages' libraries keep the number in their words: `Os { code: 28, ...`, `(os error 28)`.
_IN_WORDS = re.compile(r"(?i)(?:\[errno |os error |\bcode: )(\d{1,3})\b")
_MAX_CHAIN = 16


@attrs.frozen
class Unsaved:
    """A save of `step` completed steps that was not made; the same on all ranks. `number` is an error number.

    `is_left_out`: it was not tried, as the one before was still being written, or for want of time.
    """

    step: int
    why: str
    number: int | None = None
    is_left_out: bool = False

    @property
    def passes(self) -> bool:
        """Whether a later try may succeed though nobody repairs the program or its rights."""
        return self.number in _PASSING

    def cure(self, place: Path) -> str:
        """Return what a person has to do before the next save into `place` can succeed. Pure."""
        if self.number in (errno.ENOSPC, errno.EDQUOT):
            return f"make room for {place} (df -h, df -i and the quota tell what is used up), then run it again"
        if self.number in (errno.EMFILE, errno.ENFILE):
            return "raise the limit of open files (ulimit -n), or find who leaves them open, then run it again"
        if self.number in (errno.EACCES, errno.EPERM, errno.EROFS):
            return f"let this user write to {place}, then run it again"
        return f"see to it that {place} takes writes, then run it again"

    @property
    def told(self) -> str:
        """The reason with the name of its error number, as manuals and searches have it."""
        name = errno.errorcode.get(self.number or 0)
        return self.why if name is None or name in self.why else f"{self.why} [{name}]"


def number_of(error: BaseException) -> int | None:
    """Return the error number that an exception, or what it was raised from, has; None where none says."""
    for one in _chain(error):
        number = one.errno if isinstance(one, OSError) else getattr(one, "number", None)
        if isinstance(number, int) and number:
            return number
    words = _IN_WORDS.search(str(error))
    return None if words is None else int(words[1])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and what it was raised from, of torch.distributed.checkpoint those of all ranks."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_CHAIN:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):
            waiting += [cause for cause, *_ in failures.values() if isinstance(cause, BaseException)]
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]


def number_of_write(error: BaseException, directory: Path) -> int | None:
    """Return the same of a failed write into `directory`; where no exception says, the storage is asked."""
    number = number_of(error)
    if number is not None:
        return number
    try:
        status = os.statvfs(directory)
    except OSError as failure:
        return failure.errno
    if status.f_blocks > 0 and (status.f_bavail == 0 or status.f_files > 0 == status.f_favail):
        return errno.ENOSPC
    return try_writing(directory).number


def number_of_parts(parts: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the error number of the ranks that failed: one that does not pass, if there is any. Pure."""
    numbers: Sequence[int | None] = [part.get("number") for part in parts if part["error"]]
    lasting = [number for number in numbers if number not in _PASSING]
    return next(iter(lasting or numbers), None)
