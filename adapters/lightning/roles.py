"""Which of several callbacks of ours in one trainer does what. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from resilience_sdk.errors import ConfigError

BEAT = "heartbeat"
SECTIONS = "sections"
PREEMPTION = "preemption"
CHECKPOINT = "checkpoint"
FINISH = "finished flag"
REPORT = "straggler reports"

_SHARED = frozenset({SECTIONS})  # one of those that ask for it does it for all


def role_of(callback: Any, callbacks: Sequence[Any]) -> frozenset[str]:
    """Return what `callback` does beside the others: nothing, where it came by itself and somebody asked for another.

    Raises:
        ConfigError: Two of them were asked for the same.
    """
    ours = [other for other in callbacks if hasattr(other, "duties")]
    asked = [other for other in ours if not other.is_automatic] or ours[:1]
    if callback not in asked:
        return frozenset()
    mine = set(callback.duties)
    for other in asked:
        if other is callback:
            continue
        if clash := sorted(mine & other.duties - _SHARED):
            names = f"{type(callback).__name__} and {type(other).__name__}"
            raise ConfigError(
                f"Trainer(callbacks=...) has {names}, and both do the {clash[0]}: remove one of them, only one can"
            )
        if asked.index(other) < asked.index(callback):
            mine -= other.duties
    if callback.stops_for_stragglers and not any(PREEMPTION in other.duties for other in asked):
        mine.add(PREEMPTION)
    return frozenset(mine)
