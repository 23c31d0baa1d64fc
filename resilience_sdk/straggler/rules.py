"""When a rank is called slow: every threshold of the verdicts, and what each is for."""

from __future__ import annotations

import math

import attrs

LEAST_EXCESS_S = 5e-4
"""Who loses less time than this is not called slow, however small the section: one of a tenth of a millisecond takes
twice as long when a processor clocks down or its caches are cold, on some ranks or on all, and for minutes."""


@attrs.frozen
class Rules:
    """Thresholds of the verdicts; `attrs.evolve` makes others. Ratios are shares: 0.05 is 5 % slower."""

    enabled: bool = True
    spans: tuple[tuple[int, float], ...] = ((2, 0.05), (4, 0.04), (8, 0.03))
    """(windows, least excess): what lasts longer is known better, so it may be smaller."""
    z: float = 6.0
    """Least distance from the middle of the ranks, in standard deviations (from the median absolute deviation)."""
    false_flags: float = 1e-4
    """How many false flags a window may have over all its ranks: raises `z` in large fleets, see `needed_z`."""
    few: int = 5
    """With fewer comparable ranks (or nodes) than this there are no statistics of peers."""
    excess_of_few: float = 0.10
    """Least excess over the median of the others where there are few."""
    z_of_few: float = 3.0
    """Least distance of what takes twice as long as the others where there are few, whose noise is known badly."""
    change_of_few: float = 0.03
    """Least excess that also counts where there are few, when it began while we watched: a change point."""
    own_z: float = 5.0
    """Least excess in standard deviations of the own level, as the scatter of the unit's own steps tells them."""
    share_of_step: float = 0.02
    """Least excess as a share of the whole step: what nobody would notice is not reported."""
    least_excess_s: float = LEAST_EXCESS_S
    """And in seconds per step. From steps of 25 ms on the share of the step is more."""
    persistent_windows: int = 6
    """A verdict that has stood for so many windows is persistent, before that it is transient."""
    regression: float = 0.03
    """Least change of the median of all ranks that is called a global regression."""
    regression_z: float = 5.5
    """Least distance of the new level from the old one, in standard deviations."""
    stall_steps: float = 8.0
    """A step that takes so many steps' time longer than on the others, is a stall."""
    stall_own_steps: float = 4.0
    """And so many times the step that it is in, where that one is longer than usual: a long sequence."""
    stall_ratio: float = 2.0
    """And so many times what the others take longer than these, where a pass lasts for many steps: a checkpoint."""
    stall_s: float = 0.2
    """And it takes at least so many seconds longer."""
    stall_windows: int = 8
    lone_stall_ranks: int = 8
    """In larger fleets somebody stalls once all the time: there it takes two stalls of a rank in `stall_windows`."""

    def least_excess_of_pass_s(self, step_s: float, passes_per_step: float) -> float:
        """Return from which excess on somebody would notice it: seconds per pass of a section.

        `step_s` is the time of a step in seconds, 0.0 where it is not known.
        """
        return max(self.share_of_step * step_s, self.least_excess_s) / passes_per_step

    def needed_z(self, units: int) -> float:
        """Return the distance from the middle that is enough among so many ranks (or nodes).

        The tail of the normal distribution is at most exp(-z²/2)/2, so one of n values exceeds sqrt(2 ln(n / 2f)) less
        than f times. The tails of levels are heavier than that, so n is the square of the number of units.
        """
        return max(self.z, math.sqrt(2.0 * math.log(max(2.0, units**2 / (2.0 * self.false_flags)))))
