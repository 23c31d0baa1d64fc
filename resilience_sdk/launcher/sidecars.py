"""Sidecars.

Processes of ours beside the ranks of a node, kept running, and what a launcher does now and then meanwhile.

Processes, and started by name, because the libraries of the sinks and the drivers of the hardware must neither cost
the launcher memory nor be able to hurt it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.lease import RENEW_INTERVAL_S, Lease
from resilience_sdk.core.settings import Settings, load
from resilience_sdk.monitor.spawn import MonitorWatch
from resilience_sdk.recorder import page_directory
from resilience_sdk.system import procfs, programs
from resilience_sdk.system.hostinfo import process_start_ticks
from resilience_sdk.system.programs import Program

if TYPE_CHECKING:
    from resilience_sdk.launcher.attempt import AttemptFiles

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
        program: Program,
        task: Mapping[str, Any] | None,
        journal: Journal,
        *,
        delay_s: float = 0.0,
    ) -> None:
        """Run `program` with the JSON object `task`, and who we are, on its standard input; without one nothing.

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
        if self._process is not None and self._process.returncode == programs.GAVE_UP:
            self._task = None  # it has said why
            return
        if self._process is not None:
            self._tell(f"{self._name} ended with status {self._process.returncode}")
            _hang_up(self._process)
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        try:
            self._process = _start(self._program, _line(self._task))
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


