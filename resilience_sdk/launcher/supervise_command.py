"""The command that `resilience supervise` runs: its process group, its end, and what it leaves behind.

It leads a session of its own, so that a signal reaches it once, from us, and everything it started can be found.
If the supervisor is killed, the kernel asks the command to leave.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from resilience_sdk.console import say
from resilience_sdk.errors import ConfigError
from resilience_sdk.hostinfo import process_start_ticks
from resilience_sdk.launcher import sessions
from resilience_sdk.launcher.linux import die_with_parent
from resilience_sdk.launcher.signals import SignalInbox

_LOOK_S = 0.05
_TICK_S = 1.0


class SupervisedCommand:
    """One run of the command. Main thread only."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], inbox: SignalInbox) -> None:
        """Start it.

        Raises:
            ConfigError: There is no such program, or it may not be executed.
        """
        self._inbox = inbox
        self._forwarded = 0  # requests of a person that were passed on
        self.asked_to_leave = False
        try:
            self._process = subprocess.Popen(
                words,
                env=dict(env),
                # Its session has no terminal, so reading from one would fail in odd ways; this fails plainly.
                stdin=subprocess.DEVNULL if _is_terminal() else None,
                start_new_session=True,
                preexec_fn=_leave_with_parent,  # one thread here, and only a system call
            )
        except FileNotFoundError:
            raise ConfigError(f"{words[0]}: command not found; check the words after --") from None
        except OSError as error:
            raise ConfigError(f"{words[0]}: cannot be executed: {error.strerror}; check the words after --") from None
        self._born = process_start_ticks(self._process.pid)

    def wait(self) -> int:
        """Wait for its end, passing on signals; return its exit code, negative for a signal."""
        with contextlib.ExitStack() as stack:
            fds = [self._inbox.wakeup]
            if (pidfd := _pidfd(self._process.pid)) is not None:
                stack.callback(os.close, pidfd)
                fds.append(pidfd)
            while (code := self._process.poll()) is None:
                self._forward()
                select.select(fds, [], [], _TICK_S if pidfd is not None else _LOOK_S)
                self._inbox.drain()
        return code

    def end_rest(self, grace_s: float) -> None:
        """End what is left of its session after it failed: SIGTERM, up to `grace_s` seconds, SIGKILL.

        A wrapper may die at once of a signal while the job inside it still saves.
        """
        pid = self._process.pid
        if not sessions.any_left(pid, self._born):
            return
        say(f"supervise: the command ended, its processes have {grace_s:.0f} s to follow")
        if not self.asked_to_leave:
            self._kill_group(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while sessions.any_left(pid, self._born) and time.monotonic() < deadline:
            self._forward()
            time.sleep(_LOOK_S)
        sessions.kill_members({pid: self._born})

    def _forward(self) -> None:
        """Pass on the first request to leave, and every further one of a person."""
        request = self._inbox.request
        if request is None:
            return
        if not self.asked_to_leave:
            self.asked_to_leave = True
            self._forwarded = self._inbox.interrupts
            say(f"supervise: {request.name}: passed on to the command, which is not run again")
            self._kill_group(request)
        elif self._inbox.interrupts > self._forwarded:
            self._forwarded = self._inbox.interrupts
            self._kill_group(signal.SIGINT)

    def _kill_group(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, number)


def _leave_with_parent() -> None:
    die_with_parent(signal.SIGTERM)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable when the process has ended, where the kernel has such a thing."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _is_terminal() -> bool:
    try:
        return os.isatty(sys.stdin.fileno())
    except (OSError, ValueError, AttributeError):
        return False
