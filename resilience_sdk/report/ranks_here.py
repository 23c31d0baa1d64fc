"""The ranks of a run as its monitor sees them, for who only looks: those of this host, and what is told of the others.

It maps the same pages, reads the same /proc and asks the same pure functions (`hang.timers`, `hang.activity`), with the
deadlines that the monitor has kept in `timeouts.json` and what the pages have shown since. Nothing is written, and no
rank is asked for anything: without a close look nobody's stack is known, so that of several ranks that stand still at
one place the monitor's notice alone says who waits for whom.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cluster.membership import HANGS, NodePlace, PeerFile
from resilience_sdk.core import job_config
from resilience_sdk.core.atomic_write import Version, version_of
from resilience_sdk.core.job_config import JobConfig
from resilience_sdk.core.plain_file import read_text
from resilience_sdk.core.settings import settings_from_json
from resilience_sdk.core.settings.fields import FIELDS
from resilience_sdk.errors import ConfigError
from resilience_sdk.hang.activity import Activity, Kind
from resilience_sdk.hang.detect import ranks_waited_for
from resilience_sdk.hang.timers import HangRules, RankState, verdict_due, watch
from resilience_sdk.monitor.activity import ActivityWatch
from resilience_sdk.monitor.evidence import states_of
from resilience_sdk.monitor.learning import Learner
from resilience_sdk.monitor.node_summary import NodeSummary, RankSummary, age_bound_s, decode
from resilience_sdk.monitor.ranks import RankTable, WatchedRank
from resilience_sdk.recorder.page_layout import BEAT_KINDS
from resilience_sdk.report import live_view
from resilience_sdk.report.live_view import RankRow
from resilience_sdk.system import hostinfo

# As the monitor's: a rank is looked at from outside once it has not moved for that part of `stuck_after`, or so many
# usual steps, and then so often.
_SAMPLE_FROM, _SAMPLE_FROM_STEPS, _SAMPLE_EVERY = 1 / 30, 1.5, 1 / 60
_AWAKE = 0.02  # of the time, that is spent on reading what other nodes told
_DECODING_S = 0.02  # at each look
# What a text says of itself, as far as that is needed to decide when it is decoded (`node_summary.encode`).
_NODE = re.compile(r'"node":\s?(\d{1,9})\b')
_NODE_WITHIN = 64
_WANTS = '"wants":true'
_MOVED_S = 2.0  # a rank that came on within that time runs, whatever its process does at this very moment
_STANDS = (Kind.STUCK, Kind.POLLING, Kind.UNKNOWN, Kind.WAITING)
_NANO = 1e9


@attrs.frozen
class StallWords:
    """The monitor's newest notice, as far as it tells of single ranks."""

    named: Mapping[int, tuple[str, str]] = attrs.field(factory=dict)
    """By rank: the word for what it does, and the evidence."""
    waiting: frozenset[int] = frozenset()
    at: float = 0.0
    """When it was told."""
    verdict_at: float | None = None
    """When the monitor may call it a hang, in Unix seconds, if nobody moves."""
    rule: str | None = None
    """What grants it that time."""

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> StallWords:
        """Return what a `stall` event tells; whatever is misshapen is skipped."""
        told = event.get("ranks")
        named = {
            one["rank"]: (str(one.get("activity") or "unknown"), str(one.get("detail") or ""))
            for one in (told if isinstance(told, list) else ())
            if isinstance(one, dict) and _is_rank(one.get("rank"))
        }
        waiting = event.get("waiting")
        waits = frozenset(filter(_is_rank, waiting)) if isinstance(waiting, list) else frozenset()
        in_s = event.get("verdict_in_s")
        is_due = isinstance(in_s, (int, float)) and not isinstance(in_s, bool)
        at = float(event["t"])
        rule = event.get("rule") if is_due and isinstance(event.get("rule"), str) else None
        return cls(named, waits, at, at + float(in_s) if is_due else None, rule)  # type: ignore[arg-type]


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class RanksHere:
    """One page directory, read again and again. One thread."""

    def __init__(self, pages: Path, config: JobConfig) -> None:
        """Read the ranks of the job of `config`, whose pages are in `pages`; raises ConfigError for its settings."""
        self._pages = pages
        # The job may be of a newer version than who looks on: settings that are not known yet decide nothing here.
        self._settings = settings_from_json({k: v for k, v in config.settings.items() if k in FIELDS or k == "sources"})
        self._config = config
        self._table = RankTable(pages)
        self._rules = HangRules(self._settings.stuck_after, self._settings.hang_cap)
        self._watch = ActivityWatch(self._rules)
        self._timeouts = Path(config.run_dir) / "timeouts.json"
        self._learner = Learner(self._timeouts, self._settings, config.script, config.job)
        self._learned: tuple[int, Version | None] | None = None
        self._place = NodePlace(0, 1, hostinfo.host_name())
        self._peers = PeerFile(pages / HANGS.peers)
        self._peers_at = float("-inf")
        self._told: dict[int, NodeSummary] = {}
        self._untold: dict[int, str] = {}
        self._due: dict[int, _Shown] = {}
        self._barely_seen: set[int] = set()
        """Ranks that are late, and were not watched for long enough to tell what they do."""
        self.attempt: int | None = None
        self.nodes = 1

    @property
    def foreign(self) -> bool:
        """Whether another launcher than ours has started the ranks, so that other nodes tell nothing here."""
        return self._config.foreign

    @property
    def usual_step_s(self) -> float:
        """The usual length of a step, in seconds; 0 where it is not known."""
        return self._learner.book.usual_step_s()

    @property
    def mean_step_s(self) -> float:
        """The mean time of a step, in seconds, of the rank here whose steps take longest; 0 where it is not known."""
        ranks = (watched.snapshot for watched in self._table.all() if watched.alive)
        return max((page.mean_step_s for page in ranks if page.attempt == self.attempt), default=0.0)

    def close(self) -> None:
        """Give pages and processes back."""
        for watched in self._table.all():
            watched.close()

    def sample(self) -> list[WatchedRank]:
        """Look at the pages, and at the processes of those who do not move; return the ranks of the newest attempt."""
        self._table.scan()
        self._table.wait(0.0)
        now_ns = time.monotonic_ns()
        everybody = self._table.all()
        living = [watched.snapshot.attempt for watched in everybody if watched.alive]
        attempt = max(living or [watched.snapshot.attempt for watched in everybody], default=None)
        newest: dict[int, WatchedRank] = {}
        for watched in everybody:
            if watched.snapshot.attempt == attempt:
                if watched.alive:
                    watched.refresh()
                before = newest.get(watched.rank)
                if before is None or _came(watched) > _came(before):
                    newest[watched.rank] = watched
        ranks = [newest[rank] for rank in sorted(newest)]
        self._learn(ranks, attempt, now_ns)
        usual_s = self.usual_step_s
        start_s = max(_SAMPLE_FROM * self._settings.stuck_after, _SAMPLE_FROM_STEPS * usual_s)
        period_s = min(1.0, _SAMPLE_EVERY * self._settings.stuck_after)
        self._watch.update(ranks, now_ns, start_s=start_s, period_s=0.8 * period_s)
        return ranks

    def rows(self, words: StallWords) -> list[RankRow]:
        """Return a row for every rank of the newest attempt here, and for those of which other nodes have told."""
        own = self.sample()
        self._hear()
        now_ns = time.monotonic_ns()
        states = states_of(own, self._place.name, closely=False, look=None, now_ns=now_ns)
        by_rank = {watched.rank: watched for watched in own}
        states = [self._with_activity(state, by_rank[state.rank]) for state in states]
        here = len(states)
        told_ages: dict[int, float] = {}
        for summary in self._told.values():
            bound_s = age_bound_s(summary, self._place.me, now_ns)
            for told in summary.ranks:
                if told.rank not in by_rank and told.rank not in told_ages:
                    told_ages[told.rank] = bound_s
                    states.append(_state_of(summary, told))
        trackers = {watched.rank: self._watch.tracker(watched) for watched in own}
        self._barely_seen = {rank for rank, known in trackers.items() if known is not None and not known.is_known}
        states, is_open = _who_waits(states, words)
        rows = []
        for number, state in enumerate(states):
            age_s = _age_s(state, now_ns)
            does = _word(state, words, age_s, is_open)
            # What a rank waits for is judged, and not the rank.
            deadline = None if does[0] == live_view.WAITS else self._deadline(state, words, age_s, now_ns)
            seen, seen_s = (live_view.PAGE, 0.0) if number < here else (live_view.NODE, told_ages[state.rank])
            rows.append(_row(state, does, age_s, deadline, seen, seen_s))
        return rows

    def _learn(self, ranks: Sequence[WatchedRank], attempt: int | None, now_ns: int) -> None:
        """Take what the monitor has kept since the last look, and then what the pages tell."""
        if attempt is None or not ranks:
            return
        version = version_of(self._timeouts)
        if self._learned != (attempt, version):
            if self.attempt != attempt:
                self._begin(attempt)
            self._learned = attempt, version
            self._learner = Learner(self._timeouts, self._settings, self._config.script, self._config.job)
            began_at = time.time() - (now_ns - min(w.snapshot.created_ns for w in ranks)) / _NANO
            is_same = version is not None and version[1] / _NANO > began_at
            self._learner.begin_attempt(ranks[0].snapshot.world_size, len(ranks), is_same=is_same)
        for watched in ranks:
            self._learner.look(watched, now_ns)

    def _begin(self, attempt: int) -> None:
        self.attempt = attempt
        self._told, self._untold, self._due = {}, {}, {}
        self._peers = PeerFile(self._pages / HANGS.peers)
        announcement: Any = None
        with contextlib.suppress(OSError, ValueError):  # under another launcher nobody announces anything
            announcement = json.loads(read_text(self._pages / f"attempt-{attempt}.json"))
        announced = announcement if isinstance(announcement, dict) and not self._config.foreign else {}
        self._place = NodePlace.of(announced, hostinfo.host_name())
        self.nodes = self._place.count

    def _hear(self) -> None:
        """Take what the other nodes have told.

        To decode what hundreds of them tell takes a second: those of which a rank is late come first, the others in
        turns, as many at each look as may be.
        """
        if self._place.count <= 1 or self.attempt is None:
            return
        began = time.monotonic()
        if began >= self._peers_at and (heard := self._peers.news(self.attempt)) is not None:
            for text in heard.texts:
                if (beginning := _NODE.search(text[:_NODE_WITHIN])) is not None:
                    self._untold[int(beginning[1])] = (
                        text  # in the place of an older one, where that waits for its turn
                    )
            self._peers_at = time.monotonic() + (time.monotonic() - began) / _AWAKE
        for number in sorted(self._untold, key=lambda number: _WANTS not in self._untold[number]):
            summary = decode(self._untold.pop(number))
            if summary is not None and summary.attempt == self.attempt and summary.node != self._place.me:
                self._told[summary.node] = summary
            if time.monotonic() - began > _DECODING_S:
                break

    def _with_activity(self, state: RankState, watched: WatchedRank) -> RankState:
        if not watched.alive:
            return state
        process = hostinfo.process_state(watched.snapshot.pid) or ""
        activity = self._watch.activity(watched)
        if process in ("T", "t") and (activity is None or activity.kind is not Kind.STOPPED):
            activity = Activity(Kind.STOPPED, detail=f"it is stopped (process state {process})")
        elif self._watch.tracker(watched) is None:
            activity = None  # it is in time: nobody looks
        return attrs.evolve(state, process_state=process, activity=activity, place=self._watch.place_of(watched))

    def _deadline(self, state: RankState, words: StallWords, age_s: float | None, now_ns: int) -> _Shown | None:
        """Return at what age the monitor may call a rank hung that others wait for; None: never, or not known.

        It stays what it was as long as the rank stays where it is and one rule grants it: the monitor has watched from
        the beginning, so that what is learned, seen or read anew meanwhile moves no deadline of it.
        """
        if state.rank in self._barely_seen:
            state = attrs.evolve(state, activity=None)
        due = verdict_due(watch(state, self._learner.book, now_ns), self._learner.book, self._rules)
        if age_s is None or not state.running or not math.isfinite(due.in_s):
            return None
        shown = _Shown(_place(state), age_s + due.in_s, due.rule)
        known = self._due.get(state.rank)
        if state.rank in words.named and words.verdict_at is not None:
            at_s = max(0.0, age_s + words.verdict_at - time.time())
            shown = attrs.evolve(shown, at_s=at_s, rule=words.rule or due.rule)
        elif known is not None and known.place == shown.place:
            if known.rule == shown.rule and state.due is None:
                shown = known
            elif due.in_s <= 0:
                shown = attrs.evolve(shown, at_s=min(shown.at_s, known.at_s))
        self._due[state.rank] = shown
        return shown


