"""`section(name, gpu=True)`: beside the wall time of a section, which on a GPU is that of launching its work, the
time that the GPU takes for it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from resilience_sdk import lanes
from resilience_sdk.console import say_once
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
        block = self._find().__enter__()
        self._open.append((block, *_begin()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, clock, begin = self._open.pop()
        block.__exit__(kind, error, trace)
        if clock is None or clock is not _clocks.known():
            return  # given up, or the parent's
        try:
            self._measure(clock, begin, is_whole=kind is None)
        except Exception as failure:  # noqa: BLE001 - what CUDA has to say, it says to the user's own calls too
            _clocks.give_up(failure)

    def _measure(self, clock: GpuClock, begin: Event | None, *, is_whole: bool) -> None:
        own = lanes.find_own_block(self._name, "compute") if is_whole else None
        device = None if own is None else own.lane.recorder.on_device(own)
        if device is None:
            clock.give_back(begin)
        else:
            clock.measure(begin, clock.mark(), device.sample)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""
        return lanes.decorate(function, lambda: GpuSection(self._name, self._find))


def _begin() -> tuple[GpuClock | None, Event | None]:
    """Return the clock and a mark made on it now; without a GPU in use, or where that fails, neither."""
    if in_event_loop():
        return None, None  # coroutines share a stream, so an event is nobody's
    try:
        clock = _clocks.mine()
        if clock is None:
            return None, None
        clock.harvest()
        return clock, clock.mark()
    except Exception as failure:  # noqa: BLE001 - the body is to run, and to meet by itself what is wrong
        _clocks.give_up(failure)
        return None, None


class _Clocks(threading.local):
    """The clock of each thread, made when it enters such a section while CUDA is in use.

    A forked child inherits its parent's, with events of a device that it must not touch.
    """

    clock: GpuClock | None = None
    pid = 0
    failed = False

    def known(self) -> GpuClock | None:
        """Return the calling thread's clock, if this process has made it."""
        return self.clock if self.pid == os.getpid() else None

    def mine(self) -> GpuClock | None:
        """Return the calling thread's clock."""
        clock = self.known()
        if clock is None and not self.failed:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                clock = self.clock = cuda_clock()
                self.pid = os.getpid()
        return clock

    def give_up(self, failure: Exception) -> None:
        """Use none any more in this thread, and say why."""
        self.clock, self.failed = None, True
        say_once(
            "gpu sections",
            "section(gpu=True): the time on the GPU is not measured any more, training goes on: "
            f"{type(failure).__name__}: {failure}",
        )


_clocks = _Clocks()
