"""How steps are told, everywhere alike: a place in the training is a step, an amount of it so many steps. Pure.

Steps count from 0, so the last of 49 steps is step 48. "After step 49" would leave open which of the two is meant.
"""

from __future__ import annotations


def step_words(step: int, is_global: bool | None) -> str:
    """Return a step as a person is to read it: one that begins anew with each attempt is no place in the training."""
    return f"step {step} of this attempt" if is_global is False else f"step {step}"


def count_words(steps: int) -> str:
    """Return an amount of steps: `1 step`, `49 steps`."""
    return f"{steps} step{'' if steps == 1 else 's'}"