@attrs.frozen
class _Shown:
    """The deadline of a rank at one place of its program: at which age, and what grants it that time."""

    place: object
    at_s: float
    rule: str


def _place(state: RankState) -> object:
    """Return what is another thing once a rank has come on."""
    lane = state.snapshot.main_lane if state.snapshot is not None else None
    return None if lane is None else (lane.beat_ns, lane.last_ns, [one.entered_ns for one in lane.stack])


def _row(
    state: RankState,
    does: tuple[str, str],
    age_s: float | None,
    deadline: _Shown | None,
    seen: str,
    seen_s: float,
) -> RankRow:
    snapshot = state.snapshot
    return RankRow(
        rank=state.rank,
        node=state.node or None,
        step=snapshot.step if snapshot is not None else None,
        step_is_global=snapshot.step_is_global if snapshot is not None and snapshot.step is not None else None,
        age_s=None if age_s is None else round(age_s, 3),
        deadline_s=None if deadline is None else round(deadline.at_s, 3),
        rule=None if deadline is None else deadline.rule,
        sections=tuple(section.name for section in state.stack if section.kind not in BEAT_KINDS),
        activity=does[0],
        detail=does[1] or None,
        seen=seen,
        seen_s=round(seen_s, 3) if math.isfinite(seen_s) else None,
    )


