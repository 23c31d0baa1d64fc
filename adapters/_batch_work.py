"""The work of a loop on one batch: a save or a stop in the midst of it would lose the rest, as a resume takes the next.

A loop may make several steps of a batch (PPO), and call the attached model again behind its step (the generator of a
GAN, whose discriminator comes second). So where the loader is in use, all waits for the next batch that is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from resilience_sdk.checkpoint.ranks import agreement, find_ranks, group_is_ready
from resilience_sdk.core.resume_limits import note

FIRST = 64
"""For so many steps of the first batch a save waits: a loop may use one batch for all of its steps."""
MAX_WAIT_S = 600.0
"""A training that has left its loader for another one is saved all the same."""


class BatchWork:
    """The steps that a loop makes of its batches; of the thread that trains, which counts here by itself."""

    __slots__ = ("_agreed", "_held_at_s", "at_s", "fetched", "has_loss_behind", "most", "steps", "took_s",
                 "turns")  # fmt: skip

    def __init__(self) -> None:
        """Know of no batch yet."""
        self.fetched = 0
        """How many batches were asked for when the newest step ended."""
        self.steps = self.most = 0
        """Steps since then, and the most that were made of one batch."""
        self.has_loss_behind = False
        """Whether a loss was heard behind that step, before another batch was asked for."""
        self.at_s = time.monotonic()
        """When the newest step ended, and how long it took."""
        self.took_s = 0.0
        self.turns: Turns | None = None
        """The steps of other optimizers of the loop, where they are known; counts where no batch is seen."""
        self._agreed: tuple[int, bool] | None = None
        self._held_at_s: float | None = None

    def is_through(self) -> None:
        """Note that nothing waits any more."""
        self._agreed = self._held_at_s = None
        if self.turns is not None:
            self.turns.held = 0

    def waits(self, step: int, *, save_s: float, left_s: float | None) -> bool:
        """Tell whether what is due behind `step` waits for the next batch: alike on all ranks. Collective once a step.

        `left_s`: seconds until the job is ended, where it is to leave, in which a save takes `save_s`.
        """
        if not self.fetched:  # the loop has batches from elsewhere
            return self.turns is not None and self.turns.are_open()
        if self._agreed is not None and self._agreed[0] == step:
            return self._agreed[1]
        now = time.monotonic()
        if self._held_at_s is None:
            self._held_at_s = now
        waits = self.steps <= (2 * self.most or FIRST) and now - self._held_at_s < MAX_WAIT_S
        waits = waits and (left_s is None or left_s >= save_s + 2 * self.took_s)
        if group_is_ready():
            ranks = find_ranks()
            with agreement():
                waits = all(ranks.gather(waits))
        self._agreed = step, waits
        if not waits:
            note_within_batch()
        return waits


class Turns:
    """The steps of several optimizers that train in turns, as those of a GAN; of the thread that trains.

    A turn is through where the others have stepped as often behind the loop's own step as they do as a rule.
    """

    def __init__(self, optimizer: Any, others: Iterable[Any]) -> None:
        """Count from here on; `optimizer` is the one whose steps are the loop's."""
        others = list(others)
        self._since = [0] * len(others)
        self._first: list[int] | None = None
        self._usual: list[int] | None = None
        self.held = 0
        """For how many steps of the loop something has waited."""
        self._hooks = [optimizer.register_step_post_hook(self._own_stepped)]
        for number, other in enumerate(others):
            self._hooks.append(other.register_step_post_hook(self._counting(number)))

    def leave(self) -> None:
        """Count no more."""
        for hook in self._hooks:
            hook.remove()

    def are_open(self) -> bool:
        """Tell whether others have still to step before the next turn begins; for two steps of the loop at most."""
        if self._first is None or self.held > _MAX_HELD:
            return False
        if self._usual is None:  # whoever comes behind has made no step yet
            is_open = not any(self._first)
        else:
            both = zip(self._since, self._usual, self._first, strict=True)
            is_open = any(since < usual - first for since, usual, first in both)
        self.held = max(self.held, 1) if is_open else 0
        return is_open

    def _own_stepped(self, *_: Any) -> None:
        if self._first is None:
            self._first = self._since
        else:
            self._usual = self._since
        self._since = [0] * len(self._since)
        if self.held:
            self.held += 1

    def _counting(self, number: int) -> Any:
        def stepped(*_: Any) -> None:
            self._since[number] += 1

        return stepped


_MAX_HELD = 2


def note_within_batch() -> None:
    """Say that a checkpoint or a stop has come in the midst of what a loop makes of one batch."""
    note(
        "within a batch",
        "what a loop makes of a batch behind the step at which it was saved or left",
        "no other batch was asked for in time, and that one counts as done (where steps take no batch of the attached "
        "loader, the resume is exact)",
        "make fewer steps of one batch, or leave more time for a stop (preempt_time)",
    )
