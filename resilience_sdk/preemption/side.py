"""What the session gives to who listens: the page, where decisions are, the settings, and who else is there."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk.events import Event
from resilience_sdk.job_config import COORDINATOR

NO_PAGES = Path(os.devnull)
"""Stands for the page directory of a rank that could have none: nothing can be read or written below it."""

MONITOR, RANKS = "monitor", "ranks"
"""Who coordinates the stop of the ranks of a job on one node, as it stands in `coordinator_word`."""

_FILE_CLOCK_S = 0.02  # by which the clock of file times may be behind: it goes by ticks of the kernel


def coordinator_word(pages: Path, attempt: int) -> Path:
    """Return the link that says, written once, who coordinates; there is none for the ranks of several nodes."""
    return pages / f"{COORDINATOR}{attempt}"


def is_request(path: Path | None, began_unix: float) -> bool:
    """Tell whether somebody asks by a file for the job that began then: see `counts`. Never raises."""
    if path is None:
        return False
    try:
        return counts(path.lstat(), began_unix)
    except OSError:
        return False


def counts(info: os.stat_result, began_unix: float) -> bool:
    """Tell whether a file asks the job that began then: a real one, of its user or root, that is not older."""
    return (
        stat.S_ISREG(info.st_mode) and info.st_uid in (0, os.geteuid()) and info.st_mtime >= began_unix - _FILE_CLOCK_S
    )


class Emitter(Protocol):
    """Takes events, as a journal does."""

    def emit(self, event: Event, **facts: Any) -> None:
        """Take an event; never raises."""
        ...


class NoJournal:
    """Takes events of a rank that has no run directory."""

    def emit(self, event: Event, **facts: Any) -> None:
        """Take an event, and drop it."""


@attrs.frozen
class Side:
    """What a listening rank has from its session. Durations are seconds."""

    words: Any
    """The rank's page as words, or make-believe ones that nobody else reads."""
    pages: Path
    journal: Emitter
    attempt: int
    signals: tuple[int, ...]
    grace_s: float
    """From a notice to the end, where nobody told (`preempt_time`)."""
    wakeup: Callable[[], int]
    """Starts what reads it, where that does not run yet, and returns the descriptor."""
    signal_grace_s: float = math.inf
    """From a signal to the end, where whoever signals has a time of its own."""
    request_file: Path | None = None
    began_unix: float = 0.0
    """An older request file was for another job."""
    is_alone: bool = False
    """There is no other rank."""
    has_coordinator: Callable[[], bool | None] = lambda: True
    """Tells, alike on all ranks of the job, whether monitors coordinate the stop; None as long as that is not known."""
    first_check: Callable[[int], int] = int
    """Where none does: from which check on the ranks agree by themselves, asked at the first check that knows it."""
    deaf: tuple[int, ...] = ()
    """Ranks that cannot take part, where the ranks agree by themselves: no stop can be agreed."""
    stopping: Callable[[int | None, str | None], None] = lambda step, heard: None
    """Called at the agreed stop, with the step that `check()` was given and the signal that this rank has heard."""
