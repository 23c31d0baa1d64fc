"""The runs that a dashboard shows: found below folders or in an index, each with a summary that is cheap to renew.

What has not changed is not read again. A run that is over costs three system calls at a look, one that goes on the
lines that are new in its journal. A look takes a bounded time: what there was no time for is there without a state, and
comes with the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.lease import current_holder, renewed_after_s
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import one_line
from resilience_sdk.errors import ConfigError
from resilience_sdk.goodput.ledger import Ledger
from resilience_sdk.goodput.summary import goodput
from resilience_sdk.history.indexer import NO_RUN, run_directories
from resilience_sdk.history.questions import History, IndexedRun
from resilience_sdk.incidents import IncidentStore
from resilience_sdk.incidents.record import headline
from resilience_sdk.report.outcome import read_outcome
from resilience_sdk.report.run_state import (
    RunState,
    is_held,
    last_sign,
    live_ranks_of,
    live_without_step_s,
    state_name,
    state_of,
)

_FIND_EVERY_S = 3.0
_ASK_EVERY_S = 10.0  # the index
_SETTLED_AFTER_S = 90.0  # longer than a lease is believed without being renewed
_LOOK_CLOSELY_EVERY_S = 60.0
_TRY_AGAIN_S = 30.0
_PATIENCE_S = 3.0
_MOST_RUNS = 1000
_MOST_OF_A_NAME = 40
_INCIDENT_ID = re.compile(r"\d{4,}-[a-z]+")


@attrs.frozen
class LastIncident:
    """The newest incident of a run, in one line."""

    id: str
    kind: str
    at: float | None
    cause: str = ""
    text: str = ""


@attrs.frozen
class RunSummary:
    """A run in one row. Times are Unix seconds; None: nothing is known."""

    id: str
    name: str
    place: str
    """The full path of its directory."""
    state: str
    """As `resilience status` has it; or stalled (running, and nothing comes on), unread (not yet looked at), gone (its
    directory is not here) or unreadable."""
    detail: str | None = None
    """What the state alone does not say: the verdict at its end, what stands still, what cannot be read."""
    attempt: int | None = None
    step: int | None = None
    step_is_global: bool | None = None
    goodput: float | None = None
    knows_replayed: bool = True
    at_most: bool = False
    """Whether steps that were done again are known; else the goodput is no more."""
    incidents: int = 0
    last_incident: LastIncident | None = None
    started_at: float | None = None
    last_at: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether a job runs in it."""
        return self.state in ("running", "stalled")


@attrs.frozen
class RunTable:
    """All runs at one moment: those that run first, then the newest."""

    rows: tuple[RunSummary, ...] = ()
    problems: tuple[str, ...] = ()
    hidden: int = 0
    """How many there are beyond the most that are shown."""


class RunSource(Protocol):
    """Names the run directories that there are."""

    @property
    def told(self) -> str:
        """Where they are looked for, in words."""
        ...

    every_s: float
    """How often it is asked."""

    def find(self) -> tuple[list[tuple[Path, IndexedRun | None]], list[str]]:
        """Return the real paths of all, with what an index knows of them; and what could not be looked at."""
        ...


class FoundRuns:
    """The run directories among some folders and right below them."""

    every_s = _FIND_EVERY_S

    def __init__(self, folders: Sequence[str]) -> None:
        """Look below `folders`, which need not be there yet."""
        self._folders = tuple(folders)
        self.told = ", ".join(self._folders)

    def find(self) -> tuple[list[tuple[Path, IndexedRun | None]], list[str]]:
        """Look once."""
        found: dict[Path, IndexedRun | None] = {}
        problems = []
        for folder in self._folders:
            try:
                os.listdir(folder)
                below, told = run_directories([folder])
                found |= dict.fromkeys(below)
                closed = sorted(one for one in told if not one.endswith(NO_RUN))  # those of others, on a shared disk
                more = f", and {len(closed) - 1} more like it" if len(closed) > 1 else ""
                problems += [f"{one}{more}" for one in closed[:1]]
            except FileNotFoundError:
                if len(self._folders) > 1:  # else the first run makes it
                    problems.append(f"there is no directory {folder}; its runs are shown once it is there")
            except OSError as error:
                problems.append(f"{folder} cannot be read: {error.strerror}")
        return list(found.items()), problems


