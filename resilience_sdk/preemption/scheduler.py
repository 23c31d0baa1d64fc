"""When the scheduler will end this job, as far as it told the job at its start."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from resilience_sdk import environ

SLURM_END = "SLURM_JOB_END_TIME"


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
