"""Signals that ask the launcher to leave, from the first moment to the last.

And what a launcher started as PID 1 needs.

PID 1 inherits every orphan of its namespace and has to reap it, and the kernel drops signals for which it has no
handler. A launcher that did both would take the exit codes of its own children away from whoever waits for them,
so the launcher runs in a child instead, and PID 1 does nothing else.

A handler only notes the request and, through the wakeup descriptor, ends the wait of the main loop at once.
While there is nothing that could be lost (before the ranks start), and in code that never looks (a rendezvous that
waits for other nodes), it raises instead.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import NoReturn

from resilience_sdk.core.early_signals import exit_code_of, has_terminal, is_typed
from resilience_sdk.core.settings.parse import signal_name, signal_number
from resilience_sdk.errors import EXIT_INTERRUPTED


def leave(exit_code: int) -> NoReturn:
    """End the process with that code, after its `atexit` functions, without taking the interpreter down.

    A daemon thread that comes back from a call of torch's store while the interpreter goes down is ended by
    unwinding its C++ frames, which aborts the process: a job that finished would end by SIGABRT. The threads that
    ask the rendezvous cannot be joined for certain, some of them are torch's own.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(exit_code)


HABITS = ("SIGUSR1", "SIGUSR2")
"""What schedulers send by the habit of their users, beside SIGTERM; by default it ends whoever does not handle it."""


class LeaveRequested(BaseException):
    """Raised in the main thread by a signal that arrives inside `SignalInbox.raising`."""


BEFORE_START = "before its ranks started; nothing is lost"
_LAST_RESORT_S = 3.0  # to unwind what a signal has interrupted, before there is anything to lose
_LAST_WORDS_S = 0.5
_MAY_BE_IGNORED = frozenset(
    number for name in ("SIGHUP", "SIGUSR1", "SIGUSR2") if (number := getattr(signal, name, None)) is not None
)


