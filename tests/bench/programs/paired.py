"""Measures what something adds to a step: with and without it in turns, in CPU time of the training thread."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

from resilience_sdk.preemption import listener as listening

_TURNS = 24
_MOST_S = 10.0


def paired(step: Callable[[], None], attach: Callable[[], Any], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return nanoseconds per step: bare, and what is added between `attach()` and `detach()` of what it returned.

    In short turns, each compared with its neighbour, so that what else the machine does falls on both alike; of each
    round the median.
    """
    _begin(step, attach)
    for _ in range(steps):
        step()
    result: dict[str, list[float]] = {"step": [], "added": []}
    for _ in range(rounds):
        alone, watched = [], []
        for _ in range(_TURNS):
            alone.append(_took(step, steps))
            handle = attach()
            step()
            step()  # what saves looks at its directory between the first two
            watched.append(_took(step, steps))
            handle.detach()
        result["step"].append(statistics.median(alone))
        result["added"].append(statistics.median(more - less for more, less in zip(watched, alone, strict=True)))
    return result


def _begin(step: Callable[[], None], attach: Callable[[], Any]) -> None:
    """Have the recording begun, and its monitor: until it is there, each check for preemption looks for it."""
    handle = attach()
    settle(step)
    handle.detach()


def settle(step: Callable[[], None]) -> None:
    """Make steps until the checks for preemption know whom to ask, 10 s at most."""
    until = time.monotonic() + _MOST_S
    while time.monotonic() < until:
        step()
        listening.check()
        if getattr(listening._me, "is_settled", True):
            break
        time.sleep(0.01)


def _took(step: Callable[[], None], steps: int) -> float:
    return timeit.timeit(step, number=steps, timer=time.thread_time) / steps * 1e9


def on_one_core() -> None:
    """Keep this process on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def tell(result: Any) -> None:
    """Hand the result to the bench."""
    sys.stdout.write(json.dumps(result))
