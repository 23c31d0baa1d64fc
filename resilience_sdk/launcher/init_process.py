"""The first process of a container: what a launcher started as PID 1 needs around it.

PID 1 inherits every orphan of its namespace and has to reap it, and the kernel drops signals for which it has no
handler. A launcher that did both would take the exit codes of its own children away from whoever waits for them,
so the launcher runs in a child instead, and PID 1 does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

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
