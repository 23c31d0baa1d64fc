"""Time on the GPU by events: recorded in the stream, read late, never waited for.

An event costs a microsecond or two to record and is reached by the device when the work before it is done. So a
duration is known some steps later, and is taken then, when `query()` says so without a wait. Events are reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

_MOST_EVENTS = 8192
_NANO_PER_MILLI = 1_000_000


class GpuEvent(Protocol):
    """What is used of `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Put the event into the current stream."""

    def query(self) -> bool:
        """Tell, without waiting, whether the device has come to it."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to `end`."""
        ...


class Cuda:
    """The streams of CUDA; an event goes into the stream that is current where it is recorded."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda

    def event(self) -> GpuEvent:
        """Return a new event."""
        event: GpuEvent = self._cuda.Event(enable_timing=True)
        return event

    def is_capturing(self) -> bool:
        """Tell whether the current stream is captured: a graph would replay an event."""
        return bool(self._cuda.is_current_stream_capturing())


class Sampled(Protocol):
    """Takes a duration when it is known: a block of the page, or a hole."""

    def sample(self, ns: int) -> None:
        """Take it."""


@attrs.define(eq=False)
class Hole:
    """A stretch within or before what is measured. It is shorter, or ends earlier, so it is known first."""

    ns: int = 0

    def sample(self, ns: int) -> None:
        """Take its length."""
        self.ns = ns


@attrs.frozen
class _Pending:
    begin: GpuEvent
    end: GpuEvent
    holes: Sequence[Hole]
    adds_holes: bool
    timed: Sampled


class GpuClock:
    """Marks moments in the stream of one device and hands the durations between them out when they are known.

    One thread at a time: the one that trains, or those of autograd while it waits for them.
    """

    def __init__(self, device: Cuda) -> None:
        """Record events of `device`; none while a graph is captured."""
        self._device = device
        self._free: list[GpuEvent] = []
        self._made = 0
        self._pending: deque[_Pending] = deque()

    def mark(self) -> GpuEvent | None:
        """Record an event here and return it; None where none can be: a graph is captured, or the device far behind."""
        if self._device.is_capturing() or not (self._free or self._made < _MOST_EVENTS):
            return None
        if self._free:
            event = self._free.pop()
        else:
            self._made += 1
            event = self._device.event()
        event.record()
        return event

    def give_back(self, *events: GpuEvent | None) -> None:
        """Take events back that no duration will be made of."""
        self._free += [event for event in events if event is not None]

    def measure(
        self,
        begin: GpuEvent | None,
        end: GpuEvent | None,
        timed: Sampled,
        *,
        holes: Sequence[Hole] = (),
        add_holes: bool = False,
    ) -> None:
        """Give `timed` its nanoseconds in a later `harvest`, when the device has come to `end`.

        `holes` are stretches that have ended by now. They are subtracted, or added with `add_holes`.
        """
        if begin is None or end is None:
            self.give_back(begin, end)
        else:
            self._pending.append(_Pending(begin, end, holes, add_holes, timed))

    def hole(self, begin: GpuEvent | None) -> Hole:
        """End a stretch here that began at `begin`, for the `measure` of what contains or follows it."""
        hole = Hole()
        self.measure(begin, self.mark(), hole)
        return hole

    def harvest(self) -> None:
        """Hand out what is known by now, in order."""
        while self._pending and self._pending[0].end.query():
            pending = self._pending.popleft()
            took_ns = round(pending.begin.elapsed_time(pending.end) * _NANO_PER_MILLI)
            inside_ns = sum(hole.ns for hole in pending.holes)
            self.give_back(pending.begin, pending.end)
            pending.timed.sample(max(0, took_ns + (inside_ns if pending.adds_holes else -inside_ns)))


def gpu_clock(model: Any) -> GpuClock | None:
    """Return a clock for the device of a model's parameters, or None where that is no CUDA device."""
    parameter = next(iter(model.parameters()), None)
    return GpuClock(Cuda()) if parameter is not None and parameter.device.type == "cuda" else None
