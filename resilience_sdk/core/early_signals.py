"""Signals that ask a program of ours to leave before it has anything to lose: it leaves at once, with the right code.

By default they would end it by themselves, which tells a scheduler of a failure. Imported first, so it loads nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from types import FrameType

from resilience_sdk.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

ASKS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT")
"""What asks a launcher to leave, by whatever habit of schedulers and terminals; each but the last two ends a process
by default."""
_TYPED = frozenset({signal.SIGINT, getattr(signal, "SIGQUIT", signal.SIGINT)})
# A machine that goes down hangs up its terminals after it has sent SIGTERM; nobody typed that.


@contextlib.contextmanager
def leaving_at_once(*names: str) -> Iterator[None]:
    """Let the signals of these names (default: all that ask) end the process while nobody else handles them.

    With 75, or 130 where a person at a terminal sends them; after `job_is_over`, also behind the block, with the code
    that was given there. Main thread only. No exception: the imports that it would be raised in may catch it.
    """
    global _has_begun, _exit_code
    taken: dict[int, object] = {}
    for name in names or ASKS:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            taken[number] = signal.signal(number, _leave)
    if taken:  # the outermost block: what an earlier one has noted is over
        _has_begun, _exit_code = False, None
        atexit.register(_ignore_from_here_on)  # before anybody else does, so it is called last
    try:
        yield
    finally:
        for number, before in taken.items():
            if _exit_code is None and signal.getsignal(number) is _leave:
                signal.signal(number, before)  # type: ignore[arg-type]


def has_terminal() -> bool:
    """Tell whether this process has a controlling terminal, whose end would hang it up."""
    try:
        with open("/proc/self/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[4] != b"0"
    except (OSError, IndexError):
        return True


def is_typed(number: int, *, terminal: bool) -> bool:
    """Tell whether a signal comes from a person at a terminal; `terminal`: whether this process began with one."""
    return number in _TYPED or (number == getattr(signal, "SIGHUP", None) and terminal)


def exit_code_of(numbers: Sequence[int], *, terminal: bool) -> int:
    """Return the exit code of a program that these signals have asked to leave, in their order."""
    first = bool(numbers) and is_typed(numbers[0], terminal=terminal)
    return EXIT_INTERRUPTED if first or not _TYPED.isdisjoint(numbers) else EXIT_PREEMPTED


_has_begun = False
_exit_code: int | None = None


def job_has_begun() -> None:
    """Note that from here on somebody else handles signals; what comes after that has ended changes no exit code."""
    global _has_begun
    _has_begun = True


def job_is_over(code: int) -> int:
    """Note the exit code of a job that has begun and is over, and return it.

    The interpreter takes seconds to go down once torch is loaded: a signal in that time ends the process at once, with
    this code.
    """
    global _exit_code
    if _has_begun:
        _exit_code = code
    return code


def _ignore_from_here_on() -> None:
    """Ignore signals where the exit code is known: the interpreter gives up its handlers before its modules."""
    for number, handler in ((number, signal.getsignal(number)) for number in signal.valid_signals()):
        if _exit_code is not None and handler is _leave:
            signal.signal(number, signal.SIG_IGN)


def _leave(number: int, frame: FrameType | None) -> None:
    if _exit_code is not None:
        os._exit(_exit_code)
    if _has_begun:
        return
    code = exit_code_of([number], terminal=has_terminal())
    who = "interrupted" if code == EXIT_INTERRUPTED else "asked to leave"
    name = signal.Signals(number).name
    text = f"resilience: {who} by {name} before the job began; nothing is lost (exit code {code})\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(code)
