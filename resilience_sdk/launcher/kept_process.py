"""A process of ours beside the ranks, started by name and kept running, whose failure is nobody's but its own."""

from __future__ import annotations

import contextlib
import math
import select
import subprocess
import time
from collections.abc import Callable

from resilience_sdk import environ
from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.own_program import command_of

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LOOK_MS = 50
OVER = b"over\n"
"""The line that says that the job has ended in order. A pipe that is closed without it: the launcher was killed."""


class KeptProcess:
    """Keeps one helper of a job running. Main thread; never raises, waits only in `close`."""

    def __init__(
        self,
        what: str,
        name: str,
        program: str,
        task: Callable[[], bytes] | None,
        journal: Journal,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """Run the Python code `program` with the line `task` on its standard input; without a task do nothing.

        It serves `what` and is called `name` where it fails; `delay_s` seconds pass before its first start. It has to
        end with the line `over`, or when its standard input does; closing that says that nobody need wait for the rest.
        """
        self._what = what
        self._name = name
        self._program = program
        self._task = task
        self._journal = journal
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = time.monotonic() + delay_s
        self._pause_s = _FIRST_PAUSE_S

    def keep_alive(self) -> None:
        """Start the process where it does not run; one that dies again and again ever more rarely."""
        now = time.monotonic()
        if self._task is None or (self._process is not None and self._process.poll() is None):
            return
        if now < self._not_before:
            return
        if self._process is not None:
            self._tell(f"{self._name} ended with status {self._process.returncode}")
            _hang_up(self._process)
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            self._process = _start(self._program, self._task())
        except OSError as error:
            self._tell(f"{self._name} cannot be started: {error}")

    def close(self, patience_s: float) -> None:
        """Let the process end, and wait for that `patience_s` seconds; one that needs longer goes on by itself."""
        self._task = None
        if self._process is None:
            return
        _say_over(self._process)
        _wait(self._process, patience_s)
        _hang_up(self._process)

    def _tell(self, why: str) -> None:
        if say_once(self._what, f"{self._what}: {why}; it is started again, and the training goes on"):
            self._journal.emit(Event.DEGRADED, what=self._what, why=why)


def _start(program: str, task: bytes) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in environ.environment().items() if not name.startswith(environ.INTERNAL_PREFIX)}
    # A session of its own: what is sent to the launcher's process group (Ctrl-C) is not meant for it.
    process = subprocess.Popen(
        command_of(program), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, start_new_session=True
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(task + b"\n")  # far less than the pipe holds, so this never waits
        process.stdin.flush()
    return process


def _say_over(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError, ValueError):
        if process.stdin is not None:
            process.stdin.write(OVER)  # one line: it fits, unless the process never read its task
            process.stdin.flush()


def _wait(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """Wait until the process has ended, or closed its standard input, or the patience is over."""
    if process.stdin is None or process.stdin.closed or process.poll() is not None:
        return  # closed: the helper has ended, and the next one could not be started
    reader = select.poll()
    reader.register(process.stdin, 0)  # what is left to hear is that nobody reads it any more
    for _ in range(math.ceil(1000 * patience_s / _LOOK_MS)):
        if process.poll() is not None:
            return
        if reader.poll(_LOOK_MS):
            # Its end closes the pipe too, a moment before it can be collected.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_MS / 1000)
            return


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe that the process listens to, which tells it that there is no launcher any more."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