def _came(watched: WatchedRank) -> tuple[bool, int]:
    return watched.alive, watched.snapshot.created_ns


def _state_of(summary: NodeSummary, told: RankSummary) -> RankState:
    """Return a rank of another node as that node judges it."""
    return RankState(
        rank=told.rank,
        node=summary.name,
        alive=told.alive,
        process_state=told.process_state,
        snapshot=told.snapshot,
        collectives=told.collectives,
        now_ns=summary.now_ns,
        in_collective=told.in_collective,
        activity=told.activity,
        timers=told.timers,
        past=told.past,
        due=told.due,
    )


def _age_s(state: RankState, now_ns: int) -> float | None:
    """Return for how long a rank has not come on; of one elsewhere as of when its node told."""
    return None if state.snapshot is None else state.snapshot.without_step_s(state.now_ns or now_ns)


def _who_waits(states: Sequence[RankState], words: StallWords) -> tuple[list[RankState], bool]:
    """Return the states with those that only wait marked so: by the monitor's notice, or because others are behind.

    And whether it is open which of several that stand still is waited for: that is for a close look to tell.
    """
    still = {s.rank for s in states if s.activity is not None and s.activity.kind in _STANDS}
    if not still:
        return list(states), False
    waited_for = set(words.named) or set(ranks_waited_for([attrs.evolve(s, is_expected=True) for s in states]))
    proven = {s.rank for s in states if s.rank in waited_for and (s.stopped or s.died)}
    waiting = words.waiting | {rank for rank in still if rank not in (proven or waited_for)}
    is_open = not words.named and not proven and len(still - waiting) > 1
    return [_waiting(state) if state.rank in waiting & still else state for state in states], is_open


