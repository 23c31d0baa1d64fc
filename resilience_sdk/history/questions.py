"""Questions to the index: what recurs, how long jobs last, which nodes, what came before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from resilience_sdk.core.redaction import redact_text
from resilience_sdk.errors import ConfigError
from resilience_sdk.goodput.summary import mean_time_between_s
from resilience_sdk.history.schema import VERSION, newer, open_engine
from resilience_sdk.history.suspects import (
    LEAST_FAILURES,
    Failure,
    NodeRecord,
    Omen,
    hostlist,
    judge_nodes,
    omens,
)

if TYPE_CHECKING:
    from sqlalchemy import Engine

# Of each attempt on each node its end: told, else the next one's beginning there, else the last word of the run. In
# runs of our launcher the attempts that it has told count, in others those of the ranks.
_SPANS = """
WITH spans AS (
  SELECT a.run, a.job, a.attempt, a.world_size, a.alias, a.began_at,
    CASE WHEN a.ended_at IS NOT NULL THEN a.ended_at
         WHEN LEAD(a.began_at) OVER later < r.last_at THEN LEAD(a.began_at) OVER later
         ELSE r.last_at END AS until
  FROM attempts a JOIN runs r ON r.id = a.run
  WHERE a.launched = r.launched AND a.began_at IS NOT NULL
  WINDOW later AS (PARTITION BY a.run, a.host ORDER BY a.began_at)
), counted AS (
  SELECT run, job, attempt, world_size, alias,
    CASE WHEN until > began_at THEN until - (CASE WHEN began_at > :since THEN began_at ELSE :since END)
         ELSE 0 END AS worked_s
  FROM spans WHERE until >= :since
)
"""
_BY_NODE = (
    _SPANS
    + """
SELECT alias, SUM(worked_s), COUNT(DISTINCT run) FROM counted WHERE alias IS NOT NULL GROUP BY alias
"""
)
_BY_SIZE = (
    _SPANS  # noqa: S608 - constants
    + """
, jobs AS (
  SELECT run, job, attempt, MAX(world_size) AS world_size, MAX(worked_s) AS worked_s
  FROM counted GROUP BY run, job, attempt
)
SELECT world_size, SUM(worked_s) FROM jobs GROUP BY world_size
"""
)
_FAILURES = """
SELECT r.path, f.incident, f.host, f.at, f.category, f.cause, f.action, f.signature, f.nodes, f.summary,
  f.run, f.job, f.attempt, c.recovery_s, c.lost_steps
