"""The policy of saves: every so many steps, every so much time, or as often as pays off.

All ranks must save at the same step, and clocks differ, so a time is never compared on more than one rank.
The shared state is a step, `next_question`: when it is reached, all ranks ask rank 0, which answers with
"save now" or with a later step for the next question. The questions are a few per interval (the distance
halves as the time comes near), never one per step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Literal

import attrs

from resilience_sdk.checkpoint.history import PRIOR_MTTF_S
from resilience_sdk.core.settings.parse import checkpoint_every, duration_s
from resilience_sdk.errors import ConfigError

_ASSUMED_BYTES_PER_S = 200e6
_ASSUMED_OVERHEAD_S = 0.05
_WINDOW = 5
# An asynchronous save costs the training little, but the disk and the memory bandwidth work for all of it.
_MOST_WRITING = 0.5


@attrs.frozen
class Every:
    """A parsed `every`: exactly one of `steps` and `seconds` is set; neither = as often as pays off."""

    steps: int | None = None
    seconds: float | None = None


def parse_every(value: str | int) -> Every:
    """Return what `"auto"`, a number of steps or a duration such as `"10min"` means; raises `ConfigError`."""
    try:
        parsed = checkpoint_every(value)
    except ValueError as error:
        raise ConfigError(f"checkpoint every={value!r}: {error}") from None
    if isinstance(parsed, int):
        return Every(steps=parsed)
    return Every() if parsed == "auto" else Every(seconds=duration_s(parsed))


def best_interval_s(write_s: float, mttf_s: float) -> float:
    """Return the interval in seconds that loses least to saving and to repeated work: sqrt(2 * write * MTTF).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; the time from
    the end of one save to the begin of the next. J. T. Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps", FGCS 22(3), 2006, adds terms that matter only where a save takes a good part of
    the MTTF; as there, the interval is bounded by the MTTF.
    """
    return min(math.sqrt(2.0 * write_s * mttf_s), mttf_s)


class SavePolicy:
    """Decides when to save. `due` and `next_question` are the same on all ranks, the rest is rank 0's.

    Steps count completed ones; times are seconds of one clock, handed in by the caller.
    """

    def __init__(self, every: Every, *, mttf_s: float = PRIOR_MTTF_S) -> None:
        self.every = every
        self.mttf_s = mttf_s
        self.next_question = 0
        self.assumed_save_s = 0.0
        self._write_s: deque[float] = deque(maxlen=_WINDOW)
        self._whole_s: deque[float] = deque(maxlen=_WINDOW)  # until committed, also where the training went on
        self._least_s = 0.0
        self._assumed_write_s = _ASSUMED_OVERHEAD_S
        self._asked_step = 0
        self._last_step = 0
        self._last_s = 0.0
        self._mark_step = 0
        self._mark_s = 0.0

    def start(self, step: int, now_s: float, state_bytes: int = 0) -> None:
        """Begin at `step`, with a first guess of the write time from the size of the state."""
        self._assumed_write_s = _ASSUMED_OVERHEAD_S + state_bytes / _ASSUMED_BYTES_PER_S
        self._last_step = self._mark_step = step
        self._last_s = self._mark_s = now_s
        self._asked_step = step
        self.next_question = step + 1

    def due(self, step: int) -> Literal["no", "save", "ask"]:
        """Return what all ranks do after `step` completed steps; only of values that all ranks share.

        A number of steps means its multiples: who asks seldom saves when one was passed since the last question.
        """
        if self.every.steps is not None:
            before, self._asked_step = min(self._asked_step, step - 1), step  # steps may go back, to an older state
            return "save" if step > 0 and step // self.every.steps > before // self.every.steps else "no"
        return "ask" if step >= self.next_question else "no"

    def next_due(self) -> int:
        """Return after how many completed steps `due` has more than "no" to say again; the same on all ranks."""
        every = self.every.steps
        return self.next_question if every is None else (self._asked_step // every + 1) * every

    @property
    def interval_s(self) -> float:
        """Seconds between the end of one save and the begin of the next; rank 0's."""
        if self.every.seconds is not None:
            return self.every.seconds
        write_s = statistics.median(self._write_s) if self._write_s else self._assumed_write_s
        return max(best_interval_s(write_s, self.mttf_s), self._least_s)

    @property
    def expected_save_s(self) -> float:
        """Seconds until a save would be committed: the longest of the last few, else what is assumed. Rank 0's."""
        return max(self._whole_s, default=self.assumed_save_s)

    def measured(self, stall_s: float, write_s: float) -> None:
        """Take note of an asynchronous save: it held the training up for `stall_s` and wrote for `write_s`."""
        self._write_s.append(stall_s)
        self._whole_s.append(write_s)
        self._least_s = write_s / _MOST_WRITING

    def postpone(self, step: int) -> int:
        """Return when to ask again where a save is due and cannot begin: one is still written, or there is no time."""
        return step + max(1, (step - self._last_step) // 8)

    def answer(self, step: int, now_s: float) -> int | None:
        """Return None for "save now", else the step at which to ask again; on rank 0 only."""
        remaining_s = self.interval_s - (now_s - self._last_s)
        if remaining_s <= 0:
            return None
        steps = max(step - self._mark_step, 1)
        pace_s = max((now_s - self._mark_s) / steps, 1e-9)
        self._mark_step, self._mark_s = step, now_s
        # Half the way, and never further than has been gone since the last save: the pace may change.
        return step + max(1, min(math.ceil(remaining_s / pace_s / 2), step - self._last_step))

    def saved(self, step: int, now_s: float, write_s: float | None) -> int:
        """Take note of a save (or of a failed try: `write_s` None) and return the next question; rank 0."""
        if write_s is not None:
            self._write_s.append(write_s)
            self._whole_s.append(write_s)
        self._last_step = self._mark_step = step
        self._last_s = self._mark_s = now_s
        return step + 1
