"""Callbacks and plots of a rank: the newest report, from the files that the monitor publishes.

A thread of its own looks every two seconds, where somebody listens: the user's code may take its time there, and the
helper thread has signals to see. Nothing here is a collective, and nothing happens in the training thread but what it
asks for.

Thread-safety, as the loggers' sources have it: TensorBoard's writer puts events into a queue that its own thread
empties. A run of W&B sends each call to its service in one message. With `commit=False` what is logged joins the row
that the training thread logs next, so its step counter is not moved.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from resilience_sdk.core.atomic_write import Version, version_of
from resilience_sdk.core.console import say_once
from resilience_sdk.errors import ConfigError, MissingExtraError
from resilience_sdk.straggler.published import DIRECTORY, REPORT, VERDICTS, read_report, read_standing
from resilience_sdk.straggler.reports import Report
from resilience_sdk.straggler.verdicts import Change

Listener = Callable[[Change], object]
L = TypeVar("L", bound=Listener)

_PERIOD_S = 2.0


class Listening:
    """What this process hears about slow ranks. Registration on any thread; calls come on a thread of its own."""

    def __init__(self) -> None:
        """Hear nothing: `begin` says where."""
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._run_dir: Path | None = None
        self._attempt = 0
        self._listeners: list[Listener] = []
        self._plots: list[Callable[[Report], object]] = []
        self._told: dict[str, Version | None] = {}  # file -> what the thread has seen of it
        self._number = 0  # of the last change that was told
        self._earlier: Version | None = None  # the report of an earlier attempt or job
        self._report: tuple[Version | None, Report | None] = None, None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def begin(self, run_dir: Path, attempt: int) -> None:
        """Listen in a run directory; what stands there now is of an earlier attempt or job."""
        with self._lock:
            self._run_dir = run_dir
            self._attempt = attempt
            self._told = {name: version_of(run_dir / DIRECTORY / name) for name in (VERDICTS, REPORT)}
            self._earlier = self._told[REPORT]
            self._number = 0
            self._start()

    def close(self, patience_s: float) -> None:
        """Call nobody any more, and wait so long at most for a call that runs."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def orphan(self) -> None:
        """Be in a forked child: the thread is the parent's, and its lock may have been held."""
        self._lock, self._looking = threading.Lock(), threading.Lock()
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
            found = version_of(self._run_dir / DIRECTORY / REPORT)
            if found is None or found == self._earlier:
                return None
            if self._report[0] != found:
                try:
                    self._report = found, read_report(self._run_dir)
                except PermissionError as error:
                    say_once("report", f"the straggler report is not read: {error}")
                    return None
            return self._report[1]

    def look(self) -> None:
        """Tell who listens what is new, each thing once: one thread at a time."""
        with self._looking:
            if self._listeners and self._is_new(VERDICTS):
                for change in self._changes():
                    self._call(self._listeners, change, "on_verdict")
            if self._plots and self._is_new(REPORT) and (report := self.report()) is not None:
                self._call(self._plots, report, "log_to")

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

    def _is_new(self, name: str) -> bool:
        found = None if self._run_dir is None else version_of(self._run_dir / DIRECTORY / name)
        if found is None or found == self._told[name]:
            return False
        self._told[name] = found
        return True

    def _changes(self) -> list[Change]:
        """Return the changes of this attempt that were not told yet."""
        try:
            standing = None if self._run_dir is None else read_standing(self._run_dir)
        except PermissionError as error:
            say_once("verdicts", f"what is said about stragglers is not read: {error}")
            return []
        if standing is None or standing.attempt != self._attempt:
            return []
        newest = standing.changes[-1].number if standing.changes else 0
        told, self._number = self._number if newest >= self._number else 0, newest  # a new monitor counts anew
        return [change for change in standing.changes if change.number > told]

    def _call(self, registered: list[Any], value: object, what: str) -> None:
        for function in list(registered):
            try:
                function(value)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code, which must not end our thread
                with self._lock:
                    registered.remove(function)
                name = getattr(function, "__qualname__", repr(function))
                why = f"{type(error).__name__}: {error}"
                say_once(f"{what}:{name}", f"straggler.{what}: {name} failed and is left out: {why}")


_listening = Listening()
begin = _listening.begin
close = _listening.close


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


PREFIX = "stragglers/"
_WANDB_STEP = f"{PREFIX}step"


def log_to(logger: Any) -> None:
    """Log the scores of every report to `logger`: a TensorBoard `SummaryWriter`, or a run of W&B. Call it on one rank.

    `"wandb"` means the active run. Scalars are called `stragglers/section_relative_perf/fwd/min` and so on, over the
    last step of the report. Logged on the thread that calls the listeners. Raises ConfigError for anything else,
    or where no run of W&B is active, and MissingExtraError where W&B is not installed.
    """
    _listening.add_plot(plot_to(logger))


def plot_to(logger: Any) -> Callable[[Report], None]:
    """Return what logs a report; raises as `log_to`."""
    if logger == "wandb":
        logger = _active_wandb_run()
    if callable(getattr(logger, "add_scalar", None)):
        return partial(_to_tensorboard, logger)
    if callable(getattr(logger, "log", None)) and callable(getattr(logger, "define_metric", None)):
        logger.define_metric(_WANDB_STEP, hidden=True)
        logger.define_metric(f"{PREFIX}*", step_metric=_WANDB_STEP)
        return partial(_to_wandb, logger)
    raise ConfigError(
        f"log_to({logger!r}): expected a TensorBoard SummaryWriter, a W&B run (what wandb.init() returned), or 'wandb'"
    )


def _to_tensorboard(writer: Any, report: Report) -> None:
    for name, value in report.summary().items():
        writer.add_scalar(f"{PREFIX}{name}", value, report.last_step)


def _to_wandb(run: Any, report: Report) -> None:
    values = {f"{PREFIX}{name}": value for name, value in report.summary().items()}
    run.log({**values, _WANDB_STEP: report.last_step or 0}, commit=False)


def _active_wandb_run() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("log_to('wandb') needs W&B: pip install wandb") from error
    if wandb.run is None:
        raise ConfigError("log_to('wandb'): no run is active; call wandb.init() first, or pass the run")
    return wandb.run