FROM failures f JOIN runs r ON r.id = f.run
LEFT JOIN recoveries c ON c.run = f.run AND c.incident = f.incident
WHERE f.at >= :since ORDER BY f.at
"""
_NODES_OF_FAILURES = """
SELECT DISTINCT a.run, a.job, a.attempt, a.node, a.alias, a.nodes, a.world_size, a.began_at
FROM attempts a JOIN runs r ON r.id = a.run
JOIN failures f ON f.run = a.run AND f.job = a.job AND f.attempt = a.attempt
WHERE f.at >= :since AND a.launched = r.launched AND a.alias IS NOT NULL
"""
_FINDINGS = """
SELECT f."check", COALESCE(n.alias, f.host) AS node, f.at, f.evidence
FROM findings f LEFT JOIN (
  SELECT a.run, a.host, MIN(a.alias) AS alias FROM attempts a JOIN runs r ON r.id = a.run
  WHERE a.launched = r.launched GROUP BY a.run, a.host
) n ON n.run = f.run AND n.host = f.host
WHERE f.at >= :since ORDER BY f.at
"""
_START_OF = """
SELECT s.run, s.job, s.at, s.script, s.facts FROM starts s JOIN runs r ON r.id = s.run
WHERE r.path = :path AND s.at <= :at ORDER BY s.at DESC LIMIT 1
"""
_START_BEFORE = """
SELECT run, job, at, script, facts FROM starts WHERE script = :script AND at < :at ORDER BY at DESC LIMIT 1
"""
_NODES_OF_JOB = """
SELECT DISTINCT a.alias FROM attempts a JOIN runs r ON r.id = a.run
WHERE a.run = :run AND a.job = :job AND a.launched = r.launched AND a.alias IS NOT NULL
"""
_TOTALS = "SELECT COUNT(*), SUM(events), MIN(first_at), MAX(last_at) FROM runs WHERE events > 0"
_VERSION = "SELECT version FROM index_version"
_RUNS = """
SELECT r.path, r.first_at, r.last_at, f.incident, f.kind, f.at, f.summary, f.of_all
FROM runs r LEFT JOIN (
  SELECT run, incident, kind, at, summary, COUNT(*) OVER (PARTITION BY run) AS of_all,
    ROW_NUMBER() OVER (PARTITION BY run ORDER BY at DESC) AS place
  FROM (SELECT run, incident, MIN(kind) AS kind, MIN(at) AS at, MIN(summary) AS summary
        FROM failures GROUP BY run, incident) told
) f ON f.run = r.id AND f.place = 1
WHERE r.generation = (SELECT MAX(o.generation) FROM runs o WHERE o.path = r.path)
ORDER BY r.last_at DESC
"""
_MOST_CHANGES = 12
_UNTOLD = ("settings.run_dir", "argv")  # which differ from run to run anyway


@attrs.frozen
class Recurring:
    """One thing that goes wrong. Times are Unix seconds."""

    signature: str
    cause: str
    category: str
    blame: str
    count: int
    runs: int
    first_at: float
    last_at: float
    first_run: str
    mttf_s: float | None
    """Time at work of all jobs, over the count; `low_s` and `high_s` are its 95 % limits."""
    low_s: float
    high_s: float | None
    changed: tuple[dict[str, Any], ...] = ()
    """What the job in which it came first was started with, and the job before was not: `{what, before, after}`."""


@attrs.frozen
class IndexedRun:
    """A run directory as the index knows it, by its newest use. Times are Unix seconds."""

    path: str
    first_at: float | None
    last_at: float | None
    incident: str | None
    """Id of the newest one."""
    kind: str | None
    incident_at: float | None
    summary: str | None
    incidents: int


@attrs.frozen
class Rate:
    """Failures of jobs of one size; `low_s` and `high_s` are the 95 % limits of their mean time between failures."""

    world_size: int | None
    failures: int
    worked_s: float
    mttf_s: float | None
    low_s: float
    high_s: float | None


@attrs.frozen
class CauseRate:
    """Failures of one cause in all jobs, whatever was said; as `Rate`."""

    cause: str
    category: str
    blame: str
    failures: int
    worked_s: float
    mttf_s: float | None
    low_s: float
    high_s: float | None


class History:
    """Answers about the failures since a time (Unix seconds). One thread at a time."""

    def __init__(self, named: str, *, since: float = 0.0) -> None:
        """Open the index that somebody has made; raises ConfigError and MissingExtraError."""
        self._called = redact_text(named)
        self.engine: Engine = open_engine(named, must_exist=True)
        self._since = since
        self._failures: list[Failure] | None = None
        self._is_ours = False

    def close(self) -> None:
        """Let go of the database."""
        self.engine.dispose()

    def _ask(self, question: str, **values: Any) -> Sequence[Any]:
        from sqlalchemy import text
        from sqlalchemy.exc import DBAPIError

        try:
            with self.engine.connect() as connection:
                if not self._is_ours:
                    self._check(connection.execute(text(_VERSION)).scalar())
                return connection.execute(text(question), values).all()
        except DBAPIError as error:
            raise ConfigError(
                f"the history {self._called} cannot be read: {str(error.orig).strip()}; `resilience history index "
                "DIR...` makes one, --db names another"
            ) from None

    def _check(self, version: int | None) -> None:
        if version is not None and version > VERSION:
            raise ConfigError(newer(version))
        if version != VERSION:
            raise ConfigError("the history is of an older version; `resilience history index DIR...` makes it anew")
        self._is_ours = True

    def totals(self) -> dict[str, Any]:
        """Return how much is indexed."""
        ((runs, events, first_at, last_at),) = self._ask(_TOTALS)
        return {"runs": runs, "events": int(events or 0), "first_at": first_at, "last_at": last_at}

    def runs(self) -> list[IndexedRun]:
        """Return every run directory with its newest incident, those that told something last first."""
        return [
            IndexedRun(
                row.path, row.first_at, row.last_at, row.incident, row.kind, row.at, row.summary, int(row.of_all or 0)
            )
            for row in self._ask(_RUNS)
        ]  # fmt: skip

    def failures(self) -> list[Failure]:
        """Return all failures, by time; one that several nodes have told counts once. They are read once."""
        if self._failures is None:
            self._failures = self._read_failures()
        return self._failures

    def _read_failures(self) -> list[Failure]:
        places: dict[tuple[Any, ...], dict[str, str]] = {}
        facts: dict[tuple[Any, ...], tuple[int | None, int | None, float | None]] = {}
        for run, job, attempt, node, alias, *told in self._ask(_NODES_OF_FAILURES, since=self._since):
            places.setdefault((run, job, attempt), {})[str(node)] = str(alias)
            facts[run, job, attempt] = told[0], told[1], told[2]
        found: dict[tuple[Any, ...], Failure] = {}
        for row in self._ask(_FAILURES, since=self._since):
            key = row.run, row.job, row.attempt
            known = places.get(key, {})
            nodes = tuple(sorted({known.get(node, node) for node in json.loads(row.nodes or "[]")}))
            of_nodes, world_size, began_at = facts.get(key, (None, None, None))
            failure = Failure(
                row.path, row.incident, row.at, row.category, row.cause, row.action or "", row.signature, nodes,
                of_nodes, world_size, row.summary or "", row.recovery_s, row.lost_steps, began_at,
            )  # fmt: skip
            found.setdefault((*key, row.incident), failure)
        return list(found.values())

    def nodes(self, *, least: int = LEAST_FAILURES) -> list[NodeRecord]:
        """Return the record of each node, suspects first."""
        worked = self._ask(_BY_NODE, since=self._since)
        worked_s = {alias: float(seconds or 0.0) for alias, seconds, _ in worked}
        runs = {alias: int(count) for alias, _, count in worked}
        return judge_nodes(worked_s, runs, self.failures(), least=least)

    def omens(self, records: Sequence[NodeRecord], now: float) -> list[Omen]:
        """Return the findings of now that precede failures, by this history."""
        told = self._ask(_FINDINGS, since=self._since)
        return omens([(check, host, at, evidence or "") for check, host, at, evidence in told], records, now)

    def rates(self) -> list[Rate]:
        """Return the mean time to failure by size of the job, and of all (`world_size` null), preemptions left out."""
        counts: dict[int | None, int] = {}
        for failure in self.failures():
            if failure.blame != "nobody":
                counts[failure.world_size] = counts.get(failure.world_size, 0) + 1
        worked = {size: float(seconds or 0.0) for size, seconds in self._ask(_BY_SIZE, since=self._since)}
        sizes = sorted(size for size in worked if size is not None)
        rates = [_rate(size, counts.get(size, 0), worked[size]) for size in sizes]
        return [*rates, _rate(None, sum(counts.values()), sum(worked.values()))] if worked else []

    def causes(self) -> list[CauseRate]:
        """Return the mean time to failure by cause, the most frequent first, preemptions left out."""
        counts: dict[tuple[str, str, str], int] = {}
        for one in self.failures():
            if one.blame != "nobody":
                key = one.cause, one.category, one.blame
                counts[key] = counts.get(key, 0) + 1
        worked_s = self._worked_s()
        found = [CauseRate(*key, count, worked_s, *_mean(worked_s, count)) for key, count in counts.items()]
        return sorted(found, key=lambda one: (-one.failures, one.cause, one.blame))

    def _worked_s(self) -> float:
        return sum(float(seconds or 0.0) for _, seconds in self._ask(_BY_SIZE, since=self._since))

    def recurring(self) -> list[Recurring]:
        """Return what goes wrong, by signature, the most frequent first."""
        groups: dict[str, list[Failure]] = {}
        for failure in self.failures():
            groups.setdefault(failure.signature, []).append(failure)
        worked_s = self._worked_s()
        found = [
            Recurring(
                signature, told[0].cause, told[0].category, told[0].blame, len(told), len({one.run for one in told}),
                told[0].at, told[-1].at, told[0].run, *_mean(worked_s, len(told)), tuple(self._changed(told[0])),
            )
            for signature, told in groups.items()
        ]  # fmt: skip
        return sorted(found, key=lambda one: (-one.count, one.signature))

    def _changed(self, first: Failure) -> list[dict[str, Any]]:
        """Return what differs between the start in which something failed first, and the one of that script before."""
        own = next(iter(self._ask(_START_OF, path=first.run, at=first.at)), None)
        before = own and next(iter(self._ask(_START_BEFORE, script=own.script, at=own.at)), None)
        if own is None or before is None:
            return []
        old, new = self._facts(before), self._facts(own)
        changed = [what for what in sorted({*old, *new}) if old.get(what) != new.get(what) and what not in _UNTOLD]
        return [{"what": what, "before": old.get(what), "after": new.get(what)} for what in changed[:_MOST_CHANGES]]

    def _facts(self, start: Any) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(start.facts or "{}")
        nodes = self._ask(_NODES_OF_JOB, run=start.run, job=start.job)
        return facts | {"nodes": hostlist(str(alias) for (alias,) in nodes)}

    def recurrence(self, signature: str, run: str, at: float) -> dict[str, Any] | None:
        """Return how often something has gone wrong up to a time, and in how many runs of all; None: never before."""
        earlier = [one for one in self.failures() if one.signature == signature and one.at <= at]
        others = [one for one in earlier if one.run != run or one.at < at - 1.0]
        if not others:
            return None
        runs = {one.run for one in earlier} | {run}
        return {
            "times": len(others) + 1, "runs": len(runs), "of_runs": self.totals()["runs"], "first_at": others[0].at,
            "first_run": others[0].run,
        }  # fmt: skip


def _rate(size: int | None, failures: int, worked_s: float) -> Rate:
    return Rate(size, failures, worked_s, *_mean(worked_s, failures))


def _mean(worked_s: float, failures: int) -> tuple[float | None, float, float | None]:
    """Return the mean time between failures, and its limits."""
    return (worked_s / failures if failures and worked_s else None, *mean_time_between_s(worked_s, failures))
