"""Single steps that take a rank many times as long as the others: a stopped process, a dying disk. Pure.

The median over a window is made not to see them, and a healthy fleet of thousands has some all the time. So a stall is
long, and in a large fleet only a rank that stalls again is named.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from resilience_sdk.straggler.rules import Rules
from resilience_sdk.straggler.window import NOT_SEEN, median

_REMEMBERED = 64  # stalls of one rank


@attrs.frozen
class Stall:
    """What the stalls of one rank have cost it in one window."""

    ratio: float
    """Its time over the window to that of the others."""
    lost_s: float
    """How much longer than the others it took, seconds per step."""
    patience: float
    """How many times longer than needed to be named its longest stall was; at least 1."""


class Stalls:
    """The stalls of the last windows, of those ranks that had any."""

    def __init__(self) -> None:
        """Begin at the first window."""
        self._window = 0
        self._windows_of: dict[int, deque[int]] = {}

    def add(
        self, rows: Mapping[int, Sequence[float]], centre: Sequence[float], step_s: float, rules: Rules
    ) -> dict[int, Stall]:
        """Take one window and return the ranks that stalled in it and are to be named.

        `centre` is what each pass takes the others, `step_s` the time of a usual step; where that is not known, that
        of a pass stands in for it.
        """
        self._window += 1
        known = [middle for middle in centre if middle == middle]
        usual = median(known) if known else NOT_SEEN
        bounds = [middle + _patience_s(middle, usual, step_s, rules) for middle in centre]
        least = min((bound for bound in bounds if bound == bound), default=math.inf)
        found = {}
        for rank, row in rows.items():
            if max(row) < least:  # a NaN in front makes this false, which only costs time
                continue
            stalls = [
                (value - middle) / (bound - middle)
                for value, middle, bound in zip(row, centre, bounds, strict=True)
                if value >= bound
            ]
            if stalls:
                memory = self._windows_of.setdefault(rank, deque(maxlen=_REMEMBERED))
                memory.extend([self._window] * len(stalls))
                found[rank] = _cost(row, centre, max(stalls))
        oldest = self._window - rules.stall_windows
        self._windows_of = {rank: memory for rank, memory in self._windows_of.items() if memory[-1] > oldest}
        needed = 1 if len(rows) <= rules.lone_stall_ranks else 2
        return {
            rank: stall
            for rank, stall in found.items()
            if sum(1 for window in self._windows_of[rank] if window > oldest) >= needed
        }


def _patience_s(middle: float, usual: float, step_s: float, rules: Rules) -> float:
    """Return how much longer than `middle`, which a pass takes the others, it must take to be a stall.

    The step is longer than usual by what the others take longer than `usual` for it, and its spikes are with it.
    """
    if step_s > 0.0:
        steps_s = max(rules.stall_steps * step_s, rules.stall_own_steps * (step_s + middle - usual))
    else:
        steps_s = rules.stall_steps * middle
    return max(steps_s, rules.stall_ratio * middle, rules.stall_s)


def _cost(row: Sequence[float], centre: Sequence[float], patience: float) -> Stall:
    both = [(value, middle) for value, middle in zip(row, centre, strict=True) if value == value and middle == middle]
    own, others = sum(value for value, _ in both), sum(middle for _, middle in both)
    return Stall(own / others if others > 0.0 else float(len(both)), (own - others) / len(row), patience)
