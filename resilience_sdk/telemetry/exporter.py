"""The exporter's process: one per node and run, beside the training, until the job is over and all is delivered.

Each sink has a thread: read, translate, send, remember how far, and try again for ever. Sinks share nothing, so that
one that is slow, dead or stuck delays no other. Nothing waits in memory: what a sink has not taken stands in the
journal, and its position file says from where.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core import console, environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.json_records import from_values, to_text
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings, load
from resilience_sdk.errors import MissingExtraError
from resilience_sdk.system import hostinfo, programs, same_device
from resilience_sdk.system.file_lock import file_lock
from resilience_sdk.telemetry.sinks import named_sinks, wanted_sinks
from resilience_sdk.telemetry.sinks.base import Sink, TelemetryOrigin
from resilience_sdk.telemetry.sinks.prometheus import LONGEST_STAY_S
from resilience_sdk.telemetry.tail import Follower, Live, load_position, save_position

_POLL_S = 1.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FINISHING_PAUSE_S = 0.2
_LONGEST_FINISHING_PAUSE_S = 2.0  # many nodes end at once, perhaps before a receiver that is asked too often
STUCK_S = 120.0
"""More than any sink waits by its design: one that needs longer has not failed, and does not answer either."""


class Worker:
    """Serves one sink until it is told to finish, or lacks its library.

    `note_failure` and `note_recovery` are called on its thread.
    """

    def __init__(
        self,
        sink: Sink,
        journal: Path,
        *,
        note_failure: Callable[[str, BaseException], None],
        note_recovery: Callable[[str, float], None],
        first_pause_s: float = _FIRST_PAUSE_S,
        poll_s: float = _POLL_S,
    ) -> None:
        """Serve `sink` with the journal directory `journal`, from where an earlier exporter has left it.

        The journal is looked at every `poll_s` seconds; after a failure `first_pause_s` pass, then twice that, and on.
        """
        self.sink = sink
        self.lacks_library = False
        """Whether it has given up, since what the sink is written with cannot be imported."""
        self._note_failure, self._note_recovery = note_failure, note_recovery
        self._first_pause_s, self._poll_s = first_pause_s, poll_s
        self._wake = threading.Event()
        self._finishing = False
        self._delivered = threading.Event()
        self._turn_began: float | None = None
        self._told_end = False
        self._told_unsaved = False
        self._has_sent = False
        self._items: deque[Any] = deque()
        self._torn = 0
        self._refreshed_at = float("-inf")
        self._failing_since: float | None = None
        delivered, sink.memory = load_position(self._file)
        self._saved = (delivered, dict(sink.memory))
        self._follower = Follower(journal, sink.place.host, delivered)
        # Never waited for by the interpreter: a library may hang in it.
        self._thread = threading.Thread(target=self._run, name=f"resilience-sink-{sink.name}", daemon=True)

    @property
    def _file(self) -> Path:
        return self.sink.place.state_dir / f"{self.sink.name}.json"

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def finish(self) -> None:
        """Ask for what is left to be delivered, and for the end; returns at once."""
        self._finishing = True
        self.sink.note_end()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait until all was delivered, at most so long; tell whether it was."""
        return self._delivered.wait(timeout_s)

    def is_being_fetched(self) -> bool:
        """Tell whether the sink has taken everything, and stays for those who have yet to fetch the end from it."""
        return self._delivered.is_set() and self._thread.is_alive()

    def is_stuck(self) -> bool:
        """Tell whether the sink has not come back for so long that it will not by itself. Any thread."""
        began = self._turn_began
        return began is not None and time.monotonic() - began > STUCK_S

    # -- the thread

    def _run(self) -> None:
        pause_s, is_open, in_haste = self._first_pause_s, False, False
        while True:
            self._turn_began = time.monotonic()
            try:
                if not is_open:
                    self.sink.open()
                    is_open = True
                is_over = self._finishing  # asked before the reading: what is read then is all there is
                more = self._turn(is_over=is_over)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, it is told and tried again
                if self._failing_since is None:
                    self._failing_since = time.monotonic()
                    self._note_failure(self.sink.name, error)
                if isinstance(error, MissingExtraError):
                    self.lacks_library = True
                    self._delivered.set()  # this process will not find it later: nobody need wait
                    return
                if self._finishing and self.sink.is_fetched and not is_open:
                    self._delivered.set()  # who was to come for it cannot, and will not any more
                    return
                if is_open:  # what is broken may come again when it is opened anew
                    is_open = False
                    self._close()
                self._turn_began = None
                self._refreshed_at = float("-inf")
                self._wake.wait(pause_s)
                self._wake.clear()
                if self._finishing and not in_haste:
                    in_haste, pause_s = True, _FINISHING_PAUSE_S
                else:
                    longest_s = _LONGEST_FINISHING_PAUSE_S if self._finishing else _LONGEST_PAUSE_S
                    pause_s = min(2 * pause_s, longest_s)
                continue
            self._turn_began = None
            if not more:  # so it was refreshed, too: to take items is not yet to be well, it may have laid them aside
                pause_s = self._first_pause_s
                if self._failing_since is not None:
                    self._note_recovery(self.sink.name, time.monotonic() - self._failing_since)
                    self._failing_since = None
                if is_over:
                    break
                self._wake.wait(self._poll_s)
        while not self._remember():  # the sink stays open meanwhile: somebody may be about to fetch the end from it
            time.sleep(_FINISHING_PAUSE_S)
        self._delivered.set()
        with contextlib.suppress(Exception):
            self.sink.stay_until_fetched()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            self.sink.close()

    def _turn(self, *, is_over: bool) -> bool:
        """Deliver what is new; tell whether there may be more at once."""
        more = self._take() if not self._items else True
        if is_over and not more and not self._told_end:
            self._told_end = True
            self._items.extend(self.sink.finish())
        self._deliver()
        now = time.monotonic()
        if not more and (is_over or now - self._refreshed_at >= self.sink.place.interval_s):
            self.sink.refresh()
            self._refreshed_at = now
        return more

    def _take(self) -> bool:
        """Read what comes next and translate it: once, however often it has to be sent."""
        lines = self._follower.read()
        for line in lines:
            try:
                items: Sequence[Any] = self.sink.digest(line)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - one line that is not understood must not cost the others
                self._note_failure(self.sink.name, error)
                continue
            if line.is_new:
                self._items.extend(items)
        torn = self._follower.torn
        self.sink.note_torn(torn - self._torn)
        self._torn = torn
        return bool(lines)

    def _deliver(self) -> None:
        if self._items:
            self._has_sent = True
            self.sink.send(self._items)
            assert not self._items, f"{self.sink.name} left items without an error"
        self._remember()

    def _remember(self) -> bool:
        """Write how far this sink has come, where that is news; tell whether the next exporter sends nothing again."""
        now = (self._follower.position, dict(self.sink.memory))
        if now != self._saved:
            try:
                save_position(self._file, *now)
            except OSError as error:
                # Served all the same: a full disk is when people look at metrics. Told once, tried at every turn.
                if not self._told_unsaved:
                    self._told_unsaved = True
                    self._note_failure(f"position of {self.sink.name}", error)
                return not self._has_sent and now[1] == self._saved[1]
            self._saved = now
        return True


