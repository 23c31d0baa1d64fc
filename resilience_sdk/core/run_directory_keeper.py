"""The run directory while a job runs: made again where somebody removes it, and waited for where its mount is gone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from resilience_sdk.core.console import say
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.system import same_device

_LOOK_EVERY_S = 0.5


class RunDirectoryKeeper:
    """A thread that looks twice a second: the main one may wait for minutes, and a mount that hangs holds this one."""

    def __init__(self, run_dir: RunDirectory, journal: Journal, *, group_readable: bool) -> None:
        """Keep `run_dir`, which is there, where it is now; the `journal` is told what happens to it."""
        self.problem: str | None = None
        """Why it cannot be used now, None where it can."""
        self._run_dir = run_dir
        self._journal = journal
        self._group_readable = group_readable
        self._parts = (run_dir.path, run_dir.journal, run_dir.incidents, run_dir.checkpoints)
        self._links = {path: os.readlink(path) for path in self._parts[1:] if path.is_symlink()}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="resilience-run-dir", daemon=True)
        same_device.remember(run_dir.path)
        self._thread.start()

    def close(self) -> None:
        """Stop. A thread that a mount holds is left behind."""
        self._over.set()
        self._thread.join(_LOOK_EVERY_S)

    def look(self) -> None:
        """Look once, make again what is missing, and report what is new."""
        with self._lock:
            try:
                same_device.check(self._run_dir.path)
                if all(path.is_dir() for path in self._parts):
                    self._is_usable()
                    return
                self._make_again()
            except OSError as error:
                where = f"{error.strerror or error} ({error.filename})" if error.filename else str(error)
                self._is_lost(where)
            except RunDirectoryError as error:
                self._is_lost(str(error))

    def wait(self, sleep: Callable[[float], bool], limit_s: float, pause_s: float = 1.0) -> str | None:
        """Wait until the directory can be used; return why it cannot after `limit_s`, or when `sleep` returns False."""
        self.look()
        if self.problem is not None:
            say(f"waiting for the run directory, for up to {limit_s:.0f} s: {self.problem}")
        while self.problem is not None and limit_s > 0 and sleep(min(pause_s, limit_s)):
            limit_s -= pause_s
            self.look()
        return self.problem

    def _keep(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look()

    def _make_again(self) -> None:
        was_there = self._run_dir.path.is_dir()
        for path, target in self._links.items():
            if was_there and not os.path.lexists(path):
                os.symlink(target, path)
        RunDirectory.create(self._run_dir.path, group_readable=self._group_readable)
        if not was_there:
            for path, target in self._links.items():
                path.rmdir()  # made a moment ago
                os.symlink(target, path)
        what = "a part of it" if was_there else str(self._run_dir.path)
        self._tell(
            f"the run directory {self._run_dir.path} was removed while the job runs ({what}), and is made again: the "
            "checkpoints, incidents and logs in it are gone"
        )
        self.problem = None

    def _is_usable(self) -> None:
        if self.problem is not None:
            say(f"the run directory {self._run_dir.path} is there again")
            self.problem = None

    def _is_lost(self, why: str) -> None:
        if self.problem is None:
            self._tell(
                f"the run directory {self._run_dir.path} cannot be used: {why}; nothing is written in its place until "
                "it is there again"
            )
        self.problem = why

    def _tell(self, words: str) -> None:
        say(words)
        self._journal.emit(Event.DEGRADED, what="run directory", why=words)
