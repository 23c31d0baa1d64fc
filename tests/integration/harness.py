"""Runs `resilience run` as a user does and watches it from outside: journal, incidents, screen, processes.

Each job has a page directory in memory of its own and a mark in its environment, so that tests do not see one
another and whatever a job leaves behind can be found. Nothing here waits for a time to pass, only for things to
happen, with an upper bound that is far above what they take.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.journal import read_journal

sys.path.insert(0, str(Path(__file__).parent))
import warm

PROJECT = Path(__file__).parent.parent.parent
SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 150.0  # an event is waited for, so it is the failure alone that takes as long
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_MARK = warm.MARK


@attrs.define
class Job:
    """One launcher process with everything that belongs to it."""

    process: subprocess.Popen[bytes] | warm.WarmProcess
    folder: Path
    run_dir: Path
    pages: Path
    mark: str

    @property
    def out(self) -> str:
        """What its ranks printed so far."""
        return (self.folder / "out").read_text(errors="replace")

    @property
    def screen(self) -> str:
        """What stands on standard error so far: our lines, and the ranks' own."""
        return (self.folder / "err").read_text(errors="replace")

    def last_lines(self) -> str:
        """Return our lines since the last attempt ended: what a person reads last."""
        lines = [line for line in self.screen.splitlines() if line.startswith("resilience: ")]
        return "\n".join(lines[-8:])

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the launcher's end and return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the launcher did not end:\n{self.screen}") from None

    def events(self, name: str, **facts: object) -> list[dict[str, Any]]:
        """Return the journal's events of that name with these values, in order, whoever wrote them."""
        found = [event for event in read_journal(self.run_dir / "journal").events if event["event"] == name]
        return [event for event in found if all(event.get(key) == value for key, value in facts.items())]

    def wait_event(self, name: str, *, count: int = 1, **facts: object) -> list[dict[str, Any]]:
        """Wait until the journal has that many such events and return them."""
        found: list[dict[str, Any]] = []

        def has_come() -> bool:
            found[:] = self.events(name, **facts) if (self.run_dir / "journal").is_dir() else []
            return len(found) >= count

        self.wait(has_come, f"{count} {name} {facts}")
        return found

    def wait(self, happened: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until something happened; fail with the screen when it does not, or cannot any more."""
        began_s = time.monotonic()
        while True:
            over = self.process.poll() is not None  # asked first: what a job does last still counts
            if happened():
                return
            waited_s = time.monotonic() - began_s
            in_time = not over and waited_s < timeout_s
            assert in_time, f"{what} did not come:\n{self.screen}"
            # To look takes time, which the job needs: whoever has waited for seconds does not ask 50 times in each.
            time.sleep(min(0.2, 0.02 + waited_s / 50))

    def incidents(self) -> list[dict[str, Any]]:
        """Return all incident reports, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("incidents/[0-9]*/report.json"))]

    def incident_file(self, incident: dict[str, Any], name: str) -> str:
        """Return the text of a file of an incident."""
        return (self.run_dir / "incidents" / incident["id"] / name).read_text()

    def outcome(self) -> dict[str, Any]:
        """Return `outcome.json`."""
        data: dict[str, Any] = json.loads((self.run_dir / "outcome.json").read_text())
        return data

    def told(self, name: str) -> list[Path]:
        """Return the files of that name pattern that the scripts wrote beside the run directory."""
        return sorted(self.folder.glob(f"told/{name}"))

    def page_directory(self) -> Path:
        """Return the job's own page directory; fails while there is none."""
        (found,) = self.pages.glob("resilience-*/*")
        return found

    def monitor_pid(self) -> int:
        """Return the pid of the monitor in charge; fails while there is none."""
        return int(json.loads((self.page_directory() / "monitor.json").read_text())["pid"])

    def processes(self) -> dict[int, str]:
        """Return every process that belongs to the job, with its command line."""
        return {pid: command for pid, command in _all_processes() if self._is_ours(pid, command)}

    def left_behind(self, timeout_s: float = 10.0) -> list[str]:
        """Return processes and pages that are still there when the time is over; empty as soon as none is."""
        deadline = time.monotonic() + timeout_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def kill_everything(self) -> None:
        """SIGKILL all that is left of the job, and remove its pages."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait(PATIENCE_S)
        if not self.pages.is_mount():
            shutil.rmtree(self.pages, ignore_errors=True)

    def _left(self) -> list[str]:
        self.process.poll()
        processes = [f"{pid}: {command}" for pid, command in self.processes().items()]
        return processes + [str(path) for path in self.pages.glob("resilience-*/*")]

    def _is_ours(self, pid: int, command: str) -> bool:
        # The monitor has an environment of its own, but is told its page directory.
        return str(self.pages) in command or self.mark in _proc_text(pid, "environ")


@contextlib.contextmanager
def job(
    folder: Path,
    *args: str,
    env: dict[str, str] | None = None,
    pages: Path | None = None,
    within: tuple[str, ...] = (),
    command: tuple[str, ...] | None = None,
    terminal: int | None = None,
    fresh: bool = False,
    forked: bool = False,
    framework: str | None = None,
) -> Iterator[Job]:
    """Start `resilience run` with these arguments and, at the end, kill whatever is left of it.

    `args`: options, script and its arguments; scripts are those of `scripts/`. `pages` overrides the private
    page directory; `within` is a command that runs the launcher (such as `ip netns exec NAME`); `command`
    replaces the launcher by a foreign one, which `RESILIENCE_RUN_DIR` tells the run directory; `terminal` is a
    descriptor that becomes its standard input and output. `fresh`: a launcher that is exec'd and imports torch itself;
    else, where that can be, it is forked from a process that has done so (`warm.py`), and imported that `framework`:
    in tests, and where it is to be `forked`.
    """
    mark = uuid.uuid4().hex
    if pages is None:
        pages = (Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else folder) / f"fault-test-{mark}"
        pages.mkdir(mode=0o700)
    (folder / "told").mkdir(exist_ok=True)
    run_dir = folder / "run"
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own |= {"PYTHONPATH": str(PROJECT), "RESILIENCE_PAGE_DIR": str(pages), "TOLD": str(folder / "told"), _MARK: mark}
    foreign = command is not None
    if command is None:
        command = (sys.executable, "-m", "resilience_sdk.launcher", "--run-dir", str(run_dir))
    else:
        own["RESILIENCE_RUN_DIR"] = str(run_dir)
    own |= env or {}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        stdin, stdout = (0, out.fileno()) if terminal is None else (terminal, terminal)
        words = [*within, *command, *map(str, args)]
        # Figures are those of launchers that people start.
        fresh = fresh or not (forked or "pytest" in sys.modules)
        if not (fresh or within or foreign) and warm.why_not(words, own) is None:
            process: subprocess.Popen[bytes] | warm.WarmProcess = warm.start(
                words[3:], own, SCRIPTS, (stdin, stdout, err.fileno()), framework
            )
        else:
            process = subprocess.Popen(
                words,
                cwd=SCRIPTS,
                env=own,
                stdin=stdin,
                stdout=stdout,
                stderr=err,
                start_new_session=True,
            )
    started = Job(process, folder, run_dir, pages, mark)
    try:
        yield started
    finally:
        started.kill_everything()


def steps_lost(killed_at: int, resumed_at: int) -> tuple[int, int]:
    """Return how many steps may be lost by a kill: another rank may not have ended the step before it yet."""
    return killed_at - 1 - resumed_at, killed_at - resumed_at


def is_running(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    return _proc_text(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def _all_processes() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and is_running(int(name)):
            yield int(name), _proc_text(int(name), "cmdline").replace("\0", " ")


def _proc_text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
