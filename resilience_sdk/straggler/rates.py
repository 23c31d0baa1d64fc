"""How often a rank passes a section per step, and in which step a pass was. Pure.

A rate of long ago says nothing about now: a section may begin in a later phase of a program, micro-batches may become
more. So it is taken from what was counted lately.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import attrs

from resilience_sdk.straggler.window import WINDOW_STEPS, median

_LEAST_STEPS = 32  # of one measurement: counts are of some moment within a step, so they may be off by one
_MEASURED = 4  # counts that are kept; the median of the rates between them is not moved by one pause


@attrs.define
class Rate:
    """Counts of one section on one rank, beside those of its steps."""

    began: tuple[int, int]
    """Passes and steps when it was seen first."""
    now: tuple[int, int] = attrs.field(init=False)
    _is_fresh: bool = attrs.field(default=True, init=False)
    _marks: deque[tuple[int, int]] = attrs.field(factory=lambda: deque(maxlen=_MEASURED))

    def __attrs_post_init__(self) -> None:
        """Begin there."""
        self.now = self.began

    def note(self, passes: int, steps: int) -> None:
        """Take the counts of this moment; steps may begin anew, when another heartbeat tells them."""
        if passes < self.now[0] or steps < self.now[1]:
            self.began = passes, steps
            self._marks.clear()
        if self._is_fresh and passes == self.began[0] + 1:
            self.began = passes, steps  # of a rare section the time between passes counts, not that before the first
        self._is_fresh = False
        self.now = passes, steps
        last = self._marks[-1] if self._marks else self.began
        if passes - last[0] >= WINDOW_STEPS and steps - last[1] >= _LEAST_STEPS:
            if not self._marks:
                self._marks.append(self.began)
            self._marks.append(self.now)

    @property
    def often(self) -> float:
        """How often it is passed in a step."""
        marks = list(self._marks) or [self.began, self.now]
        return median(passes_per_step(later[0] - before[0], later[1] - before[1]) for before, later in pairwise(marks))

    def step_of(self, number: int) -> int:
        """Return in which step the pass of that number was, as the rank counts its steps, from 0."""
        passes, steps = self.now
        often = self.often
        if abs(passes - often * steps) <= often + 1.0:  # so it has been since the rank began
            return int(number / often)
        return max(0, steps - int((passes - number) / often))


def passes_per_step(passes: int, steps: int) -> float:
    """Return how often a section is passed in a step: a whole number, or one over a whole number, if it may be.

    Both counts are of one moment somewhere within a step, so they may be wrong by one.
    """
    if passes <= 0 or steps <= 0:
        return 1.0
    often, seldom = round(passes / steps), round(steps / passes)
    if often and abs(passes - often * steps) <= often + 1:
        return float(often)
    if seldom and abs(steps - seldom * passes) <= seldom + 1:
        return 1.0 / seldom
    return passes / steps
