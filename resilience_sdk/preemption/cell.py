"""A word that is written once: the decision of a round, in the job's private page directory.

A symbolic link, because making one is a single step that either wins or finds the winner, content included.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from resilience_sdk.preemption.protocol import Decision

_NAME = re.compile(r"stop-a(\d+)-(\d+)")


def read_decision(pages: Path, attempt: int, round_: int) -> Decision | None:
    """Return what was decided in a round, or None as long as nothing is. Raises OSError where it cannot be read."""
    try:
        return Decision(os.readlink(_path(pages, attempt, round_)))
    except FileNotFoundError:
        return None


def decide(pages: Path, attempt: int, round_: int, wanted: Decision) -> Decision:
    """Write a decision unless there is one, and return the one that stands. Raises OSError."""
    path = _path(pages, attempt, round_)
    with contextlib.suppress(FileExistsError):
        os.symlink(wanted.value, path)
        return wanted
    return Decision(os.readlink(path))


def last_round(pages: Path, attempt: int) -> int:
    """Return the highest round of an attempt that has been decided, 0 when none has."""
    found = (_NAME.fullmatch(name) for name in os.listdir(pages))
    return max((int(match[2]) for match in found if match and int(match[1]) == attempt), default=0)


def _path(pages: Path, attempt: int, round_: int) -> Path:
    return pages / f"stop-a{attempt}-{round_}"