def _start(program: Program, task: bytes) -> subprocess.Popen[bytes]:
    env = {name: value for name, value in environ.environment().items() if not name.startswith(environ.INTERNAL_PREFIX)}
    process = programs.start(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
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


DELIVERY_S = 2.0  # healthy sinks take milliseconds; for one that is dead nobody waits longer
HURRIED_DELIVERY_S = 1.0
_WATCH_AFTER_S = 10.0  # not while the ranks start, which is when every processor is wanted


class Beside:
    """The processes beside the ranks of one node. Main thread; never raises, waits only in `close`."""

    def __init__(self, run_dir: Path, job: str, settings: Settings, pages: Path | None, journal: Journal) -> None:
        """Serve the run in `run_dir`, as far as the settings ask for it and the SDK is not disabled."""
        on = not environ.is_disabled(environ.environment())
        began = time.time()
        common: dict[str, Any] = {"run_dir": str(run_dir), "job": job, "pages": None if pages is None else str(pages)}
        lacking = load.missing(settings) if on else {}
        for name, why in lacking.items():
            say_once(f"sink {name}", f"telemetry: {why}")
            journal.emit(Event.DEGRADED, what=f"sink {name}", why=why)
        told = load.without(settings, lacking)
        exports = {**common, "settings": told.to_json()} if told.asks_for_telemetry and on else None
        self._exporter = KeptProcess("telemetry", "the exporter", programs.EXPORTER, exports, journal)
        interval_s = settings.health_interval
        watches: dict[str, Any] | None = None
        if interval_s > 0 and on:
            watches = {**common, "interval_s": interval_s, "since": began, "kills_before": procfs.oom_kills()}
        self._watch = KeptProcess(
            "health",
            "the watch",
            programs.WATCH,
            watches,
            journal,
            delay_s=min(_WATCH_AFTER_S, interval_s),
        )

    def keep_alive(self) -> None:
        """Start what does not run."""
        self._exporter.keep_alive()
        self._watch.keep_alive()

    def close(self, *, is_hurried: bool = False) -> None:
        """End the watch, then let the sinks take what is left, for a moment; a shorter one where somebody waits."""
        patience_s = HURRIED_DELIVERY_S if is_hurried else DELIVERY_S
        self._watch.close(patience_s)
        self._exporter.close(patience_s)


_REPORT_S, _HURRIED_REPORT_S = 60.0, 5.0
_REPORT_LOOK_S = 0.25


def write_report(run_dir: Path, page: Path, journal: Journal, *, is_hurried: Callable[[], bool]) -> bool:
    """Write the report of a job that has ended, and tell whether it is there; never raises.

    It may take a minute, some seconds as soon as a person or a scheduler waits (`is_hurried`): one that waits in vain
    kills the launcher, and with it the exit code of the job.
    """
    began = time.monotonic()
    try:
        process = programs.start(
            programs.COMMAND, "report", str(run_dir), "-o", str(page),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        said = _outputs_of(process, is_hurried, _REPORT_S, _HURRIED_REPORT_S)
        if said is None:
            programs.kill(process, 1.0)
            assert process.stderr is not None
            process.stderr.close()
            why = f"it took more than {time.monotonic() - began:.0f} s"
        else:
            if process.returncode == 0:
                journal.emit(Event.REPORT, path=str(page), seconds=round(time.monotonic() - began, 3))
                return True
            why = said[1].decode(errors="replace").strip() or f"it ended with status {process.returncode}"
    except OSError as error:
        why = str(error)
    if say_once("report", f"no report was written: {why}; `resilience report {run_dir}` does so later"):
        journal.emit(Event.DEGRADED, what="report", why=why)
    return False


_SUMMARY_S, _HURRIED_SUMMARY_S = 10.0, 2.0


def summary_lines(run_dir: Path, *, is_hurried: Callable[[], bool]) -> list[str]:
    """Return the lines on a run that has ended, as `report.closing` has them; never raises, waits for some seconds."""
    try:
        process = programs.start(
            programs.SUMMARY, str(run_dir),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        said = _outputs_of(process, is_hurried, _SUMMARY_S, _HURRIED_SUMMARY_S)
        if said is not None and process.returncode == 0:
            return said[0].decode(errors="replace").splitlines()
        if said is None:
            programs.kill(process, 1.0)
            why = "the job is asked to leave" if is_hurried() else f"it takes longer than {_SUMMARY_S:.0f} s"
        else:
            why = (said[1].decode(errors="replace").splitlines() or [f"status {process.returncode}"])[-1]
    except OSError as error:
        why = str(error)
    return [f"time: not summed up ({why}); `resilience goodput {shlex.quote(str(run_dir))}` does so"]


def _outputs_of(
    process: subprocess.Popen[bytes], is_hurried: Callable[[], bool], patience_s: float, hurried_s: float
) -> tuple[bytes, bytes] | None:
    """Return what a program has printed and said, once it has ended; None where the patience is over."""
    until, was_hurried = time.monotonic() + patience_s, False
    while (left_s := until - time.monotonic()) > 0:
        if not was_hurried and is_hurried():
            was_hurried, until = True, min(until, time.monotonic() + hurried_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=min(left_s, _REPORT_LOOK_S))
    return None


def _line(task: Mapping[str, Any]) -> bytes:
    pid = os.getpid()
    return json.dumps({**task, "parent_pid": pid, "parent_ticks": process_start_ticks(pid)}).encode()


_LOOK_EVERY_S = 1.0


class LeaseRenewal:
    """Renews a lease for as long as it is entered, so that nobody takes the run directory of a launcher that lives.

    From a thread, as the main one may wait for minutes: for other nodes, for ranks that save and leave, for a report.
    """

    def __init__(self, lease: Lease) -> None:
        """Renew `lease`, which was just acquired."""
        self._lease = lease
        self._over = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="resilience-lease", daemon=True)

    def __enter__(self) -> LeaseRenewal:
        self._renewer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._renewer.join(RENEW_INTERVAL_S)  # before it is released

    def _renew(self) -> None:
        while not self._over.wait(RENEW_INTERVAL_S):
            if not self._lease.renew():
                place = self._lease.path.parent
                say_once("lease-lost", f"another job took {place} over; both write there now")


class Housekeeping:
    """What has to be done now and then while ranks run: a living monitor, and what runs beside the ranks."""

    def __init__(self, journal: Journal, pages: Path | None, beside: Beside) -> None:
        """See to `beside`, and to the monitor that watches `pages`, at each call."""
        self.write_kept: Callable[[], None] = lambda: None
        """Writes what could not be written yet."""
        self._journal = journal
        self._monitor = None if pages is None else MonitorWatch(pages)
        self._beside = beside
        self._looked: float | None = None

    def tend(self) -> None:
        """See to all of our processes. Main thread."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        self.write_kept()
        if self._monitor is not None:
            try:
                self._monitor.keep_alive()
            except Exception as error:  # noqa: BLE001 - without a monitor the ranks run all the same
                if say_once("monitor", f"the monitor cannot be started, hangs are not detected: {error}"):
                    self._journal.emit(Event.DEGRADED, what="monitor", why=str(error))
        self._beside.keep_alive()


_LOOK_EVERY_S = 0.5


class PageKeeper:
    """A thread that looks twice a second: the main one may wait for minutes, for ranks that save and leave."""

    def __init__(self, files: AttemptFiles, journal: Journal) -> None:
        """Keep the directory of `files` from now on; with none there is nothing to do."""
        self._files = files
        self._journal = journal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="resilience-pages", daemon=True)
        if files.directory is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop, before the directory is removed by its owner."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Look once, and tell what was lost."""
        pages = self._files.directory
        if pages is None:
            return
        try:
            if self._files.keep():
                self._tell(page_directory.LOST, page_directory.words_of_loss(pages))
        except OSError as error:
            self._tell("no " + page_directory.LOST, page_directory.words_of_failure(pages, error))

    def _keep(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self.look()

    def _tell(self, key: str, words: str) -> None:
        if say_once(key, words):
            self._journal.emit(Event.DEGRADED, what="pages", why=words)
