"""The monitor's own process.

Take the lock, leave the parent, watch until the ranks are gone, remove what nobody else does.

No torch, no third-party package but attrs: it must be small enough to run beside every training.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import TextIO

from resilience_sdk.core import console, job_config
from resilience_sdk.core.atomic_write import Version
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.lease import RENEW_INTERVAL_S, Lease
from resilience_sdk.core.plain_file import open_plain, private
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.run_directory_keeper import RunDirectoryKeeper
from resilience_sdk.errors import RunDirectoryError
from resilience_sdk.monitor import spawn
from resilience_sdk.monitor.loop import Watcher
from resilience_sdk.monitor.ranks import remove_files
from resilience_sdk.recorder import page_directory
from resilience_sdk.recorder.page_directory import check_private, parse_stem
from resilience_sdk.recorder.page_reader import PageReader
from resilience_sdk.system import hostinfo, same_device

_MOST_DIRECTORIES = 100  # looked at by one monitor; the next one goes on
_MOST_FILES = 10_000
_YOUNG_S = 60.0  # a directory that changed so lately may be somebody's who has only made it


def remove_stale(pages: Path) -> list[Path]:
    """Remove the siblings of `pages` of whose job no process lives any more; return them.

    What cannot be understood, is locked, young, or of another PID namespace (containers may share the place) is
    left alone. Raises OSError when the parent cannot be read.
    """
    removed = []
    with os.scandir(pages.parent) as entries:
        siblings = [Path(entry.path) for entry in itertools.islice(entries, _MOST_DIRECTORIES)]
    for directory in siblings:
        if directory == pages:
            continue
        with contextlib.suppress(OSError):
            check_private(directory)
            if _is_young(directory) or not _is_abandoned(directory):
                continue  # asked without the locks first: those of the living are not to be disturbed
            with spawn.all_locks(directory) as mine:
                if mine and _is_abandoned(directory):
                    _remove(directory)
                    removed.append(directory)
    return removed


def remove_ended(pages: Path, began_ns: int) -> None:
    """Remove the files of ranks that had their page before a start began (monotonic), and are gone; never raises.

    The monitor that watched them has left, as its job has; they would pass for dead ranks of this one.
    """
    for path in pages.glob("*.page"):
        with contextlib.suppress(OSError), contextlib.closing(PageReader(path)) as reader:
            page = reader.snapshot()
            if page is not None and page.created_ns < began_ns and hostinfo.process_is_gone(page.pid, page.start_ticks):
                remove_files(path.with_suffix(""))


def _is_young(directory: Path) -> bool:
    return abs(time.time() - directory.stat().st_mtime) < _YOUNG_S


def _is_abandoned(directory: Path) -> bool:
    """Tell whether all processes that the directory names are provably gone."""
    config = job_config.read(directory)
    if config is None or config.pid_namespace != hostinfo.pid_namespace():
        return False
    state = spawn.read_state(directory)
    named: list[tuple[int | None, int | None]] = [
        (config.creator_pid, config.creator_ticks),
        (config.launcher_pid, config.launcher_ticks),
        (config.parent_pid or None, config.parent_ticks),  # may start the ranks again
        (state.get("pid"), state.get("start_ticks")),
    ]
    # A page names its process in its file name; without its start time, any process of that number counts.
    stems = (parse_stem(path.name.split(".", 1)[0]) for path in itertools.islice(directory.iterdir(), _MOST_FILES))
    named += [(stem[2], None) for stem in stems if stem is not None]
    return all(pid is None or hostinfo.process_is_gone(pid, ticks or None) for pid, ticks in named)


def _remove(directory: Path) -> None:
    for path in itertools.islice(directory.iterdir(), _MOST_FILES):
        path.unlink()
    directory.rmdir()


OVER = "over.json"  # our launcher writes it when no attempt will follow
_NOBODY_CAME_S = 10.0
_LOOKED_AT_S = 0.02
_REMOVAL_TRIES = 20
_MOST_FAILURES = 5
_RESTART_WITHIN_S = 60.0  # torchrun takes seconds, and up to 30 s for ranks that ignore SIGTERM
_OVER = "over.json"
_COLLECT_AFTER = 20_000  # objects more than before
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_DEFER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


def main(directory: str) -> int:
    """Become the monitor of a page directory; return 0 in the parent, which started it, when it is."""
    pages = Path(directory)
    _forget_signals()
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    console.stay_light()
    # The job is ended by signals to its whole process tree. Its monitor stays until the ranks are gone.
    for number in _DEFER:
        signal.signal(number, signal.SIG_IGN)
    try:
        lock = open_plain(pages / spawn.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except FileNotFoundError:
        os._exit(1)  # the directory is gone, and with it the launcher that was asked to leave while it started us
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(tell, b"1")  # another one was faster, which serves as well
        os._exit(0)
    generation = spawn.read_state(pages).get("generation", 0) + 1
    try:
        state = MonitorLock(pages, generation, lock)
    except OSError:
        os._exit(1)  # whoever started us finds nobody ready, and says so
    os.write(tell, b"1")
    os.close(tell)
    gc.freeze()  # what is loaded stays, and a round makes few cycles: looking for them is a part of its cost
    gc.set_threshold(_COLLECT_AFTER)
    status = 1
    try:
        status = _serve(pages, generation, state)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is told, and this process ends here
        _report_failure(pages, error)
    finally:
        os._exit(status)


def _forget_signals() -> None:
    """Have every signal mean what it means by default: the rank that started this may ignore or block any of them."""
    for number in signal.valid_signals():
        if number not in _IGNORED_BY_PYTHON and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


class MonitorLock:
    """The lock of the monitor, and the file that says who it is: who takes over puts one of its own in its place."""

    def __init__(self, pages: Path, generation: int, lock: int) -> None:
        """Say that it is this process; from here on an older monitor finds that it is not in charge any more.

        `lock`: the descriptor by which this process holds the lock.
        """
        self._pages = pages
        self._lock = lock
        self._generation = generation
        self.job_is_over = False
        """Whether the launcher has said so; then it removes the directory, whatever still runs."""
        self._file = self._write()

    def _write(self) -> TextIO:
        pid = os.getpid()
        state = {"pid": pid, "start_ticks": hostinfo.process_start_ticks(pid) or 0, "generation": self._generation}
        temporary = self._pages / f".{spawn.STATE}.{pid}"
        self._file = file = open(temporary, "w", encoding="utf-8", opener=private)  # noqa: SIM115 - held while it is in charge
        file.write(json.dumps(state))
        file.flush()
        self.renew()
        temporary.replace(self._pages / spawn.STATE)
        return file

    def take_again(self) -> bool:
        """Take the lock and say so in a directory that was made again; tell whether nobody else was faster there.

        Raises OSError where nothing can be written.
        """
        lock = open_plain(self._pages / spawn.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        if os.path.sameopenfile(lock, self._lock):  # only the state was removed
            os.close(lock)
        elif _take(lock):
            os.close(self._lock)
            self._lock = lock
        else:
            os.close(lock)
            return False
        with self._file:  # the old one
            self._generation += 1
            self._write()
        return True

    def renew(self) -> None:
        """Say that the monitor lives: by the time of the file, on the monotonic clock."""
        now_ns = time.monotonic_ns()
        os.utime(self._file.fileno(), ns=(now_ns, now_ns))

    def in_charge(self) -> bool:
        """Tell whether the file is still there."""
        return os.fstat(self._file.fileno()).st_nlink > 0


def _take(lock: int) -> bool:
    """Take a lock that others may hold for a moment to see whether it is free."""
    deadline = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        else:
            return True


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


def _keeper(config: JobConfig, journal: Journal) -> RunDirectoryKeeper | None:
    """Return what keeps the run directory where no launcher of ours does."""
    if not config.foreign:
        return None
    group_readable = config.settings.get("group_readable") is True
    return RunDirectoryKeeper(RunDirectory(Path(config.run_dir)), journal, group_readable=group_readable)


def _serve(pages: Path, generation: int, state: MonitorLock) -> int:
    config = job_config.read(pages)
    if config is None:
        console.say(f"the monitor finds no {job_config.FILE} in {pages}: hangs are not detected")
        return 1
    same_device.remember(config.run_dir, config.run_device)
    console.bind(node=hostinfo.host_name())
    console.use_json(config.settings.get("event_log") == "json")
    console.keep_unwritten(RunDirectory(Path(config.run_dir)).unwritten_output(hostinfo.host_name()))
    journal = _journal(config)
    journal.emit(
        Event.MONITOR_START if generation == 1 else Event.MONITOR_REPLACED,
        pid=os.getpid(),
        generation=generation,
    )
    with contextlib.suppress(OSError):
        remove_ended(pages, config.began_ns)
        remove_stale(pages)
    watcher = Watcher(pages, config, journal, state)
    hold = _Hold(config)
    place = _keeper(config, journal)
    try:
        _loop(pages, config, watcher, state, hold)
    finally:
        hold.release()
        if place is not None:
            place.close()
    if state.in_charge() and job_config.read(pages) in (config, None):
        watcher.keep_witnesses()
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


def _loop(pages: Path, config: JobConfig, watcher: Watcher, state: MonitorLock, hold: _Hold) -> None:
    started = time.monotonic()
    over_since: float | None = None
    came = False
    wait_s = 0.0
    failures = 0
    known: Version | None = None
    while _is_ours(pages, config, watcher, state):
        try:
            if (written := job_config.version(pages)) is None or written != known:
                found = job_config.read(pages)
                if found != config and (found is not None or watcher.is_over()):
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
        with contextlib.suppress(OSError):
            state.renew()
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


def _is_ours(pages: Path, config: JobConfig, watcher: Watcher, state: MonitorLock) -> bool:
    """Tell whether this process goes on as the monitor.

    A directory that was removed under living ranks is made again and taken: their pages are still mapped here. Where it
    cannot be made, nobody else can watch them either.
    """
    if state.in_charge() and page_directory.is_there(pages):
        state.job_is_over = state.job_is_over or (pages / _OVER).exists()
        return True
    if watcher.is_over() or state.job_is_over or _launcher_is_done(pages, config):
        return state.in_charge()
    try:
        if page_directory.make_again(pages, config):
            words = page_directory.words_of_loss(pages)
            watcher.note_loss(words)
            console.say_once(page_directory.LOST, words)
        return state.in_charge() or state.take_again()
    except OSError as error:
        words = page_directory.words_of_failure(pages, error)
        if console.say_once("no " + page_directory.LOST, words):
            watcher.note_loss(words)
        return True


def _may_restart(config: JobConfig) -> bool:
    """Tell whether a foreign launcher is there that may start the ranks again, into the same run directory."""
    return bool(config.parent_pid) and not hostinfo.process_is_gone(config.parent_pid, config.parent_ticks)


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
