"""Deferred reads: values on their way to the host, given at one step, read at the next, and waited for by nobody.

On the CPU a value is there at once and is kept until the next call, so that all platforms behave alike. On CUDA it is
copied into pinned memory behind the work that makes it, and read when an event says that the copy is done. Other
devices keep a copy of the value and are read one step late, where the wait for it is short.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs

from resilience_sdk.errors import ConfigError

_MOST_LATE = 16  # steps by which a device may be behind; further ones are left out

Number = float | None
StepNumbers = tuple[int, bool, Number, Number]
"""`(step, is_global, loss, grad_norm)` of one step."""


@attrs.define
class StepValues:
    """The values of one step: numbers, or tensors of another device that hold them."""

    step: int
    is_global: bool
    loss: Any
    grad_norm: Any
    copied: Any = None  # an event, where the numbers are still on their way into `slot`
    slot: int = 0


class DeferredRead:
    """Takes what a step has and gives back what earlier ones had. One thread."""

    def __init__(self) -> None:
        self._waiting: deque[StepValues] = deque()
        self._slots: Any = None
        self._events: list[Any] = []
        self._next = 0
        self.left_out = 0

    @property
    def is_waiting(self) -> bool:
        """Whether values were put that were not read yet."""
        return bool(self._waiting)

    def put(self, step: int, is_global: bool, loss: Any, grad_norm: Any) -> None:
        """Take the values of a step. Never waits; a device that is too far behind has this step left out.

        Raises ConfigError where one is neither a number nor a tensor of one.
        """
        if len(self._waiting) >= _MOST_LATE:
            self.left_out += 1
            return
        loss, grad_norm = prepared(loss, "loss"), prepared(grad_norm, "grad_norm")
        sample = StepValues(step, is_global, loss, grad_norm)
        for place, value in enumerate((loss, grad_norm)):
            if value is not None and type(value) is not float and value.is_cuda:
                self._copy(sample, place, value)
        self._waiting.append(sample)

    def ready(self, *, wait: bool = False) -> list[StepNumbers]:
        """Return the numbers of the steps whose values are there, the oldest first.

        With `wait` those of all: at an end, where nothing is left to be slowed down.
        """
        found = []
        waiting = self._waiting
        while waiting:
            sample = waiting[0]
            if sample.copied is not None and not sample.copied.query():
                if not wait:
                    break
                sample.copied.synchronize()
            waiting.popleft()
            numbers = (self._number(sample, 0, sample.loss), self._number(sample, 1, sample.grad_norm))
            found.append((sample.step, sample.is_global, *numbers))
        return found

    def _copy(self, sample: StepValues, place: int, value: Any) -> None:
        import torch

        if self._slots is None:
            self._slots = torch.empty(_MOST_LATE, 2, dtype=torch.float32, pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(_MOST_LATE)]
        if sample.copied is None:
            sample.slot, self._next = self._next, (self._next + 1) % _MOST_LATE
            sample.copied = self._events[sample.slot]
        self._slots[sample.slot, place].copy_(value.reshape(()), non_blocking=True)
        sample.copied.record(torch.cuda.current_stream(value.device))

    def _number(self, sample: StepValues, place: int, value: Any) -> Number:
        if value is None or type(value) is float:
            return value
        return float(self._slots[sample.slot, place] if sample.copied is not None and value.is_cuda else value)


def prepared(value: Any, name: str) -> Any:
    """Return None, a float, or a tensor of another device that nothing changes any more; raises ConfigError."""
    if value is None or type(value) is float:
        return value
    kind = getattr(getattr(value, "device", None), "type", "cpu")
    try:
        if hasattr(value, "to_local"):
            value = value.detach().to_local()  # this rank's part of a DTensor: the whole would be a collective
        if kind == "cpu":
            return float(value.item() if hasattr(value, "item") else value)
        value = value.detach()
        if value.numel() != 1:
            raise ValueError(f"it has {value.numel()} elements")
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"numerics.check({name}=...): expected a number or a tensor of one element, not {type(value).__name__} "
            f"({error}); pass {name}.mean()"
        ) from None
    return value if kind == "cuda" else value.clone()