DIRECTORY = "telemetry"
_LOOK_S = 0.5
_FETCHED_LOOK_S = 0.1
_ATTENDED_S = 1.5  # a little less than the launcher waits
_DELIVERY_S = 15.0
_STAY_S = LONGEST_STAY_S + 5.0
_BY_HAND_S = 60.0  # a person asked for nothing else
_LATER = (
    "The journal has it all: `python -m resilience_sdk.telemetry RUN_DIR` with the same settings goes on from there"
)
_RESTART_WITHIN_S = 70.0  # a foreign launcher that starts its ranks again lets go of the directory meanwhile
_NICENESS = 10
_MOST_WORDS = 300
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@attrs.frozen
class ExporterTask:
    """What an exporter is told by who starts it, on standard input: settings may hold secrets."""

    run_dir: Path
    job: str
    settings: Settings
    pages: Path | None = None
    """The job's page directory; None: it is looked for."""
    parent_pid: int | None = None
    """The launcher: when it is gone the job is over. None: when nobody holds the run directory any more."""
    parent_ticks: int | None = None
    since: float = 0.0
    """Unix time from which on events are of the job that runs; 0: nobody was waited for, and the newest ones are."""

    def to_json(self) -> str:
        """Return the text that `task_from_json` reads."""
        return to_text(self)


