"""The command that `resilience supervise` runs: its process group, its end, and what it leaves behind.

It leads a session of its own, so that each signal reaches it from us, as often as we got it, and everything it
started can be found. If the supervisor is killed, the kernel asks the command to leave.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
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
from resilience_sdk.settings.parse import signal_name

_LOOK_S = 0.05
_TICK_S = 1.0
_CTRL_C_NOW = 3  # the first asks, the second hurries, the third ends it


def find_program(word: str) -> None:
    """Look for the program of a command, before anything is made for it; raises ConfigError where there is none."""
    if shutil.which(word) is None:
        why = "cannot be executed: no permission" if os.path.exists(word) else "command not found"
        raise ConfigError(f"{word}: {why}; check the words after --")


class SupervisedCommand:
    """One run of the command. Main thread only."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], inbox: SignalInbox, *, patience_s: float) -> None:
        """Start it. `patience_s` is how long it may take to leave, in seconds from the first signal passed on.

        Raises:
            ConfigError: There is no such program, or it may not be executed.
        """
        self._inbox = inbox
        self._patience_s = patience_s
        self._passed_on = 0  # how many of the inbox's signals
        self._until: float | None = None  # on the monotonic clock, once it was asked to leave
        self._killed = False
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

    @property
    def asked_to_leave(self) -> bool:
        """Tell whether a signal was passed on."""
        return self._until is not None

    def wait(self) -> int:
        """Wait for its end, passing on signals; return its exit code, negative for a signal."""
        with contextlib.ExitStack() as stack:
            fds = [self._inbox.wakeup]
            if (pidfd := _pidfd(self._process.pid)) is not None:
                stack.callback(os.close, pidfd)
                fds.append(pidfd)
            while (code := self._process.poll()) is None:
                self._forward()
                if self._is_time_over():
                    self._kill()
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
        while sessions.any_left(pid, self._born) and time.monotonic() < deadline and not self._is_time_over():
            self._forward()
            time.sleep(_LOOK_S)
        sessions.kill_members({pid: self._born})

    def _forward(self) -> None:
        """Pass on every signal that has come since the last look."""
        for number in self._inbox.arrived[self._passed_on :]:
            if self._until is None:
                self._until = time.monotonic() + self._patience_s
                say(
                    f"supervise: {signal_name(number)}: passed on to the command, which is not run again; it has "
                    f"{self._patience_s:.0f} s to leave"
                )
            self._passed_on += 1
            self._kill_group(number)

    def _is_time_over(self) -> bool:
        if self._until is None:
            return False
        return time.monotonic() > self._until or self._inbox.interrupts >= _CTRL_C_NOW

    def _kill(self) -> None:
        """End the command and all that it started, at once."""
        late = self._inbox.interrupts < _CTRL_C_NOW
        if not self._killed:
            say(f"supervise: {f'it has not left within {self._patience_s:.0f} s' if late else 'Ctrl-C'}: SIGKILL")
        self._killed = True
        self._process.kill()
        self._kill_group(signal.SIGKILL)
        sessions.kill_members({self._process.pid: self._born})

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
