"""When the scheduler will end this job, as far as it told the job at its start."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from resilience_sdk import environ

SLURM_END = "SLURM_JOB_END_TIME"


_SAVES = 1.5  # the last save may take longer than those before
_MARGIN_S = 10.0  # for the agreement, and for leaving


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
