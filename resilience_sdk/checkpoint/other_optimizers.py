"""Optimizers that step in a training and are not in what is saved: no checkpoint has what they hold.

As of a fine-tuning whose second phase makes another optimizer, or of a GAN's second engine. It is said once one has
made steps in two of the loop; one that is made anew for each has nothing to lose.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

from resilience_sdk.checkpoint.ranks import describe
from resilience_sdk.core.console import say_once
from resilience_sdk.core.resume_limits import note

_MAX_DEPTH = 4
_MAX_OBJECTS = 4_096


class OtherOptimizers:
    """The steps of optimizers that are not saved; of the thread that trains. Nothing here raises."""

    def __init__(self, saved: Callable[[], Iterable[Any]]) -> None:
        """`saved()`: the objects that are; where no optimizer is among them, or in one, nobody knows."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._saved = saved
        self.step = 0
        """How many steps of the loop are complete."""
        self._first: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        """In which step of the loop each optimizer has stepped first; None: it is none of these; -1: it was said."""
        self.names: list[str] = []
        """The classes of those that were said."""
        self.stepped: Callable[[Any], None] = _nothing
        """Called at each step of one of them."""
        if not _watching.is_hooked:  # for good: a hook must not be taken off while the hooks of a step are called
            _watching.is_hooked = True
            register_optimizer_step_post_hook(_after_step)
        _watching.all.add(self)

    def after(self, optimizer: Any) -> None:
        """Take the step of any optimizer."""
        try:
            if optimizer not in self._first:
                self._first[optimizer] = self.step if self._is_other(optimizer) else None
            first = self._first[optimizer]
            if first is None:
                return
            self.stepped(optimizer)
            if first >= 0 and self.step > first:
                self._first[optimizer] = -1
                if optimizer.state and self._is_other(optimizer):  # some give all that is saved late
                    self.names.append(type(optimizer).__name__)
                    say_others(self.names[-1:])
        except Exception as error:  # noqa: BLE001 - an optimizer of somebody else's kind
            self._first[optimizer] = None
            name = type(optimizer).__name__
            say_once(f"optimizer {name}", f"whether the optimizer {name} is saved is not known: {describe(error)}")

    def _is_other(self, optimizer: Any) -> bool:
        from torch.optim import Optimizer

        held = {id(one) for one in _held(self._saved()) if isinstance(one, Optimizer)}
        # One that wraps what is saved has nothing of its own, as torch's ZeroRedundancyOptimizer.
        return bool(held) and held.isdisjoint(map(id, (optimizer, *vars(optimizer).values())))


@attrs.define
class _Watching:
    """Whose steps are looked at, in all of the process."""

    all: weakref.WeakSet[OtherOptimizers] = attrs.field(factory=weakref.WeakSet)
    is_hooked: bool = False


_watching = _Watching()


def _after_step(optimizer: Any, *_: Any) -> None:
    for one in tuple(_watching.all):
        one.after(optimizer)


def say_others(names: list[str]) -> None:
    """Say that a resume does not repeat what these hold, by the names of their classes."""
    for name in names:
        note(
            f"optimizer beside the state: {name}",
            f"what the optimizer {name} holds",
            "it steps, and is not in what is saved, so that it begins as the program makes it",
            "make all optimizers before the resume, and give each, and what it trains, to what is saved",
        )


def _held(saved: Iterable[Any]) -> Iterator[Any]:
    """Yield what is saved, and what it holds in attributes and containers, not within modules, as wrappers do."""
    from torch import Tensor, nn
    from torch.optim.lr_scheduler import LRScheduler

    left = [(item, 0) for item in saved]
    seen: set[int] = set()
    while left and len(seen) < _MAX_OBJECTS:
        item, depth = left.pop(0)
        if id(item) in seen or isinstance(item, (Tensor, nn.Module, LRScheduler, str, bytes, int, float, type)):
            continue
        seen.add(id(item))
        yield item
        if depth < _MAX_DEPTH:
            inner = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple, set)) else ()
            own = getattr(item, "__dict__", None)
            left += [(one, depth + 1) for one in (*inner, *(own.values() if isinstance(own, dict) else ()))]


def _nothing(_: Any) -> None:
    """Do nothing."""
