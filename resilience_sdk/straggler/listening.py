"""A rank's side: the newest report, callbacks, and plots, all from the files that the monitor publishes.

A thread of its own looks every two seconds, where somebody listens: the user's code may take its time there, and the
helper thread has signals to see. Nothing here is a collective, and nothing happens in the training thread but what it
asks for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from resilience_sdk.console import say_once
from resilience_sdk.straggler.published import DIRECTORY, REPORT, VERDICTS, Seen, read_report, read_standing, seen
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import Change

Listener = Callable[[Change], object]
L = TypeVar("L", bound=Listener)

_PERIOD_S = 2.0


class Listening:
    """What this process hears about slow ranks. Registration on any thread; calls come on a thread of its own."""

    def __init__(self) -> None:
        """Hear nothing: `begin` says where."""
        self._lock = threading.Lock()
        self._run_dir: Path | None = None
        self._attempt = 0
        self._listeners: list[Listener] = []
        self._plots: list[Callable[[Report], object]] = []
        self._verdicts_seen: Seen | None = None
        self._report_seen: Seen | None = None
        self._plotted: Seen | None = None
        self._heard = 0
        self._report: tuple[Seen, Report | None] | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, run_dir: Path, attempt: int) -> None:
        """Listen in a run directory; what stands there now is of an earlier attempt or job."""
        with self._lock:
            self._run_dir = run_dir
            self._attempt = attempt
            self._verdicts_seen = seen(run_dir / DIRECTORY / VERDICTS)
            self._report_seen = self._plotted = seen(run_dir / DIRECTORY / REPORT)
            self._heard = 0
            self._start()

    def close(self, patience_s: float) -> None:
        """Call nobody any more, and wait so long at most for a call that runs."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def orphan(self) -> None:
        """Be in a forked child: the thread is the parent's, and its lock may have been held."""
        self._lock = threading.Lock()
        self._thread, self._closing = None, threading.Event()

    def add_listener(self, listener: Listener) -> None:
        """Call `listener(change)` from now on."""
        with self._lock:
            self._listeners.append(listener)
            self._start()

    def add_plot(self, plot: Callable[[Report], object]) -> None:
        """Call `plot(report)` for every report from now on."""
        with self._lock:
            self._plots.append(plot)
            self._start()

    def report(self) -> Report | None:
        """Return the newest report of this attempt."""
        with self._lock:
            if self._run_dir is None:
                return None
            found = seen(self._run_dir / DIRECTORY / REPORT)
            if found is None or found == self._report_seen:
                return None
            if self._report is None or self._report[0] != found:
                try:
                    self._report = found, read_report(self._run_dir)
                except PermissionError as error:
                    say_once("report", f"the straggler report is not read: {error}")
                    return None
            return self._report[1]

    def look(self) -> None:
        """Tell who listens what is new. One thread at a time."""
        if self._listeners:
            for change in self._news():
                for listener in list(self._listeners):
                    self._call(self._listeners, listener, change, "on_verdict")
        if self._plots and self._run_dir is not None:
            found = seen(self._run_dir / DIRECTORY / REPORT)
            if found is not None and found != self._plotted:
                self._plotted = found
                report = self.report()
                for plot in list(self._plots) if report is not None else ():
                    self._call(self._plots, plot, report, "log_to")

    def _start(self) -> None:
        """Begin to look, once it is known where and somebody wants to hear. Called with the lock."""
        if self._run_dir is not None and self._thread is None and (self._listeners or self._plots):
            thread = threading.Thread(target=self._serve, name="resilience-listeners", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                say_once("listeners", f"nobody is told about stragglers: {error}")
                return
            self._thread = thread

    def _serve(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(Exception):  # the thread must outlive whatever a round meets
                self.look()
            self._closing.wait(_PERIOD_S)

    def _news(self) -> list[Change]:
        if self._run_dir is None:
            return []
        found = seen(self._run_dir / DIRECTORY / VERDICTS)
        if found is None or found == self._verdicts_seen:
            return []
        self._verdicts_seen = found
        try:
            standing = read_standing(self._run_dir)
        except PermissionError as error:
            say_once("verdicts", f"what is said about stragglers is not read: {error}")
            return []
        if standing is None or standing.attempt != self._attempt:
            return []
        news = standing.after(self._heard if standing.newest >= self._heard else 0)  # a new monitor counts anew
        self._heard = standing.newest
        return [numbered.change for numbered in news]

    def _call(self, registered: list[Any], function: Callable[[Any], object], value: object, what: str) -> None:
        try:
            function(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, which must not end our thread
            with self._lock:
                registered.remove(function)
            name = getattr(function, "__qualname__", repr(function))
            say_once(
                f"{what}:{name}", f"straggler.{what}: {name} failed and is left out: {type(error).__name__}: {error}"
            )


_listening = Listening()


def begin(run_dir: Path, attempt: int) -> None:
    """Begin to listen; the session does this when the process starts to record."""
    _listening.begin(run_dir, attempt)


def close(patience_s: float) -> None:
    """End the calls; the session does this when the process ends."""
    _listening.close(patience_s)


def report() -> Report | None:
    """Return the newest straggler report, the same on all ranks; None before the first one (`report_interval`).

    Reads a file that the monitor has written, when it is new; otherwise the same object comes back. Never a
    collective; of 16,384 ranks, reading a new report takes half a second. Any thread.
    """
    return _listening.report()


def on_verdict(listener: L) -> L:
    """Have `listener(change)` called when somebody is found to be slow, that lasts, or is over; also a decorator.

    `change.what` is `found`, `still` or `over`, `change.verdict` says who and by how much. Every rank that asks is
    called, about two seconds after the monitor has found it, on a thread of its own: training goes on meanwhile, so
    do not touch the model there. It may take its time; what comes meanwhile is told afterwards. A listener that raises
    is left out from then on.
    """
    _listening.add_listener(listener)
    return listener


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_listening.orphan)
