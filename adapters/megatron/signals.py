"""The agreed stop, in the place of Megatron-LM's signal handler: no collective per step, and all of our sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilience_sdk import preemption
from resilience_sdk.preemption import rank as listening


class AgreedSignals:
    """What `get_signal_handler()` gives: Megatron-LM asks it once behind each iteration, on all ranks.

    Its own handler gathers the answers of all ranks each time; here they have agreed on a step before.
    """

    def __init__(self, plain: Any, should_stop: Callable[[], bool]) -> None:
        """Take the place of `plain`, which may be None."""
        self.plain = plain
        self.has_agreed = False
        """Whether all ranks have agreed to leave, and Megatron was told."""
        self._should_stop = should_stop
        preemption.time_left()  # before a loader forks workers, which would take the signals as theirs
        number = getattr(plain, "sig", None)
        if number is not None:  # else chained, Megatron's handler would only store the signal
            listening.take_over({int(number): getattr(plain, "original_handler", None)})

    def signals_received(self) -> list[bool]:
        """Tell whether to save and leave: True on all ranks at the same iteration."""
        self.has_agreed = self.has_agreed or self._should_stop()
        return [self.has_agreed]

    def release(self) -> bool:
        """Give Megatron's own handler its signal back, as its `release` does."""
        return bool(self.plain.release()) if self.plain is not None else False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)
