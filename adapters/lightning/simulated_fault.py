"""The simulated faults of NVIDIA's callback: a rank that is killed, or stops, some time after the start."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import attrs

from resilience_sdk.console import say

KINDS = ("random", "rank_killed", "rank_hung")


def _kind(value: Any) -> str:
    """Return the name of a fault, which may be a member of an enumeration."""
    return str(getattr(value, "name", value)).lower()


@attrs.frozen
class SimulatedFaultParams:
    """Which fault, and when: `base_delay` seconds after the start, and up to `rand_delay` more."""

    fault_type: str = attrs.field(converter=_kind)
    base_delay: float = attrs.field(converter=float)
    rand_delay: float = attrs.field(default=0.0, converter=float)
    rank_to_fail: int | None = None

    @fault_type.validator
    def _check(self, _attribute: Any, value: str) -> None:
        if value not in KINDS:
            raise ValueError(f"SimulatedFaultParams(fault_type={value!r}): expected one of {', '.join(KINDS)}")


@attrs.frozen
class PlannedFault:
    """What was drawn."""

    rank: int
    number: int
    delay_s: float


def plan(params: SimulatedFaultParams, world_size: int, seed: str) -> PlannedFault:
    """Draw what is left open, equally on all ranks, which share the seed. Pure."""
    drawn = random.Random(seed)  # noqa: S311 - no secret
    kind = drawn.choice(KINDS[1:]) if params.fault_type == "random" else params.fault_type
    rank = drawn.randrange(world_size) if params.rank_to_fail is None else params.rank_to_fail
    number = signal.SIGKILL if kind == "rank_killed" else signal.SIGSTOP
    return PlannedFault(rank, number, params.base_delay + params.rand_delay * drawn.random())


def arm(fault: PlannedFault, rank: int) -> threading.Timer | None:
    """Let the fault strike this process if it is its; return what cancels it."""
    if rank != fault.rank:
        return None

    def strike() -> None:
        say(f"simulated fault: {signal.Signals(fault.number).name} to rank {rank} now")
        os.kill(os.getpid(), fault.number)

    timer = threading.Timer(fault.delay_s, strike)
    timer.name, timer.daemon = "resilience-fault", True
    timer.start()
    return timer
