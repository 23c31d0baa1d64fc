"""A run that somebody looks on, again and again: its journal, its pages and what else it publishes, read as they grow.

Each look costs what is new: of the journal the lines that were written since, of the files of the run directory one
system call each while they stay as they are. It only reads, never waits for anybody, and never raises for what others
write; what cannot be read is told in `LiveView.problems`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from resilience_sdk.core import environ, job_config
from resilience_sdk.core.atomic_write import Version, version_of
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.lease import current_holder, renewed_after_s
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.errors import ConfigError
from resilience_sdk.goodput.ledger import Ledger
from resilience_sdk.goodput.memory import RankMemory, growing_words, memory_of
from resilience_sdk.goodput.step_time import StepTime, step_time_of
from resilience_sdk.incidents import Incident, IncidentStore, headline
from resilience_sdk.incidents.stalls import EXIT
from resilience_sdk.recorder.page_directory import page_directories
from resilience_sdk.report import live_view
from resilience_sdk.report.event_words import NewestEvents
from resilience_sdk.report.live_view import LiveView, RankRow
from resilience_sdk.report.outcome import read_outcome
from resilience_sdk.report.ranks_here import RanksHere, StallWords, open_pages
from resilience_sdk.report.run_state import (
    RankHistory,
    RunState,
    goodput_now,
    is_held,
    standing_now,
    state_name,
    state_of,
    without_step_s,
)
from resilience_sdk.straggler.published import DIRECTORY, REPORT, VERDICTS, StandingVerdicts, read_report
from resilience_sdk.straggler.reports import Report

_SETTLING_S = 0.5  # events younger than this wait for what another process tells of the moment before
_LOOK_FOR_JOBS_S = 5.0  # of page directories that are made anew
_SHARE = 0.02  # of the time, that goes into looking for new lines, where a journal has thousands of files
_LONGEST_PAUSE_S = 10.0
_SPEED_S = 30.0  # that steps per second are counted over
_MOST_INCIDENTS = 3
_MOST_VERDICTS = 8
_NOT_STEPPING = frozenset({live_view.GONE, live_view.DONE, "left"})


class RunWatch:
    """One run directory. One thread."""

    def __init__(
        self, run_dir: RunDirectory, env: Mapping[str, str] | None = None, *, settling_s: float = _SETTLING_S
    ) -> None:
        """Look at `run_dir`; the page directories of this host are found by `env`, else this process's environment.

        Events younger than `settling_s` wait for those that other processes tell of the moment before, while it runs.
        """
        self._run_dir = run_dir
        self._path = os.path.realpath(run_dir.path)
        self._env = environ.environment() if env is None else env
        self._journal = _JournalSoFar(run_dir)
        self._settling_s = settling_s
        self._is_running = False
        self._here: dict[str, tuple[Version | None, RanksHere]] = {}
        self._looked_for_jobs_at = float("-inf")
        self._standing: _Kept[StandingVerdicts | None] = _Kept()
        self._report: _Kept[Report | None] = _Kept()
        self._outcome: _Kept[Mapping[str, Any] | None] = _Kept()
        self._written: _Kept[list[Incident]] = _Kept()
        self._steps: deque[tuple[float, int, bool]] = deque()
        self._steps_of: object = None

    def close(self) -> None:
        """Give back what is held of the ranks."""
        for _, here in self._here.values():
            here.close()
        self._here.clear()

    def sample(self) -> None:
        """Look at ranks that do not move, between two looks that are far apart."""
        for _, here in self._here.values():
            here.sample()

    def look(self, *, sort: str = live_view.SORTS[0], first: int = 0, most: int = live_view.MOST_ROWS) -> LiveView:
        """Return the run as it is now, with the rows from number `first` on in that order."""
        problems: list[str] = []
        self._find_jobs(problems)
        if self._is_running:
            self._journal.read_calmly(self._settling_s)
        else:
            self._journal.read()
        readers = [here for _, here in self._here.values()]
        told = [row for here in readers for row in here.rows(self._journal.stall)]
        newest = max((here.attempt for here in readers if here.attempt is not None), default=None)
        alive = any(row.seen == live_view.PAGE and row.activity != live_view.GONE for row in told)
        holder = current_holder(self._run_dir)
        outcome = self._outcome_now(problems)
        is_running = alive or is_held(holder, self._journal.state, outcome)
        if not is_running and self._is_running:
            self._journal.read()  # what was told at its end
        self._is_running = is_running
        state = self._journal.state
        problems += self._journal.problems
        rows = self._rows(told, state, newest, is_running=is_running)
        stood_s = _standing_s(rows, max((here.mean_step_s for here in readers), default=0.0), state)
        speed = self._speed(rows, state, stands=stood_s > 0)
        rows = live_view.with_lags(rows, speed)
        standing = self._verdicts(state, problems, is_running=is_running)
        rows = self._with_scores(rows, standing, state)
        memory = memory_of(self._journal.memory())
        rows = _with_memory(rows, memory)
        name = state_name(self._run_dir, state, outcome, is_running=is_running)
        after_s = None if is_running else renewed_after_s(self._run_dir)  # it asks for every file of the journal
        summary = goodput_now(self._journal.ledger, is_running=is_running, renewed_after_s=after_s, standing_s=stood_s)
        step, is_global = self._step(rows, state)
        incidents = self._incidents(problems)
        view = LiveView(
            run_dir=str(self._run_dir.path),
            at=time.time(),
            state=name,
            outcome=None if is_running or outcome is None else _outcome_words(outcome),
            job=state.job,
            attempt=state.attempt,
            attempts=state.attempts,
            world_size=state.world_size,
            nodes=max([len({row.node for row in rows if row.node}), *(here.nodes for here in readers)], default=0)
            or None,
            started_at=state.started_at,
            step=step,
            step_is_global=is_global,
            steps_per_s=speed if is_running else None,
            wall_s=summary.wall_s,
            standing_s=round(min(stood_s, summary.wall_s), 3) if is_running else 0.0,
            goodput=summary.goodput,
            ettr=summary.ettr,
            knows_replayed=summary.knows_replayed,
            at_most=summary.is_bound,
            buckets={bucket.value: seconds for bucket, seconds in summary.buckets.items() if seconds > 0},
            stall=state.stall if is_running else None,
            stragglers=tuple(v.text() for v in standing.verdicts[:_MOST_VERDICTS]) if standing is not None else (),
            memory_grows=tuple(growing_words(memory)) if is_running else (),
            incidents=len(incidents),
            last_incidents=tuple(incidents[-_MOST_INCIDENTS:]),
            checkpoint_step=state.checkpoint_step,
            checkpoint_at=state.checkpoint_at,
            events=self._journal.events.all(),
            problems=tuple(problems),
        )
        return live_view.with_rows(view, rows, sort, first, most)

    # -- ranks

    def _find_jobs(self, problems: list[str]) -> None:
        """Look for page directories of jobs that write into this run directory, and forget those that are gone."""
        now = time.monotonic()
        stale = [
            path for path, (version, _) in self._here.items() if version_of(f"{path}/{job_config.FILE}") != version
        ]
        if not stale and self._here and now < self._looked_for_jobs_at + _LOOK_FOR_JOBS_S:
            return
        self._looked_for_jobs_at = now
        for path in stale:
            self._here.pop(path)[1].close()
        found = [pages for pages in page_directories(self._env) if str(pages) not in self._here]
        for pages, here in open_pages(found, self._path, problems):
            self._here[str(pages)] = job_config.version(pages), here

    def _rows(self, told: list[RankRow], state: RunState, attempt: int | None, *, is_running: bool) -> list[RankRow]:
        """Return a row for each rank of the newest attempt, of the best that is known of it."""
        if not is_running:
            told, attempt = [], None
        if attempt is not None and state.attempt is not None and state.attempt > attempt:
            told = []  # pages of ranks that are going
        # Several nodes of a job on one host tell of one another's ranks, too.
        rows = {row.rank: row for row in sorted(told, key=lambda row: row.seen == live_view.PAGE)}
        history = state.ranks if attempt is None or state.attempt == attempt else {}
        for rank, known in history.items():
            row = rows.get(rank)
            if row is None:
                rows[rank] = _row_of(known, self._journal.stall, state, is_running=is_running)
            elif known.state == "exited" and row.activity in (live_view.GONE, "left"):
                rows[rank] = attrs.evolve(row, detail=_ending_words(known))
        return [rows[rank] for rank in sorted(rows)]

    def _speed(self, rows: list[RankRow], state: RunState, *, stands: bool) -> float | None:
        """Return steps per second: of the last half minute as seen, else what the monitors have measured.

        Time in which the run stands (`stands`: it does so now) is no time of a step.
        """
        steps = [row.step for row in rows if row.step is not None and row.seen == live_view.PAGE]
        key = state.job, state.attempt
        now = time.monotonic()
        if key != self._steps_of:
            self._steps_of = key
            self._steps.clear()
        if steps:
            self._steps.append((now, max(steps), stands))
            while now - self._steps[0][0] > _SPEED_S:
                self._steps.popleft()
            stood_in = {step for _, step, stood in self._steps if stood}
            pairs = [(a, b) for a, b in itertools.pairwise(self._steps) if a[1] not in stood_in]
            seconds = sum(b[0] - a[0] for a, b in pairs)
            if seconds >= 1.0:
                return max(0.0, sum(b[1] - a[1] for a, b in pairs) / seconds)
        known = self._measured(state)
        return 1.0 / known.recent_s if known is not None and known.recent_s > 0 else None

    def _measured(self, state: RunState) -> StepTime | None:
        """Return what the monitors have measured of the steps of the newest attempt."""
        known = step_time_of(self._journal.step_times())
        is_now = known is not None and known.attempt == state.attempt and known.job == str(state.job)
        return known if is_now else None

    def _step(self, rows: list[RankRow], state: RunState) -> tuple[int | None, bool | None]:
        """Return the furthest step, and whether it is global; where nobody is seen, as the journal's events tell it."""
        with_steps = [row for row in rows if row.step is not None]
        seen = [row for row in with_steps if row.seen != live_view.JOURNAL] or with_steps
        furthest = max(seen, key=lambda row: row.step or 0, default=None)
        if furthest is None:
            return None, None
        measured = self._measured(state) if furthest.seen == live_view.JOURNAL else None
        if measured is not None and furthest.step_is_global is False:
            return max(furthest.step or 0, measured.steps), False
        return furthest.step, furthest.step_is_global

    # -- what is published

    def _verdicts(self, state: RunState, problems: list[str], *, is_running: bool) -> StandingVerdicts | None:
        path = self._run_dir.path / DIRECTORY / VERDICTS
        try:
            version = version_of(path), state.attempt, state.job, is_running
            found = self._standing.get(version, lambda: standing_now(self._run_dir, state, is_running=is_running))
        except PermissionError as error:
            problems.append(str(error))
            return None
        return found if found is not None and found.enabled else None

    def _with_scores(self, rows: list[RankRow], standing: StandingVerdicts | None, state: RunState) -> list[RankRow]:
        """Return the rows with the scores of the newest report, where that is of this attempt."""
        version = version_of(self._run_dir.path / DIRECTORY / REPORT)
        report = None
        if version is not None and state.attempt_at is not None and version[1] / 1e9 >= state.attempt_at:
            try:
                report = self._report.get(version, lambda: read_report(self._run_dir.path))
            except (PermissionError, ValueError):
                report = None  # `_verdicts` has said so: they lie in one directory
        scores = (report.gpu_relative or report.overall_relative) if report is not None else {}
        slow = {rank for verdict in (standing.verdicts if standing is not None else ()) for rank in verdict.ranks}
        if not scores and not slow:
            return rows
        return [attrs.evolve(row, score=scores.get(row.rank), is_slow=row.rank in slow) for row in rows]

    def _incidents(self, problems: list[str]) -> list[tuple[float, str, str]]:
        """Return the incidents by time: those of the journal, and those that it does not tell of."""
        known = dict(self._journal.incidents)
        try:
            version = version_of(self._run_dir.incidents)
            for incident in self._written.get(version, IncidentStore(self._run_dir.path).all):
                words = headline(incident).replace("`", "")
                known.setdefault(str(incident.id), (incident.detected_at or 0.0, str(incident.id), words))
        except OSError as error:
            problems.append(f"cannot read {self._run_dir.incidents}: {error.strerror}")
        return sorted(known.values())

    def _outcome_now(self, problems: list[str]) -> Mapping[str, Any] | None:
        version = version_of(self._run_dir.outcome), version_of(self._run_dir.finished)
        try:
            return self._outcome.get(version, lambda: read_outcome(self._run_dir))
        except ConfigError as error:
            problems.append(str(error))
            return None