class SignalInbox:
    """Takes over the given signals for the time of a `with` block. Main thread only.

    `arrived` holds all that asked to leave, in their order. `wakeup` is a descriptor that becomes readable with every
    signal. Within `raising` a signal interrupts whatever the main thread does, within `noting` it is kept for later.
    """

    def __init__(self, names: Iterable[str], *, notices: Sequence[str] = ()) -> None:
        """Handle the signals of these names (such as `SIGTERM`); names this platform lacks are skipped.

        A hang-up comes from a person whose terminal is closed, where this process has one; not where the user has
        named it among `notices`, the signals that ask to save and leave.
        """
        numbers = (_number(name) for name in (*names, *notices))
        self._signals = tuple(dict.fromkeys(number for number in numbers if number is not None))
        self._previous: dict[int, object] = {}
        self._ignored: list[int] = []
        self._raising = False
        self._was_raised = threading.Event()
        self._is_settled = threading.Event()
        self._last_resort: threading.Thread | None = None
        self._terminal = "SIGHUP" not in notices and has_terminal()
        self.last_words: Callable[[], None] | None = None
        """What is to be done, in another thread, before a process that does not unwind is ended."""
        self.stage = BEFORE_START
        """Where the job is while signals raise, and what leaving then loses; kept up to date by whoever runs it."""
        self.arrived: list[int] = []
        self.wakeup, self._write_end = os.pipe()  # close on exec, as all that Python opens
        for end in (self.wakeup, self._write_end):
            os.set_blocking(end, False)

    def __enter__(self) -> SignalInbox:
        """Install the handlers."""
        self._previous_wakeup = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in self._signals:
            # A launcher started with nohup keeps ignoring the hang-up, one below a shell's `trap ""` what that ignores.
            if number in _MAY_BE_IGNORED and signal.getsignal(number) is signal.SIG_IGN:
                self._ignored.append(number)
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put back what was there."""
        self._is_settled.set()
        self._was_raised.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.wakeup)
        os.close(self._write_end)

    def retake(self) -> None:
        """Install the handlers again: elastic replaces them with its own whenever it starts processes.

        It does so for what is ignored, too: under `nohup` a closed terminal would end the job.
        """
        for number in self._previous:
            signal.signal(number, self._handle)
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)

    @property
    def request(self) -> int | None:
        """The first signal that asked to leave."""
        return self.arrived[0] if self.arrived else None

    @property
    def name(self) -> str:
        """The name of the first signal, such as `SIGTERM`; only once there is one."""
        return signal_name(self.arrived[0])

    @property
    def interrupts(self) -> int:
        """How many signals came from a person, so that another Ctrl-C can mean "now"."""
        return sum(is_typed(number, terminal=self._terminal) for number in self.arrived)

    @property
    def interrupted(self) -> bool:
        """Tell whether a person at a terminal asked, first or by typing it after a scheduler had."""
        return exit_code_of(self.arrived, terminal=self._terminal) == EXIT_INTERRUPTED

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
    def raising(self, *, ends_process: bool = False) -> Iterator[None]:
        """Make signals raise `LeaveRequested` inside the block; raise at once when one came before.

        `ends_process`: there is nothing to lose yet. Where the exception was swallowed (by an import that catches all)
        or cannot be raised (a call that does not return), the process is ended after some seconds all the same, unless
        `settle` was called or `noting` entered.
        """
        before, self._raising = self._raising, True
        if ends_process and self._last_resort is None:
            self._last_resort = threading.Thread(target=self._see_to_it, name="resilience-leaves", daemon=True)
            self._last_resort.start()
        try:
            if self.request is not None:
                raise LeaveRequested
            yield
        finally:
            self._raising = before and self.request is None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Only note signals inside the block, as there is something that may not be left half done."""
        before = self._raising
        self.only_note()
        try:
            yield
        finally:
            self._raising = before and self.request is None

    def only_note(self) -> None:
        """Only note signals until the block that this is called in ends; raise where one was raised and swallowed."""
        if self._raising and self.request is not None:
            raise LeaveRequested
        self._raising = False
        if self._was_raised.is_set() and not self._is_settled.is_set():
            raise LeaveRequested

    def settle(self) -> None:
        """Note that whoever was interrupted has come back, and leaves."""
        self._is_settled.set()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.note(number)
        if self._raising:
            self._raising = False
            self._was_raised.set()
            raise LeaveRequested

    def _see_to_it(self) -> None:
        self._was_raised.wait()
        if self._is_settled.wait(_LAST_RESORT_S):
            return
        if self.last_words is not None:
            words = threading.Thread(target=self.last_words, daemon=True)
            words.start()
            words.join(_LAST_WORDS_S)
        code = exit_code_of(self.arrived, terminal=self._terminal)
        with contextlib.suppress(OSError):
            os.write(2, f"resilience: {self.name}: left {self.stage} (exit code {code})\n".encode())
        os._exit(code)


def _number(name: str) -> int | None:
    try:
        return signal_number(name)
    except ValueError:
        return None


# Those that tell of a process's own faults, or that nobody can hold back. By name: not every platform has them all.
_OWN = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGKILL", "SIGSTOP")


def below_init(main: Callable[[], int]) -> int:
    """Return `main()`; as PID 1 run it in a child, forward every signal to it, and reap what is orphaned.

    Main thread only, and before there are other threads: a process with PID 1 forks here.
    """
    if os.getpid() != 1:
        return main()
    watched = {number for number in signal.valid_signals() if getattr(number, "name", "") not in _OWN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        _take_terminal()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return main()
    return _serve(child, watched)


def _serve(child: int, watched: set[signal.Signals]) -> int:
    while True:
        # Blocked signals wait here, also those that PID 1 would otherwise not get.
        number = signal.sigwait(watched)
        if number != signal.SIGCHLD:
            with contextlib.suppress(OSError):
                os.kill(child, number)
            continue
        code = _reap(child)
        if code is not None:
            return code


def _reap(child: int) -> int | None:
    """Collect everything that has ended; return the child's exit code (128 + signal) once it is among them."""
    code: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            ended = os.waitstatus_to_exitcode(status)
            code = ended if ended >= 0 else 128 - ended


def _take_terminal() -> None:
    """Lead a process group of its own in the foreground: Ctrl-C then reaches the launcher once, not twice."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.setpgid(0, 0)
        if os.isatty(sys.stdin.fileno()):
            os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())  # SIGTTOU is still blocked