@attrs.define
class ExporterEnd:
    """Set once the exporter is to end: by the launcher, or by a person."""

    event: threading.Event = attrs.field(factory=threading.Event)
    launcher_said_over: bool = False
    """False as well while nobody said anything."""
    is_final: bool = False
    """Whether it is not even to wait for somebody who may fetch the end."""


class JobWatch:
    """Tells whether the job of a task is over."""

    def __init__(self, task: ExporterTask) -> None:
        """Look for the first time: where nobody runs, the job is over."""
        self._task = task
        self._was_held = False
        self._free_since: float | None = None

    def is_over(self) -> bool:
        """Look again."""
        task = self._task
        if task.parent_pid is not None:
            return hostinfo.process_is_gone(task.parent_pid, task.parent_ticks)
        if current_holder(RunDirectory(task.run_dir)) is not None:
            self._was_held, self._free_since = True, None
            return False
        now = time.monotonic()
        self._free_since = now if self._free_since is None else self._free_since
        return not self._was_held or now - self._free_since > _RESTART_WITHIN_S

    def ended_in_order(self) -> bool:
        """Tell, of a job without a launcher of ours, whether it has let go of its directory."""
        return not self._was_held or not RunDirectory(self._task.run_dir).lease.exists()


def task_from_json(text: str) -> ExporterTask:
    """Return what `Task.to_json` described; raises ValueError for anything else."""
    return from_values(ExporterTask, json.loads(text))


def serve(task: ExporterTask, ending: ExporterEnd) -> int:
    """Export until the end or that of the job; returns 0 when all was delivered, 1 when something was left.

    `GAVE_UP` where a launcher has started it and no sink is to be had.
    """
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)  # the training comes first
    # A library that logs each try to reach somebody would fill the job's screen; that it fails is told once, by us.
    logging.lastResort = logging.NullHandler()
    host = hostinfo.host_name()
    console.bind(node=host)
    console.use_json(task.settings.event_log == "json")
    try:
        state_dir = _make_state_dir(task, host)
    except OSError as error:  # a full or read-only disk: a line on the screen, and no stack at each new try
        say(f"telemetry: nothing can be exported: {error}")
        return 1
    watch = JobWatch(task)
    with _only_one(state_dir, watch, ending.event) as mine:
        if not mine:
            return 0
        code, workers = _export(task, host, state_dir, ending, watch)
    # Without the lock: whoever exports the next job of this run and host need not wait for this.
    _stay_until_fetched(workers, ending, attended=task.parent_pid is not None)
    return code


def _make_state_dir(task: ExporterTask, host: str) -> Path:
    """Make the directory of this host's positions, as private as the run directory."""
    path = task.run_dir
    same_device.remember(path)
    mode = path.stat().st_mode & 0o750
    for name in (DIRECTORY, host.replace("/", "_")):
        path = path / name
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            path.chmod(mode)
    return path