def _waiting(state: RankState) -> RankState:
    assert state.activity is not None
    return attrs.evolve(state, activity=attrs.evolve(state.activity, kind=Kind.WAITING))


def _word(state: RankState, words: StallWords, age_s: float | None, is_open: bool) -> tuple[str, str]:
    """Return the word for what a rank does, and the evidence; `is_open` as `_who_waits` has it."""
    snapshot, activity = state.snapshot, state.activity
    if not state.running:
        return ("left", "") if state.left_cleanly else (live_view.GONE, "its process is gone")
    if snapshot is None:
        return Kind.UNKNOWN.value, "its page cannot be read"
    if snapshot.paused is not None:
        return "paused", snapshot.paused
    if snapshot.done:
        return live_view.DONE, "its loop is over"
    if activity is not None and activity.kind is Kind.STOPPED:
        return Kind.STOPPED.value, activity.detail
    works = activity is None or activity.kind in (Kind.BUSY, Kind.UNKNOWN)
    if not snapshot.beats and works and state.rank not in words.named:
        told = "no step is completed yet" if state.has_signal else "it has given no sign of progress yet"
        return live_view.STARTS, told
    if activity is None and (age_s is None or age_s < _MOVED_S or state.rank not in words.named):
        return live_view.RUNS, ""
    if state.rank in words.named:
        return words.named[state.rank]
    assert activity is not None
    if activity.kind is Kind.WAITING:
        return live_view.WAITS, activity.detail
    if activity.kind in (Kind.STUCK, Kind.POLLING) and is_open:
        return live_view.STILL, activity.detail
    return activity.kind.value, activity.detail


def open_pages(found: Iterable[Path], run_dir: str, problems: list[str]) -> list[tuple[Path, RanksHere]]:
    """Return a reader for each page directory of jobs that write into `run_dir`, which is a real path."""
    readers = []
    for pages in found:
        config = job_config.read(pages)
        if config is None or not isinstance(config.run_dir, str) or os.path.realpath(config.run_dir) != run_dir:
            continue
        try:
            readers.append((pages, RanksHere(pages, config)))
        except (ConfigError, OSError, TypeError) as error:
            problems.append(f"the pages in {pages} are of another version, the journal alone tells: {error}")
    return readers
