"""The view of a run that `resilience top` shows: one row per rank, and everything around them. Values alone; pure.

Rows come from three places, best first: the rank's own page on this host, what its node has told the others, and the
journal. `RankRow.seen` says which, so that nobody takes an old word for a look.

The worst come first: who stands still or died, who nears its deadline, who is slow, who only waits, and then everybody
else by lag and score. A view holds a bounded number of rows, whatever the size of the run, and counts the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

PAGE, NODE, JOURNAL = "page", "node", "journal"
MOST_ROWS = 20
SORTS = ("worst", "rank", "lag", "score")

RUNS, WAITS, STILL, STARTS, GONE, DONE = "runs", "waits", "still", "starts", "gone", "done"
"""Words for what a rank does beside those of `hang.activity.Kind`."""
_AT_FAULT = frozenset({"stopped", "stuck", "spinning", GONE})
_DOUBTFUL = frozenset({"polling", "unknown", STILL})
_OVER = frozenset({DONE, "left"})
_WAITING = 3  # of `RankRow.trouble`
_NEAR = 0.5  # of a deadline: from here on a rank is worth a look
_LEAST_LAG = 2  # of two ranks that are read one after the other, the second may have just completed a step


@attrs.frozen
class RankRow:
    """One rank as far as it is known."""

    rank: int
    node: str | None = None
    step: int | None = None
    step_is_global: bool | None = None
    """False: it counts the heartbeats of this attempt, from 0."""
    lag: int | None = None
    """Steps behind the furthest rank; None where the two cannot be compared."""
    age_s: float | None = None
    """Seconds since it came on last: since its last beat, or its start."""
    deadline_s: float | None = None
    """At which of these seconds the monitor may call it hung, if it stays as it is; None: never, or not known."""
    rule: str | None = None
    """What grants it that time, in words."""
    sections: tuple[str, ...] = ()
    """Open ones, outermost first, without the step itself."""
    activity: str = "unknown"
    """A word: runs, starts, waits, still (nobody knows yet who waits for whom), stopped, stuck, busy, spinning,
    polling, unknown, paused, done, left (it has finished), gone (it died)."""
    detail: str | None = None
    """The evidence for it."""
    score: float | None = None
    """Of the newest straggler report, 0 (slow) to 1; of its GPU where kernels are timed, else of its sections."""
    memory: int | None = None
    """The most memory that it had, in bytes."""
    device_memory: int | None = None
    """The most that it had on its device, in bytes."""
    is_slow: bool = False
    """Whether a straggler verdict that stands names it."""
    seen: str = JOURNAL
    """`page` (read on this host just now), `node` (its node told it) or `journal`."""
    seen_s: float | None = None
    """How old that is at most, in seconds; None where nobody can tell."""

    @property
    def spent(self) -> float:
        """The part of its deadline that is over; 0 where it has none."""
        if self.age_s is None or self.deadline_s is None:
            return 0.0
        return self.age_s / self.deadline_s if self.deadline_s > 0 else 1.0

    @property
    def trouble(self) -> int:
        """How much it deserves a look, from 0 (first) to 5."""
        if self.activity in _AT_FAULT:
            return 0
        if self.activity == WAITS:
            return _WAITING
        if self.activity in _DOUBTFUL or (self.spent >= _NEAR and self.activity not in _OVER):
            return 1
        if self.is_slow:
            return 2
        return 5 if self.activity in _OVER else 4

    @property
    def shown_lag(self) -> int | None:
        """The lag, where it is more than what comes of reading one rank after the other, or the rank stands still."""
        if self.lag is None or self.activity in _OVER:
            return None
        return self.lag if self.lag >= _LEAST_LAG or (self.trouble <= 1 and self.lag > 0) else 0


@attrs.frozen
class LiveView:
    """Everything that is shown of a run at one moment. Times are Unix seconds, durations seconds, None: not known."""

    run_dir: str
    at: float
    state: str = "empty"
    """running, finished, ended, lost or empty, as `resilience status` has it."""
    outcome: str | None = None
    """How the last job ended, in words."""
    job: str | None = None
    attempt: int | None = None
    attempts: int = 0
    world_size: int | None = None
    nodes: int | None = None
    started_at: float | None = None
    step: int | None = None
    """Of the furthest rank."""
    step_is_global: bool | None = None
    steps_per_s: float | None = None
    wall_s: float = 0.0
    standing_s: float = 0.0
    """For how long no step has been completed, where that is more than comes of its steps: its bucket."""
    goodput: float | None = None
    ettr: float | None = None
    knows_replayed: bool = True
    at_most: bool = False
    """Whether goodput and ETTR are bounds, as some of the time is not seen."""
    """Whether steps that were done again are known; else they are in `productive`, and both shares are no more."""
    buckets: Mapping[str, float] = attrs.field(factory=dict)
    stall: Mapping[str, Any] | None = None
    """The notice that stands: `since`, `at` and `text`."""
    stragglers: tuple[str, ...] = ()
    """Verdicts that stand, one sentence each."""
    memory_grows: tuple[str, ...] = ()
    """What is known of ranks whose memory grows with the steps, one sentence each."""
    incidents: int = 0
    last_incidents: tuple[tuple[float, str, str], ...] = ()
    """The newest ones, oldest first: when, id and headline."""
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    events: tuple[tuple[float, str, str], ...] = ()
    """The newest ones that a person cares about, oldest first: time, name and a sentence."""
    sort: str = SORTS[0]
    first: int = 0
    """How many rows stand before those of `rows`."""
    rows: tuple[RankRow, ...] = ()
    ranks: int = 0
    """How many ranks there are rows of."""
    activities: Mapping[str, int] = attrs.field(factory=dict)
    """How many ranks do what, over all of them."""
    unseen: int = 0
    """Ranks of the world of which nothing at all is known."""
    problems: tuple[str, ...] = ()
    """What could not be read."""

    @property
    def is_running(self) -> bool:
        """Whether there is anything to wait for."""
        return self.state == "running"

    def to_json(self) -> dict[str, Any]:
        """Return what `resilience top --json` prints."""
        told = attrs.asdict(self)
        keys = {"last_incidents": ("at", "id", "summary"), "events": ("at", "event", "text")}
        for name, parts in keys.items():
            told[name] = [dict(zip(parts, item, strict=True)) for item in told[name]]
        return told


def in_order(rows: Iterable[RankRow], sort: str) -> list[RankRow]:
    """Return the rows as they are to be read, by one of `SORTS`."""
    keys: Mapping[str, Any] = {
        "worst": lambda row: (
            row.trouble,
            -round(row.spent, 2) if row.trouble <= 1 else 0.0,
            -(row.shown_lag or 0),
            row.score if row.score is not None and row.trouble != _WAITING else 1.0,
            row.rank,
        ),
        "rank": lambda row: row.rank,
        "lag": lambda row: (-(row.lag if row.lag is not None else -1), row.rank),
        "score": lambda row: (row.score if row.score is not None else 2.0, row.rank),
    }
    return sorted(rows, key=keys[sort])


def with_lags(rows: Sequence[RankRow], steps_per_s: float | None) -> list[RankRow]:
    """Return the rows with how far each is behind the furthest one.

    Global steps and counts of an attempt are not compared with one another, and nobody is compared by an event of long
    ago. Who was read some seconds ago is granted the steps that the others have made since.
    """
    counts = {row.step_is_global for row in rows if _counts(row)}
    if len(counts) != 1:
        return list(rows)
    furthest = max((row.step for row in rows if _counts(row) and row.step is not None), default=0)
    return [attrs.evolve(row, lag=_lag(row, furthest, steps_per_s)) if _counts(row) else row for row in rows]


def _counts(row: RankRow) -> bool:
    return row.step is not None and row.seen != JOURNAL


def _lag(row: RankRow, furthest: int, steps_per_s: float | None) -> int:
    assert row.step is not None
    behind = furthest - row.step
    if row.seen == NODE and behind > 0:
        age_s = row.seen_s if row.seen_s is not None and math.isfinite(row.seen_s) else 0.0
        behind -= 1 + int(age_s * (steps_per_s or 0.0))
    return max(0, behind)


def with_rows(view: LiveView, rows: Sequence[RankRow], sort: str, first: int = 0, most: int = MOST_ROWS) -> LiveView:
    """Return the view with `most` of the rows, from number `first` on in that order, and a count of all."""
    ordered = in_order(rows, sort)
    activities: dict[str, int] = {}
    for row in rows:
        activities[row.activity] = activities.get(row.activity, 0) + 1
    first = max(0, min(first, len(ordered) - most))
    return attrs.evolve(
        view,
        sort=sort,
        first=first,
        rows=tuple(ordered[first : first + most]),
        ranks=len(rows),
        activities=dict(sorted(activities.items(), key=lambda item: (-item[1], item[0]))),
        unseen=max(0, (view.world_size or 0) - len(rows)),
    )