@contextlib.contextmanager
def _only_one(state_dir: Path, watch: JobWatch, over: threading.Event) -> Iterator[bool]:
    """Wait until no other exporter serves this host (two launchers on one); yields False if the job ended meanwhile."""
    with contextlib.ExitStack() as held:
        while True:
            try:
                if held.enter_context(file_lock(state_dir / "exporter.lock")):
                    break
            except OSError:
                break  # no locks on this file system: better twice than not at all
            held.close()
            say_once(
                f"exporter {state_dir}",
                "telemetry: another exporter serves this run on this node, with sinks of its own; this one begins when "
                "that one has ended",
            )
            if over.wait(_LOOK_S) or watch.is_over():
                yield False
                return
        yield True


def _export(
    task: ExporterTask, host: str, state_dir: Path, ending: ExporterEnd, watch: JobWatch
) -> tuple[int, list[Worker]]:
    run_dir = RunDirectory(task.run_dir)
    live = Live(task.run_dir, task.pages, environ.environment(), since=task.since)
    journal = Journal(run_dir.journal, writer=DIRECTORY, host=host, boot_id=hostinfo.boot_id(), job=task.job)
    teller = _Teller(journal)
    place = TelemetryOrigin(task.run_dir, host, live, state_dir, task.settings.telemetry_interval)
    lacking = load.missing(task.settings)
    for name, why in lacking.items():
        say(f"telemetry: {why}")
        journal.emit(Event.DEGRADED, what=f"sink {name}", why=why)

    def leave_out(name: str, error: Exception) -> None:
        lacking[name] = f"the sink {name} is left out: {type(error).__name__}: {error}"
        say(f"telemetry: {lacking[name]}")
        journal.emit(Event.DEGRADED, what=f"sink {name}", why=lacking[name])

    sinks = [
        *wanted_sinks(load.without(task.settings, lacking), place),
        *named_sinks(task.settings, place, failed=leave_out),
    ]
    workers = [
        Worker(sink, run_dir.journal, note_failure=teller.failed, note_recovery=teller.recovered) for sink in sinks
    ]
    if not workers and lacking:
        return programs.GAVE_UP if task.parent_pid is not None else 1, []
    if not workers:
        say("no sink is set: see docs/telemetry.md for the settings that name one")
        return 0, []
    if over := watch.is_over():  # asked first: the time since the last event of a job that was killed is no training
        _note_over(live, task, ending, watch)
    for worker in workers:
        worker.start()
    while not over and not ending.event.wait(_LOOK_S) and not watch.is_over():
        for worker in workers:
            if worker.is_stuck():
                teller.failed(worker.sink.name, TimeoutError(f"no answer within {STUCK_S:.0f} s"))
    if not over:
        _note_over(live, task, ending, watch)
    left = _deliver_rest(workers, alone=task.parent_pid is not None)
    for worker in left:
        teller.left_behind(worker.sink.name)
    is_complete = not (left or lacking or any(worker.lacks_library for worker in workers))
    return int(not is_complete), workers if live.ended_in_order else []


def _note_over(live: Live, task: ExporterTask, ending: ExporterEnd, watch: JobWatch) -> None:
    live.ended_in_order = _ended_in_order(task, ending, watch)
    live.up = False


def _ended_in_order(task: ExporterTask, ending: ExporterEnd, watch: JobWatch) -> bool:
    """Tell whether the job has ended, as opposed to been killed or left to go on without an exporter."""
    if task.parent_pid is None:
        return watch.ended_in_order()
    ending.event.wait(_LOOK_S)  # a launcher that is gone may have said it a moment ago
    return ending.launcher_said_over


def _stay_until_fetched(workers: list[Worker], ending: ExporterEnd, *, attended: bool) -> None:
    """Serve the last metrics until those who fetch them have, which takes a minute at most; nobody waits for us."""
    staying = [worker for worker in workers if worker.is_being_fetched()]
    if not staying or ending.is_final:
        return
    if attended:
        _let_go_of_the_launcher()
    # A library that closes its connection may wait for hours for a network that is gone.
    until = time.monotonic() + _STAY_S
    while not ending.is_final and time.monotonic() < until and any(worker.is_being_fetched() for worker in staying):
        time.sleep(_FETCHED_LOOK_S)