class IndexedRuns:
    """The run directories that an index of `resilience history` knows. One thread at a time."""

    every_s = _ASK_EVERY_S

    def __init__(self, named: str) -> None:
        """Open the index; raises ConfigError and MissingExtraError."""
        self._history = History(named)
        self.told = "the index"

    def find(self) -> tuple[list[tuple[Path, IndexedRun | None]], list[str]]:
        """Ask once."""
        try:
            return [(Path(run.path), run) for run in self._history.runs()], []
        except ConfigError as error:
            return [], [str(error)]


def run_id(path: Path) -> str:
    """Return a run's name in addresses: what is readable of its own, and a sum over its path. It is no path."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", path.name)[:_MOST_OF_A_NAME].strip("-")
    return "-".join(filter(None, (readable, hashlib.sha256(os.fsencode(path)).hexdigest()[:10])))


_Times = tuple[int, ...]
_Files = dict[str, tuple[int, int, int]]


@attrs.define
class RunReader:
    """One run, and what is known of it so far. One thread at a time."""

    path: Path
    indexed: IndexedRun | None = None
    summary: RunSummary = attrs.field(
        default=attrs.Factory(
            lambda self: RunSummary(run_id(self.path), shown(self.path.name), shown(self.path), "unread"),
            takes_self=True,
        )
    )
    looked_s: float = float("-inf")
    _times: _Times = ()
    _files: _Files = attrs.field(factory=dict)
    _read_to: dict[str, int] = attrs.field(factory=dict)
    _ledger: Ledger = attrs.field(factory=Ledger)
    _state: RunState = attrs.field(factory=RunState)
    _incidents: dict[str, LastIncident] = attrs.field(factory=dict)
    _outcome: dict[str, Any] | None = None
    _unread: str | None = None
    """Journal files that cannot be read."""
    _torn: str | None = None
    """Why the outcome cannot be read."""
    _again_s: float = float("-inf")
    """When to try again, after a failure."""
    _looked_closely_s: float = float("-inf")
    _is_settled: bool = False

    def look(self, live: Sequence[Mapping[str, Any]] = ()) -> RunSummary:
        """Renew the summary; `live` are its ranks on this host. Never raises for what stands in the directory."""
        self.looked_s = time.monotonic()
        if self.looked_s < self._again_s:
            return self.summary
        try:
            self.summary = self._look(live)
        except FileNotFoundError:
            self.summary = self._gone()
        except Exception as error:  # noqa: BLE001 - whatever one run holds, the others are shown
            self._forget()
            self._again_s = self.looked_s + _TRY_AGAIN_S
            told = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self.summary = attrs.evolve(self._bare(), state="unreadable", detail=one_line(told))
        return self.summary

    def _look(self, live: Sequence[Mapping[str, Any]]) -> RunSummary:
        run_dir = RunDirectory(self.path)
        times = _times_of(run_dir)
        now_s = time.monotonic()
        is_due = now_s - self._looked_closely_s > _LOOK_CLOSELY_EVERY_S
        if self._is_settled and times == self._times and not live and not is_due:
            return self.summary
        self._looked_closely_s = now_s
        files = _files_of(run_dir)
        if files != self._files:
            self._take_in(run_dir, files)
        if times != self._times:
            self._read_records(run_dir)
        self._times = times
        newest = max((*times, *(file[1] for file in files.values())), default=0) / 1e9
        is_running = bool(live) or is_held(current_holder(run_dir), self._state, self._outcome)
        self._is_settled = not is_running and time.time() - newest > _SETTLED_AFTER_S
        return self._summarize(run_dir, live, is_running=is_running)

    def _take_in(self, run_dir: RunDirectory, files: _Files) -> None:
        """Read what is new; everything, where a file that was read is another one now."""
        for name, (size, _, inode) in self._files.items():
            if files.get(name, (0, 0, 0))[2] != inode or files[name][0] < min(size, self._read_to.get(name, 0)):
                self._forget()
                break
        contents = read_journal(run_dir.journal, since=self._read_to, only_ended=True)
        for event in contents.events:
            self._ledger.apply(event)
            if event["event"] == Event.INCIDENT.value and isinstance(known := event.get("id"), str):
                kind, cause = (one_line(event.get(key) or "unknown") for key in ("kind", "cause"))
                told = one_line(event.get("summary") or "")
                self._incidents[known] = LastIncident(one_line(known), kind, float(event["t"]), cause, told)
        self._state = state_of(contents.events, self._state)
        self._read_to |= contents.read_to
        self._files = files
        unread = "; ".join(contents.unreadable_files)
        self._unread = f"journal file not read: {one_line(unread)}" if unread else None

    def _read_records(self, run_dir: RunDirectory) -> None:
        """Read what is replaced as a whole: the outcome, and incidents that the journal does not tell of."""
        try:
            self._outcome, self._torn = read_outcome(run_dir), None
        except ConfigError as error:
            self._outcome, self._torn = None, one_line(error)
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(run_dir.incidents) if _INCIDENT_ID.fullmatch(name))
        for name in names[-1:]:
            if name not in self._incidents:
                with contextlib.suppress(KeyError, OSError):
                    incident = IncidentStore(self.path).get(name)
                    told = one_line(headline(incident).replace("`", ""))
                    self._incidents[name] = LastIncident(
                        name, incident.kind or "", incident.detected_at, one_line(incident.cause or "unknown"), told
                    )
        for name in names[:-1]:  # counted
            self._incidents.setdefault(name, LastIncident(name, "", None))

    def _summarize(self, run_dir: RunDirectory, live: Sequence[Mapping[str, Any]], *, is_running: bool) -> RunSummary:
        state, outcome = self._state, self._outcome
        word = state_name(run_dir, state, outcome, is_running=is_running)
        detail = self._unread or self._torn
        if word == "ended" and outcome is not None:
            detail = detail or one_line(outcome["verdict"] or "unknown")
        elif word == "running" and state.stall is not None:
            word, detail = "stalled", one_line(state.stall["text"])
        step, is_global = _newest_step(live, state)
        last = max(self._incidents.values(), key=lambda one: (one.at or 0.0, one.id), default=None)
        return attrs.evolve(
            self._bare(), state=word, detail=detail, attempt=state.attempt, step=step, step_is_global=is_global,
            goodput=self._goodput(run_dir, live, is_running=is_running), knows_replayed=self._ledger.knows_replayed,
            at_most=not (self._ledger.knows_replayed and self._ledger.knows_steps),
            incidents=len(self._incidents), last_incident=last, started_at=state.started_at,
            last_at=state.last_event_at if not is_running else None,
        )  # fmt: skip

    def _goodput(self, run_dir: RunDirectory, live: Sequence[Mapping[str, Any]], *, is_running: bool) -> float | None:
        if not self._ledger.accounts:
            return None
        # Not the whole summary: the limits of its MTTF would take longer than all else.
        renewed_s = None if is_running else renewed_after_s(run_dir)
        until = last_sign(self._ledger, is_running=is_running, renewed_after_s=renewed_s)
        stood_s = live_without_step_s(live, self._state) if is_running else 0.0
        return goodput(self._ledger.read(until, standing_s=stood_s).buckets)

    def _bare(self) -> RunSummary:
        return RunSummary(self.summary.id, self.summary.name, self.summary.place, "unread")

    def _gone(self) -> RunSummary:
        """Return what the index knows of a run whose directory is not here."""
        self._forget()
        bare = attrs.evolve(self._bare(), state="gone", detail="its directory is not here")
        if (known := self.indexed) is None:
            return bare
        last = None
        if known.incident is not None:
            name, kind, text = (one_line(told or "") for told in (known.incident, known.kind, known.summary))
            last = LastIncident(name, kind, known.incident_at, text=text)
        return attrs.evolve(
            bare, incidents=known.incidents, last_incident=last, started_at=known.first_at, last_at=known.last_at
        )

    def _forget(self) -> None:
        self._times, self._files, self._is_settled = (), {}, False
        self._outcome = self._unread = self._torn = None
        self._read_to, self._ledger, self._state, self._incidents = {}, Ledger(), RunState(), {}


def shown(name: object) -> str:
    """Return a name or path as text that can be encoded: those of files may be any bytes."""
    return one_line(str(name).encode("utf-8", "replace").decode())


def _times_of(run_dir: RunDirectory) -> _Times:
    """Return what changes when a file is made, replaced or removed; raises OSError where it is no run directory.

    Lease and outcome are replaced as a whole, so both show here.
    """
    times = [os.stat(run_dir.path).st_mtime_ns, os.stat(run_dir.journal).st_mtime_ns]
    with contextlib.suppress(OSError):
        times.append(os.stat(run_dir.incidents).st_mtime_ns)
    return tuple(times)


def _files_of(run_dir: RunDirectory) -> _Files:
    """Return size, time and number of each journal file."""
    files: _Files = {}
    with os.scandir(run_dir.journal) as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                with contextlib.suppress(OSError):
                    facts = entry.stat()
                    files[entry.name] = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
    return files


def mark_of(path: Path) -> object:
    """Return what is another thing once there is more to tell of a run; None while a job runs in it: always."""
    run_dir = RunDirectory(path)
    try:
        if current_holder(run_dir) is not None or live_ranks_of([str(path)]):
            return None
        return _times_of(run_dir), _files_of(run_dir)
    except OSError as error:
        return str(error)


def _newest_step(live: Sequence[Mapping[str, Any]], state: RunState) -> tuple[int | None, bool | None]:
    steps = [(rank["step"], rank["step_is_global"]) for rank in live if rank["step"] is not None]
    ranks = state.ranks.values()
    steps = steps or [(rank.reached, rank.step_is_global) for rank in ranks if rank.reached is not None]
    if steps:
        return max(steps, key=lambda one: one[0])
    return state.checkpoint_step, None if state.checkpoint_step is None else True


class RunBook:
    """Every run of a source by its id. Any thread; one at a time looks, others meanwhile get what was known before."""

    def __init__(self, source: RunSource) -> None:
        """Look at nothing yet."""
        self.source = source
        self._lock = threading.Lock()
        self._readers: dict[Path, RunReader] = {}
        self._ids: dict[str, Path] = {}
        self._problems: tuple[str, ...] = ()
        self._hidden = 0
        self._found_s = float("-inf")

    def table(self, within_s: float) -> RunTable:
        """Look at the runs again, for about as long; those that were never looked at come last."""
        if self._lock.acquire(timeout=within_s):
            try:
                self._look(within_s)
            finally:
                self._lock.release()
        rows = sorted((reader.summary for reader in list(self._readers.values())), key=_place_in_table)
        return RunTable(tuple(rows), self._problems, self._hidden)

    def path_of(self, identity: str) -> Path | None:
        """Return the directory of a run that is known; a new one is looked for."""
        # Whoever looks may wait for a file system that hangs: what is known is answered meanwhile.
        if identity not in self._ids and self._lock.acquire(timeout=_PATIENCE_S):
            try:
                self._find()
            finally:
                self._lock.release()
        return self._ids.get(identity)

    def _look(self, within_s: float) -> None:
        until_s = time.monotonic() + within_s
        self._find()
        live = live_ranks_of({str(path) for path in self._readers})
        # Those that were not looked at for longest come first, so that each gets its turn.
        for reader in sorted(self._readers.values(), key=lambda reader: reader.looked_s):
            reader.look(live.get(str(reader.path), ()))
            if time.monotonic() >= until_s:
                break

    def _find(self) -> None:
        now_s = time.monotonic()
        if now_s - self._found_s < self.source.every_s:
            return
        found, problems = self.source.find()
        self._found_s, self._problems = now_s, tuple(map(one_line, problems))
        if problems and not found:
            return  # what was known stays
        if len(found) > _MOST_RUNS:
            found.sort(key=lambda one: -_changed_at(*one))
        self._hidden = max(0, len(found) - _MOST_RUNS)
        readers: dict[Path, RunReader] = {}
        for path, indexed in found[:_MOST_RUNS]:
            reader = readers[path] = self._readers.get(path) or RunReader(path)
            reader.indexed = indexed
        if readers.keys() != self._readers.keys():
            order = sorted(readers.values(), key=lambda reader: -_changed_at(reader.path, reader.indexed))
            readers = {reader.path: reader for reader in order}
        self._readers = readers
        self._ids = {reader.summary.id: path for path, reader in readers.items()}


def _changed_at(path: Path, indexed: IndexedRun | None) -> float:
    if indexed is not None:
        return indexed.last_at or 0.0
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _place_in_table(row: RunSummary) -> tuple[bool, bool, float, str]:
    return row.state == "unread", not row.is_live, -(row.started_at or 0.0), row.name
