"""Whether a fit that has ended without an error has completed the training. Pure, of what the trainer shows."""

from __future__ import annotations

from typing import Any


def is_complete(trainer: Any, *, has_ended: bool) -> bool:
    """Tell whether nothing is left to do: a time budget (`max_time`, `Timer`) that is spent leaves something.

    A fit that finds its steps or epochs done already is complete; so is one that an `EarlyStopping` has ended. One
    whose training has not come to its end (`has_ended`) was only begun, as `Tuner.lr_find` does.
    """
    if _reached(trainer.global_step, trainer.max_steps) or _reached(trainer.current_epoch, trainer.max_epochs):
        return True
    return has_ended and not any(_is_spent(callback) for callback in trainer.callbacks)


def _reached(count: int, most: int | None) -> bool:
    return most is not None and 0 <= most <= count


def _is_spent(callback: Any) -> bool:
    remaining = getattr(callback, "time_remaining", None)
    left_s = remaining() if callable(remaining) else None
    return left_s is not None and left_s <= 0
