"""The window of a loop that adds up gradients over several of its steps by hand: a save in it would lose them.

Optimizers tell of their steps. A window is open where backward has added to gradients since, and no optimizer has made
a step within the newest step of the loop: one of two that train in turns leaves gradients in the other's parameters.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from resilience_sdk.checkpoint.ranks import Ranks
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note

SAMPLED = 4
"""Parameters of each optimizer that are looked at: backward reaches all of them or none."""
MAX_HELD_STEPS = 1024
"""For so many steps of the loop a save waits for the end of a window; gradients that stay for longer are no window."""
_MAX_WINDOWS, _LEAST_HELD = 4, 32
"""Nor longer than so many of the longest window that was seen, or so many steps: then they are used in another way."""
_MARK = "_resilience_used"


class AccumulationWindow:
    """The window of one loop, by the optimizers of its state; of the thread that trains."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> AccumulationWindow | None:
        """Return that of the optimizers in a state; None where there are none."""
        from torch.optim import Optimizer

        optimizers = [item for item in state.values() if isinstance(item, Optimizer)]
        return cls(optimizers) if optimizers else None

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._parameters: list[weakref.ref[Any]] = []
        self._steps = self._seen = 0
        self._step: int | None = None
        self._has_stepped = True
        self._held = 0
        """For how many steps of the loop a save has waited."""
        self._since = self._longest = 0
        """Steps of the loop since the last one of an optimizer, and the most that lay between two."""
        self._is_given_up = False
        """Whether a save has waited in vain: none does again before an optimizer has stepped."""
        self._at_s = time.monotonic()
        self._took_s = 0.0
        for optimizer in optimizers:
            self._watch(optimizer)

    def _watch(self, optimizer: Any) -> None:
        register = getattr(optimizer, "register_step_post_hook", None)
        own = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        # Those of a subclass that has never called __init__ of its base are not there.
        if register is None or not own or not hasattr(optimizer, "_optimizer_step_post_hooks"):
            return
        sampled = [weakref.ref(own[index * len(own) // SAMPLED]) for index in range(SAMPLED)]
        self._parameters += sampled

        def stepped(*_: Any) -> None:
            self._steps += 1
            _mark(sampled)

        _mark(sampled)  # of gradients from before nobody can tell
        register(stepped)

    def step_of(self, optimizer: Any) -> None:
        """Take a step of an optimizer that is not in the state: it has used the gradients of its parameters."""
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        used = [reference for reference in self._parameters if id(reference()) in own]
        if used:
            self._steps += 1
            _mark(used)

    def at_boundary(self, step: int, *, is_new: bool = False) -> None:
        """Take note that so many steps of the loop are complete. In each of them: a call that can be spared is.

        `is_new`: also with the number of the last one, as of a loop that counts optimizer steps alone.
        """
        if step == self._step and not is_new:
            return
        now = time.monotonic()
        self._step, self._took_s, self._at_s = step, now - self._at_s, now
        self._has_stepped, self._seen = self._steps != self._seen, self._steps
        self._since += 1
        if self._has_stepped:
            self._longest, self._since, self._is_given_up = max(self._longest, self._since), 0, False
        if self._held:
            self._held += 1

    def is_open(self) -> bool:
        """Tell whether gradients have been added up that no step has used. May wait for a device."""
        return not self._has_stepped and not self._is_given_up and any(map(_has_unused, self._parameters))

    def waits(self, ranks: Ranks, left_s: float | None, save_s: float) -> bool:
        """Tell whether a save that is due waits for the end of the window: alike on all ranks. Collective.

        `left_s`: seconds until the job is ended, None = not known; a save takes `save_s`.
        """
        has_time = left_s is None or left_s >= save_s + 2 * self._took_s
        is_long = self._held > self._most_held()
        answers = ranks.gather([self.is_open(), has_time and not is_long])
        waits = any(is_open for is_open, _ in answers) and all(may_wait for _, may_wait in answers)
        if is_long and self.is_open():
            self._is_given_up = True
            if ranks.rank == 0:
                say_no_window(self._held)
        self._held = max(self._held, 1) if waits else 0
        return waits

    def _most_held(self) -> int:
        return min(max(_MAX_WINDOWS * self._longest, _LEAST_HELD), MAX_HELD_STEPS) if self._longest else MAX_HELD_STEPS

    @property
    def is_held(self) -> bool:
        """Whether a save waits for the end of the window; the same on all ranks."""
        return self._held > 0


def _mark(parameters: Iterable[weakref.ref[Any]]) -> None:
    """Note that gradients were used. It goes with the tensor, which a window may put another one for."""
    for reference in parameters:
        grad = getattr(reference(), "grad", None)
        if grad is not None:
            setattr(grad, _MARK, grad._version)


def _has_unused(reference: weakref.ref[Any]) -> bool:
    grad = getattr(reference(), "grad", None)
    if grad is None:
        return False
    try:
        return getattr(grad, _MARK, None) != grad._version and bool(grad.any())
    except (RuntimeError, NotImplementedError, TypeError):  # no tensor that would know
        return False


def say_no_window(steps: int) -> None:
    """Say that gradients which nobody has used for so many steps are taken for no window."""
    say_once(
        "no window",
        f"a save has waited for {steps} steps for the next step of an optimizer in the state, which has not come: "
        "saves wait no longer; where something else updates the parameters, give that to the state",
    )


def note_open_window() -> None:
    """Say that a checkpoint of an open window has lost its gradients."""
    note(
        "accumulation window",
        "the gradients of an accumulation window",
        "the checkpoint was saved between two optimizer steps, by save() or for want of time, and what backward had "
        "added up is not in it",
        "call save() behind optimizer.step()",
    )
