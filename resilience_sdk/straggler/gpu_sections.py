"""`section(name, gpu=True)`: beside the wall time of a section, which on a GPU is that of launching its work, the
time that the GPU takes for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from resilience_sdk import lanes
from resilience_sdk.lanes import AnyBlock
from resilience_sdk.lanes.coroutines import in_event_loop
from resilience_sdk.straggler.gpu_events import Event, GpuClock, cuda_clock

F = TypeVar("F", bound=Callable[..., Any])


class GpuSection:
    """A section with events at its ends; where CUDA is not in use it is the plain section."""

    def __init__(self, name: str, find: Callable[[], AnyBlock]) -> None:
        """`find` returns the plain section of that name."""
        self._name = name
        self._find = find
        self._open: list[tuple[AnyBlock, GpuClock | None, Event | None]] = []

    def __enter__(self) -> GpuSection:
        clock = None if in_event_loop() else _clocks.mine()  # coroutines share a stream, so an event is nobody's
        block = self._find().__enter__()
        if clock is not None:
            clock.harvest()
        self._open.append((block, clock, None if clock is None else clock.mark()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, clock, begin = self._open.pop()
        block.__exit__(kind, error, trace)
        if clock is None:
            return
        own = lanes.find_own_block(self._name, "compute") if kind is None else None
        if own is None:
            clock.give_back(begin)
        else:
            clock.measure(begin, clock.mark(), own.lane.recorder.on_device(own).sample)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""
        return lanes.decorate(function, lambda: GpuSection(self._name, self._find))


class _Clocks(threading.local):
    """The clock of each thread, made when it enters such a section while CUDA is in use."""

    clock: GpuClock | None = None

    def mine(self) -> GpuClock | None:
        """Return the calling thread's clock."""
        if self.clock is None:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                self.clock = cuda_clock()
        return self.clock


_clocks = _Clocks()
