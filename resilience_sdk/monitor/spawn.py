"""Starting the monitor of a job, and noticing that it is gone or frozen.

One monitor per page directory, elected by `flock` on `monitor.lock`: whoever holds it is the monitor. It shows
that it lives by the modification time of `monitor.json`, set to its *monotonic* clock at each of its looks, so
that no step of the wall clock can make a live monitor look dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from resilience_sdk.core import job_config
from resilience_sdk.core.plain_file import open_plain, read_text
from resilience_sdk.system import hostinfo, programs
from resilience_sdk.system.file_lock import file_lock

LOCK = "monitor.lock"
SPAWN_LOCK = "spawn.lock"
STATE = "monitor.json"
LOG = "monitor.log"
FROZEN_AFTER_S = 5.0
_FIRST_PAUSE_S = 0.5
_POLL_S = 0.01
_COMES_BACK_S = 2.0
_LONGEST_PAUSE_S = 60.0


class MonitorWatch:
    """Keeps one monitor running for a job; the helper thread of each rank and the launcher have one each."""

    def __init__(self, pages: Path, *, delay_s: float = 0.0) -> None:
        """Watch over `pages`; with `delay_s` leave the first start to a process that comes first."""
        self._pages = pages
        self._not_before = time.monotonic() + delay_s
        self._pause_s = _FIRST_PAUSE_S
        self._seen = False

    def keep_alive(self) -> bool:
        """Start a monitor if there is none, replace one that is frozen; tell whether one was started.

        May wait for a new process to come up (tens of milliseconds), so not for the training thread. Raises
        OSError when it cannot start one.
        """
        now = time.monotonic()
        if is_alive(self._pages):
            self._seen = True
            if now > self._not_before + _LONGEST_PAUSE_S:
                self._pause_s = _FIRST_PAUSE_S
            return False
        if self._seen and not (self._pages / STATE).exists():
            # Its directory was removed, not the monitor: that one has the pages, and comes back by itself.
            self._seen, self._not_before = False, max(self._not_before, now + _COMES_BACK_S)
        if now < self._not_before:
            return False
        # One that dies again and again is started ever more rarely, but never given up.
        self._not_before = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return ensure_monitor(self._pages)


def is_alive(pages: Path) -> bool:
    """Tell whether the monitor of a page directory has looked within the last seconds, and is there."""
    try:
        seen_ns = (pages / STATE).stat().st_mtime_ns
    except OSError:
        return False
    if not 0 <= time.monotonic_ns() - seen_ns < FROZEN_AFTER_S * 1e9:
        return False
    state = read_state(pages)
    return not state or not hostinfo.process_is_gone(state["pid"], state["start_ticks"])


def await_look(pages: Path, since_ns: int, patience_s: float, has_failed: Callable[[], bool]) -> bool:
    """Wait until the monitor of a page directory has looked once, from begin to end, after that monotonic time.

    It then has every process whose page was there by its pidfd, and learns how that ends. Tells whether it has; never
    raises. `has_failed`: none can be started.
    """
    deadline, first_ns = time.monotonic() + patience_s, 0
    while time.monotonic() < deadline and not has_failed():
        seen_ns = 0
        with contextlib.suppress(OSError):
            seen_ns = (pages / STATE).stat().st_mtime_ns
        if seen_ns > since_ns:
            if first_ns and seen_ns > first_ns:
                return True
            first_ns = first_ns or seen_ns
        time.sleep(_POLL_S)
    return False


def ensure_monitor(pages: Path) -> bool:
    """Start the monitor of `pages` unless it runs; kill it first if it is frozen. Tell whether it was started.

    Returns when the new monitor holds the lock. Raises OSError when none can be started.
    """
    with file_lock(pages / SPAWN_LOCK) as mine:
        if not mine:
            return False  # another rank is starting it
        if not is_unlocked(pages / LOCK) and (is_alive(pages) or not _kill_frozen(pages)):
            return False
        _spawn(pages)
        return True


def read_state(pages: Path) -> dict[str, int]:
    """Return `{pid, start_ticks, generation}` of the newest monitor, empty when there is none."""
    try:
        state = json.loads(read_text(pages / STATE))
        return {key: int(state[key]) for key in ("pid", "start_ticks", "generation")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _spawn(pages: Path) -> None:
    """Run the program detached: own session, no descriptors but standard error, which shows its report."""
    from subprocess import DEVNULL

    log = open_plain(pages / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    try:
        # What preloads libraries or talks to Python belongs to the training, not to the monitor.
        env = {"PATH": os.defpath, "LANG": "C.UTF-8"}
        process = programs.start(programs.MONITOR, str(pages), env=env, stdin=DEVNULL, stdout=log)
    finally:
        os.close(log)
    # The program leaves its parent at once and returns when it is the monitor: no child of ours remains that the
    # training script could meet in a wait(). Where the script collects every child itself, or ignores SIGCHLD, what
    # became of it shows in STATE.
    if (status := process.wait()) != 0:
        raise OSError(f"the monitor did not start (status {status}); see {pages / LOG}")


def _kill_frozen(pages: Path) -> bool:
    """Kill a monitor that holds the lock and does not look any more; tell whether the lock is free now."""
    state = read_state(pages)
    if not state or hostinfo.process_is_gone(state["pid"], state["start_ticks"] or None):
        return False
    with contextlib.suppress(OSError):
        _kill(state["pid"], state["start_ticks"])
    deadline = time.monotonic() + 2.0
    while not (free := is_unlocked(pages / LOCK)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return free


def _kill(pid: int, start_ticks: int) -> None:
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        os.kill(pid, signal.SIGKILL)  # compared just now, and it holds the lock: the number is still its own
        return
    fd = os.pidfd_open(pid)
    try:
        if hostinfo.process_start_ticks(pid) == start_ticks:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)


@contextlib.contextmanager
def all_locks(pages: Path) -> Iterator[bool]:
    """Hold what a monitor, who starts one, and who joins the job would hold; yields whether all were free.

    Raises OSError when the page directory cannot be used.
    """
    with contextlib.ExitStack() as held:
        # One after the other: a monitor that is being started must find its own lock free.
        yield (
            held.enter_context(file_lock(pages / SPAWN_LOCK))
            and held.enter_context(file_lock(pages / LOCK))
            and held.enter_context(job_config.locked(pages, patience_s=0.0))
        )


def is_unlocked(path: Path) -> bool:
    """Tell whether nobody holds the lock on a file, which is made if it is not there. Raises OSError."""
    with file_lock(path) as mine:
        return mine
