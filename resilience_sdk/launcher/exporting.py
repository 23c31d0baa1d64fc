"""Telemetry while ranks run: one exporter process on this node, kept running, where the settings name a sink.

A process of its own and started by name, because the libraries of the sinks must neither cost the launcher memory nor
be able to hurt it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resilience_sdk import environ
from resilience_sdk.console import say_once
from resilience_sdk.events import Event
from resilience_sdk.hostinfo import process_start_ticks
from resilience_sdk.journal import Journal
from resilience_sdk.settings import Settings

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_DELIVERY_S = 2.0  # healthy sinks take milliseconds; for one that is dead nobody waits longer
# Without the current directory on the path, where a user may have a `wandb/`; last, where our package lies.
_PROGRAM = (
    "import os, sys; sys.path[0:1] = []; sys.path.append(sys.argv[1]); "
    "from resilience_sdk.telemetry.__main__ import main; os._exit(main(['--from-launcher']))"
)


class Exporter:
    """Keeps the exporter of one job running. Main thread; never raises, waits only in `close`."""

    def __init__(self, run_dir: Path, job: str, settings: Settings, pages: Path | None, journal: Journal) -> None:
        """Export the run in `run_dir`; does nothing where no sink is asked for, or the SDK is disabled."""
        wanted = settings.asks_for_telemetry and not environ.is_disabled(environ.environment())
        self._task = _task(run_dir, job, settings, pages) if wanted else None
        self._journal = journal
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = float("-inf")
        self._pause_s = _FIRST_PAUSE_S

    def keep_alive(self) -> None:
        """Start the exporter where it does not run; one that dies again and again ever more rarely."""
        now = time.monotonic()
        if self._task is None or (self._process is not None and self._process.poll() is None):
            return
        if now < self._not_before:
            return
        if self._process is not None:
            self._tell(f"the exporter ended with status {self._process.returncode}")
            _hang_up(self._process)
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            self._process = _start(self._task)
        except OSError as error:
            self._tell(f"the exporter cannot be started: {error}")

    def close(self) -> None:
        """Let the sinks take what is left, for a moment; an exporter that needs longer goes on by itself."""
        self._task = None
        if self._process is None:
            return
        _hang_up(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DELIVERY_S)

    def _tell(self, why: str) -> None:
        if say_once("telemetry", f"telemetry: {why}; it is started again, and the training goes on"):
            self._journal.emit(Event.DEGRADED, what="telemetry", why=why)


def _task(run_dir: Path, job: str, settings: Settings, pages: Path | None) -> bytes:
    """Return what `resilience_sdk.telemetry.exporter.Task` reads."""
    pid = os.getpid()
    task: dict[str, Any] = {
        "run_dir": str(run_dir),
        "job": job,
        "settings": settings.to_json(),
        "pages": None if pages is None else str(pages),
        "parent_pid": pid,
        "parent_ticks": process_start_ticks(pid),
    }
    return json.dumps(task).encode() + b"\n"


def _start(task: bytes) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    command: Sequence[str] = [sys.executable, "-c", _PROGRAM, root]
    env = {name: value for name, value in environ.environment().items() if not name.startswith(environ.INTERNAL_PREFIX)}
    # A session of its own: what is sent to the launcher's process group (Ctrl-C) is not meant for it.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=env, start_new_session=True
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(task)  # far less than the pipe holds, so this never waits
        process.stdin.flush()
    return process


def _hang_up(process: subprocess.Popen[bytes]) -> None:
    """Close the pipe that the exporter listens to, which tells it that the job is over."""
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