_Value = TypeVar("_Value")


class _Kept(Generic[_Value]):
    """What was read of a file, until its version changes."""

    def __init__(self) -> None:
        self._known: tuple[object, _Value] | None = None

    def get(self, version: object, read: Callable[[], _Value]) -> _Value:
        """Return the value; reads where the version is another one. Raises what `read` does, each time."""
        if self._known is None or self._known[0] != version:
            self._known = version, read()
        return self._known[1]


class _JournalSoFar:
    """The events of a journal, taken in as they are written."""

    def __init__(self, run_dir: RunDirectory) -> None:
        self._directory = run_dir.journal
        self._read_to: dict[str, int] = {}
        self._again_at = float("-inf")
        self._young: list[dict[str, Any]] = []
        self._sizes: dict[str, int] = {}
        self._torn = 0
        self._unended: set[str] = set()
        self.problems: list[str] = []
        """What could not be read at the last look."""
        self._newest_steps: dict[tuple[str, str], dict[str, Any]] = {}
        self._newest_memory: dict[str, dict[str, Any]] = {}
        self._run_start: dict[str, Any] | None = None
        self.state = RunState()
        self.ledger = Ledger()
        self.events = NewestEvents()
        self.incidents: dict[str, tuple[float, str, str]] = {}
        self.stall = StallWords()

    def read_calmly(self, settling_s: float) -> None:
        """Take what is new, but not what is younger than `settling_s`, so that nothing comes before its cause.

        No more often than may be: to look after thousands of files costs.
        """
        began_s = time.monotonic()
        if began_s >= self._again_at:
            self.read(settling_s)
            now_s = time.monotonic()
            self._again_at = now_s + min(_LONGEST_PAUSE_S, (now_s - began_s) / _SHARE)

    def read(self, settling_s: float = 0.0) -> None:
        """Take what is new."""
        self.problems = []
        try:
            grown = self._grown()
        except OSError as error:
            self.problems.append(f"cannot read {self._directory}: {error.strerror}")
            return
        contents = read_journal(self._directory, self._read_to, only=grown, only_ended=True)
        self._read_to |= contents.read_to
        # A line that is being written counts once it is there; one that never comes to its end is torn.
        ends_within = {name for name, to in contents.read_to.items() if to < self._sizes.get(name, 0)}
        self._torn += contents.torn_lines
        self._unended = (self._unended - contents.read_to.keys()) | ends_within
        events = sorted([*self._young, *contents.events], key=lambda event: float(event["t"]))
        limit = time.time() - settling_s if settling_s > 0 else float("inf")
        old = [event for event in events if float(event["t"]) <= limit]
        self._young = events[len(old) :]
        self._take(old)
        self.problems += [f"journal file not read: {name}" for name in contents.unreadable_files]
        if torn := self._torn + len(self._unended):
            self.problems.append(f"torn journal lines skipped: {torn}")

    def _grown(self) -> list[str]:
        """Return the files that are new or longer than they were; thousands of ranks have a file each. Raises OSError.

        Their lengths are looked up, and not asked for one by one: a network file system may know of a line some
        seconds late, which is little for who looks on.
        """
        with os.scandir(self._directory) as found:
            sizes = {one.name: one.stat().st_size for one in found if one.name.endswith(".jsonl")}
        grown = sorted(name for name, size in sizes.items() if size != self._sizes.get(name))
        self._sizes = sizes
        return grown

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.ledger.apply(event)
            name = event["event"]
            if name == Event.RUN_START.value:
                self._run_start, self._newest_steps, self._newest_memory = event, {}, {}
            elif name in (Event.STEP_TIME.value, Event.PROGRESS.value):
                self._newest_steps[name, str(event.get("host"))] = event
            elif name == Event.MEMORY.value:
                self._newest_memory[str(event.get("host"))] = event
            elif name == Event.STALL.value and event.get("kind") != EXIT:
                self.stall = StallWords.of(event)
            elif name == Event.INCIDENT.value and isinstance(event.get("id"), str):
                words = event.get("summary") or event.get("cause") or ""
                self.incidents[event["id"]] = float(event["t"]), event["id"], str(words)
        self.state = state_of(events, self.state)
        if self.state.stall is None:
            self.stall = StallWords()
        self.events.add(events)

    def memory(self) -> list[dict[str, Any]]:
        """Return what `memory_of` needs: the newest of each node."""
        return sorted(self._newest_memory.values(), key=lambda event: float(event["t"]))

    def step_times(self) -> list[dict[str, Any]]:
        """Return what `step_time_of` needs: the newest of each node."""
        newest = sorted(self._newest_steps.values(), key=lambda event: float(event["t"]))
        return newest if self._run_start is None else [self._run_start, *newest]


