"""`section()` and `iterate()`: timed parts of a step, on the wall clock and on the GPU."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from resilience_sdk.core.console import say_once
from resilience_sdk.errors import ConfigError
from resilience_sdk.recorder import lookup
from resilience_sdk.recorder.blocks import Block, in_event_loop
from resilience_sdk.recorder.lookup import BLOCKS, TimedBlock, Unstarted
from resilience_sdk.straggler.gpu import Cuda, GpuClock, GpuEvent

F = TypeVar("F", bound=Callable[..., Any])


class GpuSection:
    """A section with events at its ends; where CUDA is not in use it is the plain section."""

    def __init__(self, name: str, kind: str, timeout: float | None) -> None:
        self._name = name
        self._kind = kind
        self._timeout = timeout
        self._open: list[tuple[TimedBlock, GpuClock | None, GpuEvent | None]] = []

    def __enter__(self) -> GpuSection:
        block = section(self._name, kind=self._kind, timeout=self._timeout).__enter__()
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

    def _measure(self, clock: GpuClock, begin: GpuEvent | None, *, is_whole: bool) -> None:
        own = lookup.find_own_block(self._name, "compute") if is_whole else None
        is_inner = own is not None and own.t0 != 0  # a part of the pass of the same name that is still open
        device = None if own is None or is_inner else own.lane.recorder.on_device(own)
        if device is None:
            clock.give_back(begin)
        else:
            clock.measure(begin, clock.mark(), device)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""
        return lookup.decorate(function, lambda: GpuSection(self._name, self._kind, self._timeout))


def _begin() -> tuple[GpuClock | None, GpuEvent | None]:
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
                clock = self.clock = GpuClock(Cuda())
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


T = TypeVar("T")

KINDS = ("compute", "comm", "io", "idle")


@overload
def section(name: F, /) -> F: ...
@overload
def section(
    name: str, *, kind: str = "compute", timeout: float | None = None, gpu: Literal[False] = False
) -> TimedBlock: ...
@overload
def section(name: str, *, kind: str = "compute", timeout: float | None = None, gpu: Literal[True]) -> GpuSection: ...
def section(name: Any, *, kind: str = "compute", timeout: float | None = None, gpu: bool = False) -> Any:
    """Time a part of the step: `with section("fwd"):`, or `@section("fwd")` on a function.

    `kind` says what the time is spent on: `compute`, `comm`, `io` or `idle`. `timeout` is the deadline of one
    pass in seconds; None means one that is learned. Costs about a microsecond, never blocks; safe in threads,
    coroutines (timed, not guarded) and forked children (where it does nothing).

    On a GPU the wall time is that of launching the work. `gpu=True` records two events around it, which costs some
    microseconds, and beside the wall time collects what the GPU took, without waiting for it.

    Raises ConfigError for an unknown kind, a timeout that is not above zero, and a name that is no string.
    """
    if gpu:
        _check(name, kind, timeout)
        return GpuSection(name, kind, timeout)
    try:
        block = BLOCKS[name]
    except (KeyError, TypeError):
        return _first(name, kind, timeout)
    if timeout != block.timeout and isinstance(block, Block):
        _check(name, kind, timeout)
        block.lane.recorder.retime(block, timeout)
    return block


def _first(name: Any, kind: str, timeout: float | None) -> Any:
    if callable(name):  # @section without parentheses: the function names the section
        own_name = name.__name__
        return lookup.decorate(name, lambda: lookup.find_block(own_name, kind, timeout))
    _check(name, kind, timeout)
    return Unstarted(name, kind, timeout)


def _check(name: Any, kind: str, timeout: float | None) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"section(name) takes a string, got {name!r}")
    if kind not in KINDS:
        raise ConfigError(f"section({name!r}, kind={kind!r}): kind is one of {', '.join(KINDS)}")
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise ConfigError(f"section({name!r}, timeout={timeout!r}): timeout is seconds above zero, or None to learn it")


def iterate(loader: Iterable[T]) -> Iterator[T]:
    """Yield from `loader`, timing each wait for it as section `data` (kind `io`)."""
    batches = iter(loader)
    while True:
        with section("data", kind="io"):
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
