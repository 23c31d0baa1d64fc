"""Signals that ask the launcher to leave, turned into something a wait can see.

A handler only notes the request and, through the wakeup descriptor, ends the wait of the main loop at once.
While the launcher sits in code that never looks (a rendezvous that waits for other nodes), it raises instead.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType

from resilience_sdk.settings.parse import signal_number

# What a terminal sends (Ctrl-C, Ctrl-\, closing it) is the user's, all else a scheduler's or an operator's.
_INTERRUPTS = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
# A machine that goes down hangs up its terminals after it has sent SIGTERM; nobody typed that.
_TYPED = _INTERRUPTS - {signal.SIGHUP}


class LeaveRequested(BaseException):
    """Raised in the main thread by a signal that arrives inside `SignalInbox.raising`."""


class SignalInbox:
    """Takes over the given signals for the time of a `with` block. Main thread only.

    `arrived` holds all that asked to leave, in their order. `wakeup` is a descriptor that becomes readable with every
    signal.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Handle the signals of these names (such as `SIGTERM`); names this platform lacks are skipped."""
        numbers = (_number(name) for name in names)
        self._signals = tuple(number for number in numbers if number is not None)
        self._previous: dict[int, object] = {}
        self._raising = False
        self.arrived: list[int] = []
        self.wakeup, self._write_end = os.pipe()  # close on exec, as all that Python opens
        for end in (self.wakeup, self._write_end):
            os.set_blocking(end, False)

    def __enter__(self) -> SignalInbox:
        """Install the handlers."""
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._signals:
            # A launcher started with nohup keeps ignoring the hang-up.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back what was there."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.wakeup)
        os.close(self._write_end)

    def retake(self) -> None:
        """Install the handlers again: elastic replaces them with its own whenever it starts processes."""
        for number in self._previous:
            signal.signal(number, self._handle)

    @property
    def request(self) -> int | None:
        """The first signal that asked to leave."""
        return self.arrived[0] if self.arrived else None

    @property
    def interrupts(self) -> int:
        """How many signals came from a person, so that another Ctrl-C can mean "now"."""
        return sum(number in _INTERRUPTS for number in self.arrived)

    @property
    def interrupted(self) -> bool:
        """Tell whether a person at a terminal asked, first or by typing it after a scheduler had."""
        return self.request in _INTERRUPTS or any(number in _TYPED for number in self.arrived)

    def note(self, number: int) -> None:
        """Record a request that arrived some other way."""
        self.arrived.append(number)

    def sleep(self, seconds: float) -> None:
        """Sleep, but not longer than until the next signal."""
        if self.request is None:
            select.select([self.wakeup], [], [], seconds)

    def drain(self) -> None:
        """Empty the wakeup pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup, 512):
                pass

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Make signals raise `LeaveRequested` inside the block; raise at once when one came before."""
        self._raising = True
        try:
            if self.request is not None:
                raise LeaveRequested
            yield
        finally:
            self._raising = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.note(number)
        if self._raising:
            self._raising = False
            raise LeaveRequested


def _number(name: str) -> int | None:
    try:
        return signal_number(name)
    except ValueError:
        return None
