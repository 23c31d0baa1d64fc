"""The preemption context: what the session gives to who listens, and the time that a scheduler has told."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.job_config import COORDINATOR
from resilience_sdk.core.journal import Event

if TYPE_CHECKING:
    from resilience_sdk.core.journal import EventSink

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


class NoJournal:
    """Takes events of a rank that has no run directory."""

    def emit(self, event: Event, **facts: Any) -> None:
        """Take an event, and drop it."""


@attrs.frozen
class PreemptionContext:
    """What a listening rank has from its session. Durations are seconds."""

    words: Any
    """The rank's page as words, or make-believe ones that nobody else reads."""
    pages: Path
    journal: EventSink
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
    completed: Callable[[int | None], int | None] = lambda step: None
    """Tells how many steps are complete at a check that was given `step`; None where heartbeats have no numbers."""
    stopping: Callable[[int | None, str | None], None] = lambda step, heard: None
    """Called at the agreed stop, with how many steps are complete and the signal that this rank has heard."""


SLURM_END = "SLURM_JOB_END_TIME"


_SAVES = 1.5  # the last save may take longer than those before
_MARGIN_S = 10.0  # for the agreement, and for leaving
_LEAST_REST_S = 2.0  # before the scheduler's end, for what the launcher itself has to write


def is_time(began_unix: float, preempt_time_s: float, save_s: float, env: Mapping[str, str] | None = None) -> bool:
    """Tell whether the end is so near that the job should save and leave now, though nobody has asked. Any thread.

    That is `preempt_time` before it, or as long as a save needs, if that is more; but not in the first half of the
    time that the job had, or a short one would never get anywhere.

    Args:
        began_unix: When the job began to train, in Unix seconds.
        preempt_time_s: The setting.
        save_s: How long a save takes, 0 if that is not known.
        env: The environment; without it that of this process.
    """
    now = time.time()
    end = end_time(env, now)
    if end is None:
        return False
    need_s = max(preempt_time_s, _SAVES * save_s + _MARGIN_S if save_s else 0.0)
    return end - now <= min(need_s, (end - began_unix) / 2)


def end_time(env: Mapping[str, str] | None = None, now_unix: float | None = None) -> float | None:
    """Return the Unix time at which the scheduler ends this job, or None when nobody told.

    Slurm says it in `SLURM_JOB_END_TIME` (since 22.05, in every step and in the batch script), once: a job whose time
    limit was changed later keeps the old value. So a time that has passed while the job still runs means that it got
    more time, of unknown length, and is None too. Never raises; any thread.

    Args:
        env: The environment; without it that of this process.
        now_unix: The present, in Unix seconds; without it the clock's.
    """
    text = (environ.environment() if env is None else env).get(SLURM_END, "")
    try:
        end = float(text)
    except ValueError:
        return None
    now = time.time() if now_unix is None else now_unix
    return end if math.isfinite(end) and end > now else None


def time_to_leave(preempt_time_s: float) -> float:
    """Return the seconds that ranks have to save and leave: not beyond the scheduler's end, where it told one."""
    end = end_time()
    return preempt_time_s if end is None else max(0.0, min(preempt_time_s, end - time.time() - _LEAST_REST_S))
