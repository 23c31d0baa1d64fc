"""Time on the GPU by events: recorded in the stream, read late, never waited for.

An event costs a microsecond or two to record and is reached by the device when the work before it is done. So a
duration is known some steps later, and is taken then, when `query()` says so without a wait. Events are reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs

_MOST_EVENTS = 8192
_NANO_PER_MILLI = 1_000_000


class Event(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put the event into the current stream."""

    def query(self) -> bool:
        """Tell, without waiting, whether the device has come to it."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to `end`."""
        ...


@attrs.define(eq=False)
class Hole:
    """A stretch within or before what is measured. It is shorter, or ends earlier, so it is known first."""

    ns: int = 0

    def know(self, ns: int) -> None:
        """Take its length."""
        self.ns = ns


@attrs.frozen
class _Pending:
    begin: Event
    end: Event
    holes: tuple[Hole, ...]
    adds_holes: bool
    done: Callable[[int], None]


class GpuClock:
    """Marks moments in the stream of one device and hands the durations between them out when they are known.

    One thread at a time: the one that trains, or those of autograd while it waits for them.
    """

    def __init__(self, new_event: Callable[[], Event], is_capturing: Callable[[], bool] = lambda: False) -> None:
        """Make events with `new_event()`; none is recorded while `is_capturing()`: a graph would replay it."""
        self._new_event = new_event
        self._is_capturing = is_capturing
        self._free: list[Event] = []
        self._made = 0
        self._pending: deque[_Pending] = deque()
        self.lost = 0
        """Moments that were not marked, because the device is too far behind or a graph is captured."""

    def mark(self) -> Event | None:
        """Record an event here and return it; None where none can be."""
        if self._is_capturing() or not (self._free or self._made < _MOST_EVENTS):
            self.lost += 1
            return None
        if not self._free:
            self._made += 1
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def give_back(self, *events: Event | None) -> None:
        """Take events back that no duration will be made of."""
        self._free += [event for event in events if event is not None]

    def measure(
        self,
        begin: Event | None,
        end: Event | None,
        done: Callable[[int], None],
        *,
        holes: Sequence[Hole] = (),
        add_holes: bool = False,
    ) -> None:
        """Call `done(nanoseconds)` from a later `harvest`, when the device has come to `end`.

        `holes` are stretches that have ended by now. They are subtracted, or added with `add_holes`.
        """
        if begin is None or end is None:
            self.give_back(begin, end)
            return
        self._pending.append(_Pending(begin, end, tuple(holes), add_holes, done))

    def hole(self, begin: Event | None) -> Hole:
        """End a stretch here that began at `begin`, for the `measure` of what contains or follows it."""
        hole = Hole()
        self.measure(begin, self.mark(), hole.know)
        return hole

    def harvest(self) -> None:
        """Hand out what is known by now, in order."""
        while self._pending and self._pending[0].end.query():
            pending = self._pending.popleft()
            took_ns = round(pending.begin.elapsed_time(pending.end) * _NANO_PER_MILLI)
            inside_ns = sum(hole.ns for hole in pending.holes)
            self.give_back(pending.begin, pending.end)
            pending.done(max(0, took_ns + (inside_ns if pending.adds_holes else -inside_ns)))


def gpu_clock(model: Any) -> GpuClock | None:
    """Return a clock for the device of a model's parameters, or None where that is no CUDA device."""
    parameter = next(iter(model.parameters()), None)
    return cuda_clock() if parameter is not None and parameter.device.type == "cuda" else None


def cuda_clock() -> GpuClock:
    """Return a clock for the streams of CUDA; its events go into the stream that is current where they are recorded."""
    import torch

    return GpuClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)
