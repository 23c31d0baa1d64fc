"""The handlers of a rank: they store a word, and let a teardown be what it was without them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from resilience_sdk.core import environ
from resilience_sdk.core.plain_file import read_bytes
from resilience_sdk.preemption.agreement import TEARDOWN
from resilience_sdk.recorder import page_layout as at
from resilience_sdk.system.procfs import has_signal, status_fields

_LEAVING = ("preemption",)
_WORD_BITS = 64
_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")


class Handlers:
    """Takes the given signals from the first check on. Main thread only, but for `note` and `see`."""

    def __init__(self, words: Any, pages: Path, attempt: int, numbers: Sequence[int]) -> None:
        """Prepare; nothing is installed yet."""
        self._words = words
        self._ending = pages / f"ending-{attempt}.json"
        self.numbers = self._settled = tuple(numbers)
        self._previous: dict[int, Any] = {}
        self._wakeup = -1
        self._mask: set[int] | set[signal.Signals] = set()
        self._habits: set[int] = set()
        self.noted_at: float | None = None
        """Monotonic seconds of the first notice."""
        self._heard: tuple[int, float] | None = None  # the first signal, and when

    def install(self) -> None:
        """Install the handlers, where this is the main thread; signals that are ignored stay so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.numbers:
            previous = signal.getsignal(number)
            if previous is not None and previous is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        for number in _HABITS:
            if number not in self.numbers and _would_end_us(number):
                self._previous[number] = signal.signal(number, self._handle)
                self._habits.add(number)
        self.numbers = self._settled = (*self.numbers, *sorted(self._habits))
        self._publish()

    def take_over(self, behind: Mapping[int, Any], also: Sequence[int] = ()) -> None:
        """Put our handlers in the place of a framework's; `behind` has what was there before it, by number.

        `also`: signals that are taken from now on too.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self.numbers = tuple(dict.fromkeys((*self.numbers, *also)))
        for number in self.numbers:
            if number in self._habits and signal.getsignal(number) != self._handle:
                continue  # somebody has made it his own
            previous = behind.get(number, signal.getsignal(number))
            if previous is None or previous is signal.SIG_IGN:
                continue
            if previous != self._handle:
                self._previous[number] = previous
            signal.signal(number, self._handle)
        self._publish()

    def are_in_place(self) -> bool:
        """Tell whether a signal of ours is heard here now."""
        return any(signal.getsignal(number) == self._handle for number in self.numbers)

    def give_back(self, *, all_of_them: bool) -> None:
        """Put back what was there before ours, where it is still ours.

        All of them, or those alone that a `take_over` has named.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self.numbers if all_of_them else set(self.numbers) - set(self._settled):
            previous = self._previous.pop(number, None)
            if previous is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, previous)
        self.numbers = self._settled
        self._publish()

    def _publish(self) -> None:
        """Say on the page which signals are heard here: whoever asks this rank to leave sends another one else."""
        heard = {number for number in self.numbers if signal.getsignal(number) == self._handle}
        self._words[at.W_HEARS] = sum(1 << number for number in heard if number < _WORD_BITS)

    def take_wakeup(self, descriptor: int) -> None:
        """Have each signal written to `descriptor` at once, even while the main thread is in C; never steals it."""
        if not self._previous or threading.current_thread() is not threading.main_thread():
            return
        before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)  # an event loop's
        else:
            self._wakeup = descriptor

    def uninstall(self) -> None:
        """Put back what was there, where it is still ours: a child of fork must hear the signals of its parent."""
        with contextlib.suppress(ValueError):  # not in the main thread, so nothing was installed by it
            for number, previous in self._previous.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, previous)
            if self._wakeup != -1 and (now := signal.set_wakeup_fd(-1)) != self._wakeup:
                signal.set_wakeup_fd(now)
        self._previous = {}

    def hold(self) -> None:
        """Keep the signals back while this thread forks: one for the child must not meet its parent's handler."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)

    def release(self) -> None:
        """Let them through again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def become_child(self) -> None:
        """Put the signals back in a forked child, and then let those through that it was sent meanwhile."""
        self.uninstall()
        if not (hasattr(signal, "sigwaitinfo") and _is_loader_worker()):
            self.release()
            return
        threading.Thread(target=_hear_parent, args=(self.numbers, os.getppid()), daemon=True).start()

    def note(self, number: int) -> None:
        """Publish that this rank was asked to leave. Any thread."""
        if self.noted_at is None:
            self.noted_at = time.monotonic()
        if not self._words[at.W_NOTICE]:
            self._words[at.W_NOTICE] = number

    @property
    def heard(self) -> int | None:
        """The number of the first signal."""
        return None if self._heard is None else self._heard[0]

    @property
    def heard_at(self) -> float | None:
        """Monotonic seconds of the first signal."""
        return None if self._heard is None else self._heard[1]

    def overdue(self, grace_s: float) -> int | None:
        """Return the signal that was heard more than `grace_s` seconds ago and would have ended this process."""
        number, heard_at = self._heard or (0, 0.0)
        is_late = bool(number) and time.monotonic() - heard_at > grace_s
        return number if is_late and self._previous.get(number) is signal.SIG_DFL else None

    def see(self, numbers: bytes) -> None:
        """Take bytes of the wakeup descriptor, in the helper thread: the handler may be seconds late."""
        for number in self._previous:
            if number in numbers:
                if self._is_teardown():
                    self.act_by_default(number)
                self._hear(number)

    def act_by_default(self, number: int | None = None) -> None:
        """Do what a signal would have done without us: it was part of a teardown. Any thread.

        Without a number that is the first one that was heard; the notice on the page may be none, but a request.
        """
        if number is None and self._heard is not None:
            number = self._heard[0]
        if number is not None and self._previous.get(number) is signal.SIG_DFL:
            end_by(number)

    def _hear(self, number: int) -> None:
        self.note(number)
        if self._heard is None:
            self._heard = number, time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._hear(number)
        if self._is_teardown():
            self.act_by_default(number)
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _is_teardown(self) -> bool:
        """Tell whether whoever signals ends an attempt that failed: our launcher writes that before it signals."""
        if self._words[at.W_CONTROL] == TEARDOWN:
            return True
        try:
            return json.loads(read_bytes(self._ending)).get("reason") not in _LEAVING
        except (OSError, ValueError, AttributeError):
            return False


