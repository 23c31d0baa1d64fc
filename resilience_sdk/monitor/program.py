"""The monitor's own process: take the lock, leave the parent, watch until the ranks are gone.

No torch, no third-party package but attrs: it must be small enough to run beside every training.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from resilience_sdk import console, hostinfo, job_config
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.events import Event
from resilience_sdk.job_config import JobConfig
from resilience_sdk.journal import Journal
from resilience_sdk.lease import RENEW_INTERVAL_S, Lease
from resilience_sdk.monitor import spawn
from resilience_sdk.monitor.ranks import remove_files
from resilience_sdk.monitor.stale import remove_ended, remove_stale
from resilience_sdk.monitor.watch import Watcher
from resilience_sdk.run_directory import RunDirectory

OVER = "over.json"  # our launcher writes it when no attempt will follow
_NOBODY_CAME_S = 10.0
_REMOVAL_TRIES = 20
_MOST_FAILURES = 5
_RESTART_WITHIN_S = 60.0  # torchrun takes seconds, and up to 30 s for ranks that ignore SIGTERM
_OVER = "over.json"
_DEFER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


def main(directory: str) -> int:
    """Become the monitor of a page directory; return 0 in the parent, which started it, when it is."""
    pages = Path(directory)
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    # The job is ended by signals to its whole process tree. Its monitor stays until the ranks are gone.
    for number in _DEFER:
        signal.signal(number, signal.SIG_IGN)
    lock = os.open(pages / spawn.LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(tell, b"1")  # another one was faster, which serves as well
        os._exit(0)
    generation = spawn.read_state(pages).get("generation", 0) + 1
    try:
        _publish(pages, generation)
    except OSError:
        os._exit(1)  # whoever started us finds nobody ready, and says so
    os.write(tell, b"1")
    os.close(tell)
    status = 1
    try:
        status = _serve(pages, generation)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told, and this process ends here
        _report_failure(pages, error)
    finally:
        os._exit(status)


def _report_failure(pages: Path, error: BaseException) -> None:
    """Say in one line that the monitor itself failed; the details are for its log and the journal."""
    details = traceback.format_exc()
    with contextlib.suppress(OSError):
        os.write(1, details.encode())
    config = job_config.read(pages)
    if config is not None:
        _journal(config).emit(Event.DEGRADED, what="monitor", why=details)
    console.say(
        f"the monitor failed ({type(error).__name__}: {error}); the training goes on, and a new one is started. "
        f"Please report what the journal of the run says about it"
    )


def _journal(config: JobConfig) -> Journal:
    return Journal(
        Path(config.run_dir) / "journal",
        writer="monitor",
        host=hostinfo.host_name(),
        boot_id=hostinfo.boot_id(),
        job=config.job,
    )


def _serve(pages: Path, generation: int) -> int:
    config = job_config.read(pages)
    if config is None:
        console.say(f"the monitor finds no {job_config.FILE} in {pages}: hangs are not detected")
        return 1
    journal = _journal(config)
    state = spawn.read_state(pages)

    def in_charge() -> bool:
        return spawn.read_state(pages) == state

    journal.emit(
        Event.MONITOR_START if generation == 1 else Event.MONITOR_REPLACED,
        pid=os.getpid(),
        generation=generation,
    )
    with contextlib.suppress(OSError):
        remove_ended(pages, config.began_ns)
        remove_stale(pages)
    watcher = Watcher(pages, config, journal, in_charge)
    hold = _Hold(config)
    try:
        _loop(pages, config, watcher, in_charge, hold)
    finally:
        hold.release()
    if in_charge() and job_config.read(pages) in (config, None):
        if not config.foreign:
            watcher.conclude()
        if config.foreign or not (pages / _OVER).exists():
            # Else our launcher does, which waits for this process to end.
            for watched in watcher.table.all():
                remove_files(watched.stem)
            _remove_directory(pages, anyway=not config.foreign)
    return 0


def _launcher_is_done(pages: Path, config: JobConfig) -> bool:
    """Tell whether our launcher will start no further attempt: it said so, or it is gone."""
    if (pages / _OVER).exists():
        return True
    pid = config.launcher_pid
    return pid is not None and hostinfo.process_is_gone(pid, config.launcher_ticks)


class _Hold:
    """The lease of the run directory where no launcher of ours holds it: while there are ranks, not longer."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._lease: Lease | None = None
        self._renewed = 0.0

    def keep(self) -> None:
        """Take the lease, or renew it in time."""
        if not self._config.foreign:
            return
        now = time.monotonic()
        if self._lease is None:
            try:
                self._lease = Lease.acquire(RunDirectory(Path(self._config.run_dir)), self._config.job)
            except RunDirectoryError as error:
                console.say_once("lease", str(error))
        elif now - self._renewed > RENEW_INTERVAL_S:
            self._lease.renew()
        else:
            return
        self._renewed = now

    def release(self) -> None:
        """Let another job have the directory."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def _loop(pages: Path, config: JobConfig, watcher: Watcher, in_charge: Callable[[], bool], hold: _Hold) -> None:
    started = time.monotonic()
    over_since: float | None = None
    came = False
    wait_s = 0.0
    failures = 0
    known: tuple[int, int] | None = None
    while in_charge() and pages.is_dir():
        try:
            if (written := job_config.version(pages)) is None or written != known:
                if job_config.read(pages) != config:
                    return  # another job began here, and its ranks start a monitor of their own
                known = written
            wait_s = watcher.round(wait_s)
            failures = 0
        except Exception as error:
            # One bad round (a page that vanishes while it is read) is no reason to leave the ranks alone.
            failures += 1
            if failures > _MOST_FAILURES:
                raise
            watcher.note_failure(error)
            time.sleep(wait_s := 0.1 * failures)
        now_ns = time.monotonic_ns()
        with contextlib.suppress(OSError):
            os.utime(pages / spawn.STATE, ns=(now_ns, now_ns))
        came = came or bool(watcher.table.all())
        if not watcher.is_over():
            over_since = None
            hold.keep()
        elif config.launcher_pid is not None:
            if _launcher_is_done(pages, config):
                return
        elif came:
            if over_since is None:
                over_since = time.monotonic()
                watcher.conclude()
                hold.release()
            if watcher.ended_well() or not _may_restart(config) or time.monotonic() - over_since > _RESTART_WITHIN_S:
                return
        elif time.monotonic() - started > _NOBODY_CAME_S:
            return


def _may_restart(config: JobConfig) -> bool:
    """Tell whether a foreign launcher is there that may start the ranks again, into the same run directory."""
    return bool(config.parent_pid) and not hostinfo.process_is_gone(config.parent_pid, config.parent_ticks)


def _publish(pages: Path, generation: int) -> None:
    """Say who is the monitor now; from here on an older one finds that it is not in charge any more."""
    pid = os.getpid()
    state = {"pid": pid, "start_ticks": hostinfo.process_start_ticks(pid) or 0, "generation": generation}
    temporary = pages / f".{spawn.STATE}.{pid}"
    temporary.write_text(json.dumps(state))
    now_ns = time.monotonic_ns()
    os.utime(temporary, ns=(now_ns, now_ns))
    temporary.replace(pages / spawn.STATE)


def _remove_directory(pages: Path, *, anyway: bool) -> None:
    """Remove the job's page directory, unless somebody has begun to use it again.

    `anyway`: nobody can have, it was the one of a launcher that is gone. A rank that was killed with it may
    have left a page that nobody has looked at, and one that is about to go may still write.
    """
    for _ in range(_REMOVAL_TRIES):
        if not anyway and any(pages.glob("*.page")):
            return
        with contextlib.suppress(OSError):
            for path in pages.iterdir():
                path.unlink()
            pages.rmdir()
        if not pages.exists():
            return
        time.sleep(0.02)
