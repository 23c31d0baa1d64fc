"""`heartbeat()`: one unit of progress. As a block, a decorator, or a single pulse.

`heartbeat` is a plain function with attributes, because calling one costs half of calling an object.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast, overload

from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.blocks import Beat
from resilience_sdk.recorder.lookup import BEATS, NoBlock, TimedBlock, Unstarted

F = TypeVar("F", bound=Callable[..., Any])

_MOST_STEPS = 1 << 62


def _heartbeat(name: str = "step", *, step: int | None = None) -> Beat | NoBlock | Unstarted:
    """Mark one unit of progress: `with heartbeat():` around a step, or `@heartbeat()` on the function of one.

    The block's duration is learned and guarded: a rank that stays in it past its deadline is suspected, and
    its job is called hung when nobody else is to blame. Enter it once per optimizer step. `step` is the global
    step number where the caller knows it; else completed heartbeats of that name are counted.

    Costs well under a microsecond, never blocks and never raises for a reason of its own; safe in threads
    (each has a lane of its own), coroutines, and forked children (where it does nothing until used there).

    Raises ConfigError for a name that is no string and a step that is no int.
    """
    try:
        beat: Beat | NoBlock | Unstarted = BEATS[name]
    except (KeyError, TypeError):
        return cast("Beat | NoBlock | Unstarted", _first(name, step))
    if step is not None:
        return beat.at_step(_checked(step))
    return beat


def _first(name: Any, step: int | None) -> Any:
    if callable(name):  # @heartbeat without parentheses
        return lookup.decorate(name, lambda: lookup.find_beat("step"))
    if not isinstance(name, str) or not name:
        raise ConfigError(f"heartbeat(name=...) takes a string, got {name!r}")
    return Unstarted(name, step=None if step is None else _checked(step))


def _checked(step: Any) -> int:
    """Return a step number that the page can hold."""
    if type(step) is int and 0 <= step < _MOST_STEPS:
        return step
    import numbers

    if not isinstance(step, numbers.Integral):  # numpy's are Integral too; a tensor is not, reading it may wait
        raise ConfigError(
            f"heartbeat(step=...) takes an int, got {step!r}; call .item() on a tensor outside the hot path"
        )
    if not 0 <= int(step) < _MOST_STEPS:
        raise ConfigError(f"heartbeat(step={step}): steps count from 0")
    return int(step)


def beat(step: int | None = None) -> None:
    """Mark the end of a step; the time since the previous pulse of this thread is one unit.

    For loops where no block fits: last in their body. `step` is the number of the step that ends here. After the loop
    comes `heartbeat.done()`: without it, the time after the last pulse looks like a step that does not end. Raises
    ConfigError for a step that is no int from 0.
    """
    recorder = lookup.recorder()
    if recorder is not None:
        recorder.user_beats()
        recorder.pulse(None if step is None else _checked(step))


@contextmanager
def paused(reason: str) -> Iterator[None]:
    """Suspend all deadlines of this rank inside the block, for a wait that may take any time. Nests."""
    recorder = lookup.recorder()
    if recorder is None:
        yield
        return
    recorder.pause(str(reason))
    start = time.monotonic_ns()
    try:
        yield
    finally:
        recorder.resume(time.monotonic_ns() - start)


def done() -> None:
    """End all deadlines of this rank: the loop is over, what follows (upload, export) may take any time."""
    recorder = lookup.recorder()
    if recorder is not None:
        recorder.done()


class _Heartbeat(Protocol):
    """The type of `heartbeat`: a function that carries the other verbs."""

    @overload
    def __call__(self, name: F, /) -> F: ...
    @overload
    def __call__(self, name: str = "step", *, step: int | None = None) -> TimedBlock: ...
    @staticmethod
    def beat(step: int | None = None) -> None:
        """See `beat`."""

    @staticmethod
    def paused(reason: str) -> Any:
        """See `paused`."""

    @staticmethod
    def done() -> None:
        """See `done`."""


heartbeat = cast(_Heartbeat, _heartbeat)
heartbeat.beat = beat  # type: ignore[method-assign]
heartbeat.paused = paused  # type: ignore[method-assign]
heartbeat.done = done  # type: ignore[method-assign]
_heartbeat.__name__ = _heartbeat.__qualname__ = "heartbeat"