def _deliver_rest(workers: list[Worker], *, alone: bool) -> list[Worker]:
    """Let every sink take what is left, for a while; return those that did not. `alone`: nobody waits for us."""
    for worker in workers:
        worker.finish()
    began = time.monotonic()
    left = _unfinished(workers, began + _ATTENDED_S)
    if left and alone:
        names = ", ".join(worker.sink.name for worker in left)
        say(
            f"telemetry: {names} could not take everything yet; it is tried for {_DELIVERY_S:.0f} s more in the "
            f"background. {_LATER}"
        )
        _let_go_of_the_screen()
    left = _unfinished(left, began + (_DELIVERY_S if alone else _BY_HAND_S))
    if left and not alone:
        say(f"telemetry: not all was delivered to {', '.join(worker.sink.name for worker in left)}. {_LATER}")
    return left


def _unfinished(workers: list[Worker], until: float) -> list[Worker]:
    return [worker for worker in workers if not worker.join(max(0.0, until - time.monotonic()))]


def _let_go_of_the_launcher() -> None:
    """Close what the launcher and its user wait for, and what they gave us to listen to."""
    _let_go_of_the_screen()
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nowhere, 0)
        os.close(nowhere)


def _let_go_of_the_screen() -> None:
    """Close what a pipe of the launcher's user reads: `resilience run ... | tee log` ends with the run, not with us."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


class _Teller:
    """Tells the journal of a sink that fails, and that it works again: once each, or the lines would feed the sink."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def failed(self, sink: str, error: BaseException) -> None:
        """Tell the first failure of a sink. Its thread."""
        if self._is_first(f"failed {sink}"):
            why = redact_text(f"{type(error).__name__}: {error}")[:_MOST_WORDS]
            self._journal.emit(Event.DEGRADED, what=f"sink {sink}", why=why)
            what_next = "is left out" if isinstance(error, MissingExtraError) else "is tried again"
            say_once(f"sink {sink}", f"telemetry: {sink} fails, and {what_next} ({why}); the training goes on")

    def left_behind(self, sink: str) -> None:
        """Tell the journal of a sink that has not taken everything by the end, unless it was told before.

        One may fail later than that, or never answer.
        """
        has_recovered = f"recovered {sink}" in self._told
        if self._is_first(f"{'left' if has_recovered else 'failed'} {sink}"):
            self._journal.emit(Event.DEGRADED, what=f"sink {sink}", why="it has not taken everything by the end")

    def recovered(self, sink: str, after_s: float) -> None:
        """Tell the first recovery of a sink. Its thread."""
        if self._is_first(f"recovered {sink}"):
            self._journal.emit(Event.HEALTH, what=f"sink {sink}", ok=True, why=None, waited_s=round(after_s, 3))

    def _is_first(self, what: str) -> bool:
        with self._lock:
            is_first = what not in self._told
            self._told.add(what)
            return is_first


def main_from_launcher() -> int:
    """Serve the task in the first line of standard input, until the input ends.

    Signals mean nothing here: the job is ended by signals to all of its processes, long before it is over.
    """
    for number in (*_ENDING, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    task = task_from_json(sys.stdin.readline())
    ending = ExporterEnd()

    def listen() -> None:
        ending.launcher_said_over = bool(sys.stdin.readline())
        ending.event.set()

    threading.Thread(target=listen, name="resilience-launcher", daemon=True).start()
    return serve(task, ending)


@contextlib.contextmanager
def ending_with_signals() -> Iterator[ExporterEnd]:
    """Yield an ending that a person brings about with Ctrl-C or SIGTERM in the block. Main thread."""
    ending = ExporterEnd()

    def stop(*_: object) -> None:
        ending.is_final = True
        ending.event.set()

    before = {number: signal.signal(number, stop) for number in _ENDING}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
