"""A delegate in the place of Megatron's `Timers`: it hears every start and stop, at whatever log level.

A timer of Megatron that is on synchronises with the device, and one that is off is a dummy. Both stay what they are:
this delegate reads the host's clock and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from resilience_sdk.straggler.hooks import Guard

Heard = tuple[Callable[[], None], Callable[[], None] | None]
"""What to call behind the start of a timer, and before its stop, if anything."""


class ObservingTimers:
    """What `config.timers` and `get_timers()` give while it is attached; all but the watched names is `inner`'s own."""

    def __init__(self, inner: Any, heard: dict[str, Heard], guard: Guard) -> None:
        """Delegate to `inner`, which may be None where the loop has no timers. What hears fails by the `guard`."""
        self.inner = inner if inner is not None else _no_timers
        self.plain = inner
        """What to put back."""
        # A method is called at less cost than an object.
        self._own: Callable[..., Any] = inner.__call__ if inner is not None else _no_timers
        self._watched = {name: ObservedTimer(*begins_and_ends, guard) for name, begins_and_ends in heard.items()}

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """Return the timer of that name."""
        own = self._own(name, log_level)
        watched = self._watched.get(name)
        if watched is None:
            return own
        watched.inner = own
        return watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    # A copy of the configuration, perhaps in another process, has Megatron's own timers.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self.plain,)


class ObservedTimer:
    """A timer of Megatron, heard."""

    __slots__ = ("_begins", "_ends", "_guard", "inner")

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None] | None, guard: Guard) -> None:
        self.inner: Any = None
        self._begins, self._ends = begins, ends
        self._guard = guard

    # `Guard.run`, written out: each step has some ten of these and more.

    def start(self, barrier: bool = False) -> None:
        """Start it; what it waits for before does not count."""
        self.inner.start(barrier=barrier)
        if self._guard.is_on:
            try:
                self._begins()
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the training
                self._guard.fail(error)

    def stop(self, barrier: bool = False) -> None:
        """Stop it; what it waits for then does not count."""
        if self._ends is not None and self._guard.is_on:
            try:
                self._ends()
            except Exception as error:  # noqa: BLE001 - as above
                self._guard.fail(error)
        self.inner.stop(barrier=barrier)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _NoTimer:
    """A timer of a loop that has none."""

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""


_NO_TIMER = _NoTimer()


def _itself(timers: Any) -> Any:
    return timers


def _no_timers(_name: str, _log_level: int | None = None) -> _NoTimer:
    return _NO_TIMER
