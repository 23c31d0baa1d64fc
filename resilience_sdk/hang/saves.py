"""Saves that stall: a rank stands still while it writes or reads a checkpoint. Pure.

The table of patience is that of what it waits in, as for whoever stands still; only the name says more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from resilience_sdk.attribution.exceptions import is_our_frame
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.evidence import busy_with
from resilience_sdk.hang.timers import RankState
from resilience_sdk.hang.waits import On

STALL = "checkpoint_stall"
# Functions as frameworks and scripts call them, whatever writes the bytes below them.
_SAVES = re.compile(r" _?(save|write|store)_(\w+_)?(checkpoint|ckpt|snapshot|state|pretrained|model)s?(_\w+)?$")
_LOADS = re.compile(
    r"/(torch/serialization|torch/distributed/checkpoint/\w*load\w*|safetensors/\w+)\.py:\S+ \w*load\w*$"
)
_NO_STORAGE = (On.SLEEP, On.STOPPED_CHILD, On.TRACED_CHILD, On.COLLECTIVE)


def is_saving(section: str | None, frames: Sequence[str]) -> bool:
    """Tell whether a section or a stack is that of a save: ours, a framework's, or one of the script's own."""
    if "checkpoint" in (section or "").lower() or busy_with(frames) == "checkpoint":
        return True
    return any(_SAVES.search(frame) or (is_our_frame(frame) and "/checkpoint/" in frame) for frame in frames)


def is_loading(frames: Sequence[str]) -> bool:
    """Tell whether a stack reads a checkpoint."""
    return any(_LOADS.search(frame) for frame in frames)


def stalls_in_save(state: RankState, frames: Sequence[str] = ()) -> bool:
    """Tell whether a rank stands still in a save, and not for its peers, for a time, or for somebody who stopped it."""
    activity = state.activity
    if activity is None or state.stopped or state.in_collective:
        return False
    if not (state.slow_work == "checkpoint" or is_saving(state.section, frames)):
        return False
    return _stands(activity, state.process_state) and activity.on not in _NO_STORAGE


def _stands(activity: Activity, process_state: str) -> bool:
    if activity.kind is Kind.WAITING:
        return activity.on is On.FILE_LOCK
    return activity.kind is Kind.STUCK or (activity.kind is Kind.UNKNOWN and process_state == "D")