def _with_memory(rows: list[RankRow], memory: Iterable[RankMemory]) -> list[RankRow]:
    """Return the rows with the most memory that each rank had."""
    known = {one.rank: one for one in memory}
    return [
        attrs.evolve(row, memory=known[row.rank].host_peak, device_memory=known[row.rank].device_peak)
        if row.rank in known
        else row
        for row in rows
    ]


def _standing_s(rows: list[RankRow], usual_s: float, state: RunState) -> float:
    """Return for how long no step has been completed, by the ranks that are seen here or on their node."""
    seen = [row for row in rows if row.seen != live_view.JOURNAL and row.activity not in _NOT_STEPPING]
    ages_s = [row.age_s + (row.seen_s or 0.0) for row in seen if row.age_s is not None]
    return without_step_s(ages_s, usual_s, state.stall, is_paused=any(row.activity == "paused" for row in seen))


def _row_of(known: RankHistory, words: StallWords, state: RunState, *, is_running: bool) -> RankRow:
    """Return a rank as its events tell."""
    if known.state == "exited":
        activity = "left" if known.exit_code == 0 and not known.signal else live_view.GONE
        detail: str | None = _ending_words(known)
    elif known.rank in words.named:
        activity, detail = words.named[known.rank]
    elif known.rank in words.waiting:
        activity, detail = live_view.WAITS, None
    elif not is_running or state.attempt_ended:
        activity, detail = "unknown", "nobody told how it ended"
    else:
        activity = live_view.RUNS if known.state == "stepping" else live_view.STARTS
        detail = f"last event {known.last_event}" if known.last_event else None
    told_at = known.last_event_at
    if known.rank in words.waiting or known.rank in words.named:
        told_at = max(told_at or 0.0, words.at)
    return RankRow(
        rank=known.rank,
        node=known.host,
        step=known.reached,
        step_is_global=known.step_is_global,
        activity=activity,
        detail=detail,
        seen=live_view.JOURNAL,
        seen_s=None if told_at is None else round(max(0.0, time.time() - told_at), 3),
    )


def _ending_words(known: RankHistory) -> str:
    if known.signal:
        return f"ended by {known.signal}"
    return "exited" if known.exit_code is None else f"exited with {known.exit_code}"


def _outcome_words(outcome: Mapping[str, Any]) -> str:
    code = "unknown" if outcome["exit_code"] is None else outcome["exit_code"]
    reason = f": {outcome['reason']}" if outcome["reason"] else ""
    return f"{outcome['verdict'] or 'unknown'}, exit code {code}{reason}"
