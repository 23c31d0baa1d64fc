"""Tries whether what failed works again, and waits until it does. Launcher's main thread; no try outlasts 5 s."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from resilience_sdk.attribution.resource import NAME, PORT, STORAGE, Resource
from resilience_sdk.console import say
from resilience_sdk.events import Event
from resilience_sdk.journal import Journal
from resilience_sdk.launcher.bounded import within

_TRY_S = 5.0  # a mount that hangs blocks whoever touches it
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_BYTES = 1 << 20  # less than any checkpoint, more than what a full disk still takes


def try_resource(resource: Resource, run_dir: Path) -> str | None:
    """Return why the resource still fails, None when it works or nothing can be tried."""
    tries: dict[str, Callable[[], None]] = {
        STORAGE: lambda: _write(_existing(Path(resource.name)) if resource.name else run_dir),
        NAME: lambda: _resolve(resource.name),
        PORT: lambda: _bind(resource.name),
    }
    try:
        within(_TRY_S, tries[resource.kind])
    except (OSError, TimeoutError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def await_resource(
    resource: Resource, run_dir: Path, limit_s: float, sleep: Callable[[float], bool], journal: Journal
) -> bool:
    """Try the resource again and again, less and less often, until it works; return whether it does.

    After `limit_s` seconds, or when `sleep` returns False because somebody wants the launcher to leave, that is
    left to the next attempt.
    """
    began, pause, told = time.monotonic(), _FIRST_PAUSE_S, ""
    while True:
        why = try_resource(resource, run_dir)
        left = limit_s - (time.monotonic() - began)
        if why is None or left <= 0:
            break
        if why != told:
            say(f"waiting for {resource}: {why}")
            told = why
        if not sleep(min(pause, left)):
            break
        pause = min(_LONGEST_PAUSE_S, pause * 2)
    waited_s = time.monotonic() - began
    journal.emit(Event.HEALTH, what=str(resource), ok=why is None, why=why, waited_s=round(waited_s, 3))
    if why is not None and left <= 0:
        say(f"no longer waiting for {resource} after {waited_s:.0f} s ({why}): trying all the same")
    return why is None


def _existing(path: Path) -> Path:
    """Return the nearest directory of a path that is there: what could not be made is missing."""
    return next((place for place in (path, *path.parents) if place.is_dir()), Path("/"))


def _write(directory: Path) -> None:
    with _scratch_file(directory) as fd:
        data = memoryview(os.urandom(_BYTES))  # not zeros: file systems compress
        while data:
            data = data[os.write(fd, data) :]
        os.fsync(fd)


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[int]:
    """Open a file that is removed in any case."""
    fd, name = tempfile.mkstemp(prefix=".resilience-probe-", dir=directory)
    try:
        yield fd
    finally:
        os.close(fd)
        os.unlink(name)


def _resolve(host: str | None) -> None:
    if host is not None:
        socket.getaddrinfo(host, None)


def _bind(port: str | None) -> None:
    if port is not None and 0 < int(port) < 1 << 16:
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(port)))
