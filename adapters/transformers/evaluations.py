"""The evaluations of one training: how long they take, and whether one still fits before the job leaves."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from resilience_sdk import preemption
from resilience_sdk.checkpoint.ranks import agreement, find_ranks, group_is_ready
from resilience_sdk.core.console import say

_MARGIN = 1.25  # one may take longer than the one before it


def has_time(last_s: float | None, save_s: float, left_s: float | None) -> bool:
    """Tell whether an evaluation and a save fit into `left_s`; None: no end is known, or no evaluation was made yet."""
    return left_s is None or (last_s is not None and last_s * _MARGIN + save_s <= left_s)


class Evaluations:
    """Follows `evaluate` of one trainer; of the thread that trains, on all ranks."""

    def __init__(self, trainer: Any) -> None:
        """Know of none yet."""
        self._trainer = trainer
        self.last_s: float | None = None
        """Seconds that the last one took; None before the first."""
        self.has_ended = False
        """Whether a callback has ended the training for what the last one of this step has found."""

    def followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `evaluate` such that it is known how long it takes, and whether it ends the training."""

        def evaluate(*args: Any, **options: Any) -> Any:
            was_ended, began_s = self._trainer.control.should_training_stop, monotonic()
            result = method(*args, **options)
            self.last_s = monotonic() - began_s
            self.has_ended = self.has_ended or (not was_ended and bool(self._trainer.control.should_training_stop))
            return result

        return evaluate

    def fit(self, is_due: bool, save_s: float, step: int) -> tuple[bool, bool]:
        """Return whether an evaluation is due, and whether it is made before the save, as rank 0 sees it. Collective.

        One that is not made now is made by what resumes, before its first step.
        """
        left_s = preemption.time_left()
        answer = [is_due, is_due and has_time(self.last_s, save_s, left_s)]
        rank = 0
        if group_is_ready():
            ranks = find_ranks()
            with agreement():
                answer, rank = ranks.broadcast(answer), ranks.rank
        if answer[0] and not answer[1] and rank == 0:
            takes = "how long it takes is not known" if self.last_s is None else f"it takes about {self.last_s:.1f} s"
            say(f"the evaluation of step {step} is made by what resumes: {takes}, {left_s or 0.0:.1f} s are left")
        return bool(answer[0]), bool(answer[1])