_HABITS = tuple(
    number for name in ("SIGUSR1", "SIGUSR2", "SIGHUP") if (number := getattr(signal, name, None)) is not None
)
_OF_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


def _would_end_us(number: int) -> bool:
    """Tell whether a signal that schedulers send by habit would end this process: nobody has a use of his own for it.

    A handler in C, as of `faulthandler.register`, is not Python's to see. And Lightning requeues a job of Slurm by
    SIGUSR1, for which it installs its handler when training begins, unless there is one.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    if has_signal(status_fields(os.getpid()).get("SigCgt"), number):
        return False
    is_lightnings = number == getattr(signal, "SIGUSR1", None) and any(name in sys.modules for name in _OF_LIGHTNING)
    return not (is_lightnings and "SLURM_JOB_ID" in environ.environment())


def _is_loader_worker() -> bool:
    """Tell whether a DataLoader has just forked this process.

    Such a worker hears our signals from its rank only, which still needs its data to stop: whoever signals a whole
    process tree would else have the worker die first, and the rank by that. A thread takes the blocked signals, and
    lets those of the parent (`Process.terminate()`) end the worker as ever, which torch has end with 0 on SIGTERM.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_LOADER):
            return True
        frame = frame.f_back
    return False


def _hear_parent(numbers: Sequence[int], parent: int) -> None:
    while True:
        heard = signal.sigwaitinfo(numbers)
        is_terminated = heard.si_pid == parent and heard.si_signo == signal.SIGTERM
        if is_terminated and has_signal(status_fields(os.getpid()).get("SigCgt"), signal.SIGTERM):
            # What torch's handler does in a worker. A rank that ends with persistent workers terminates them, and
            # prints an error for each that has died of a signal.
            os._exit(0)
        if heard.si_pid in (parent, os.getpid()):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            end_by(heard.si_signo)


def end_by(number: int) -> None:
    """Let the kernel end this process by a signal; the interpreter changes dispositions in its main thread only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
