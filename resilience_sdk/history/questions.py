"""Questions to the index: what recurs, how long jobs last, which nodes, what came before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
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

# Of each attempt on each node its end: told, else the last sign of life of a job that was killed, as the next one tells
# it, else the next one's beginning there, else the last word of the run. In runs of our launcher the attempts that it
# has told count, in others those of the ranks. Few have no end told, so only these are looked up one by one.
_ALIVE_AT = """
  SELECT MIN(s.alive_at) FROM starts s WHERE s.run = a.run AND s.at > a.began_at AND s.alive_at >= a.began_at
  AND (s.host = a.host OR s.job <> a.job)
"""
_COUNTED = f"""
WITH spans AS (
  SELECT a.run, a.job, a.attempt, a.world_size, a.alias, a.began_at, a.ended_at AS until
  FROM attempts a JOIN runs r ON r.id = a.run
  WHERE a.ended_at >= :since AND a.launched = r.launched AND a.began_at IS NOT NULL
  UNION ALL
  SELECT a.run, a.job, a.attempt, a.world_size, a.alias, a.began_at, COALESCE(({_ALIVE_AT}), (
      SELECT MIN(b.began_at) FROM attempts b WHERE b.run = a.run AND b.host = a.host AND b.launched = a.launched
      AND b.began_at > a.began_at AND b.began_at < r.last_at), r.last_at)
  FROM attempts a JOIN runs r ON r.id = a.run
  WHERE a.ended_at IS NULL AND r.last_at >= :since AND a.launched = r.launched AND a.began_at IS NOT NULL
), counted AS (
  SELECT run, job, attempt, world_size, alias,
    CASE WHEN until > began_at THEN until - (CASE WHEN began_at > :since THEN began_at ELSE :since END)
         ELSE 0 END AS worked_s
  FROM spans WHERE until >= :since
)
"""  # noqa: S608 - constants
_BY_NODE = (
    _COUNTED  # noqa: S608 - constants
    + """
, by_run AS (SELECT alias, run, SUM(worked_s) AS worked_s FROM counted WHERE alias IS NOT NULL GROUP BY alias, run)
SELECT alias, SUM(worked_s), COUNT(*) FROM by_run GROUP BY alias
"""
)
_BY_SIZE = (
    _COUNTED  # noqa: S608 - constants
    + """
, jobs AS (
  SELECT run, job, attempt, MAX(world_size) AS world_size, MAX(worked_s) AS worked_s
  FROM counted GROUP BY run, job, attempt
)
SELECT world_size, SUM(worked_s) FROM jobs GROUP BY world_size
"""
)
_OF_ITS_ATTEMPT = """
FROM attempts a WHERE a.run = f.run AND a.job = f.job AND a.attempt = f.attempt AND a.launched = r.launched
  AND a.alias IS NOT NULL LIMIT 1
"""
_FAILURES = f"""
SELECT r.path, f.incident, f.host, f.at, f.category, f.cause, f.action, f.signature, f.nodes, f.summary, f.confidence,
  f.run, f.job, f.attempt, c.recovery_s, c.lost_steps, (SELECT a.nodes {_OF_ITS_ATTEMPT}) AS of_nodes,
  (SELECT a.world_size {_OF_ITS_ATTEMPT}) AS ranks, (SELECT a.began_at {_OF_ITS_ATTEMPT}) AS began_at
FROM failures f JOIN runs r ON r.id = f.run
LEFT JOIN recoveries c ON c.run = f.run AND c.incident = f.incident
WHERE f.at >= :since AND f.injected IS NOT TRUE ORDER BY f.at
"""  # noqa: S608 - constants
# Of a job whose launcher was killed nobody has written an incident: the next job finds that it told no end.
_KILLED = f"""
SELECT r.path, a.run, a.job, a.attempt, MAX(a.nodes) AS of_nodes, MAX(a.world_size) AS ranks,
  MIN(a.began_at) AS began_at, MIN(({_ALIVE_AT})) AS at
FROM attempts a JOIN runs r ON r.id = a.run
WHERE a.ended_at IS NULL AND r.last_at >= :since AND a.launched = r.launched AND a.began_at IS NOT NULL
GROUP BY r.path, a.run, a.job, a.attempt
"""  # noqa: S608 - constants
_ALIASES = """
SELECT DISTINCT a.run, a.job, a.attempt, a.node, a.alias
FROM failures f JOIN runs r ON r.id = f.run
JOIN culprits c ON c.run = f.run AND c.incident = f.incident AND c.host = f.host
JOIN attempts a ON a.run = f.run AND a.job = f.job AND a.attempt = f.attempt AND a.node = c.node
WHERE f.at >= :since AND a.launched = r.launched AND a.alias <> a.node
"""
_EARLIER = """
SELECT r.path, f.at, f.run, f.job, f.attempt, f.incident FROM failures f JOIN runs r ON r.id = f.run
WHERE f.signature = :signature AND f.at >= :since AND f.at <= :at AND f.injected IS NOT TRUE ORDER BY f.at
"""
_FINDINGS = """
SELECT f."check", COALESCE((
    SELECT MIN(a.alias) FROM attempts a WHERE a.run = f.run AND a.host = f.host AND a.launched = r.launched
  ), f.host) AS node, f.at, f.evidence
FROM findings f JOIN runs r ON r.id = f.run WHERE f.at >= :since ORDER BY f.at
"""
# Of each thing that goes wrong the start in which it came first, and the start of that script before. All nodes tell of
# a start, some a moment earlier than others.
_CHANGES = """
WITH firsts AS (
  SELECT signature, MIN(at) AS at FROM failures WHERE at >= :since AND injected IS NOT TRUE GROUP BY signature
), last_starts AS (
  SELECT f.signature, f.run, MAX(s.at) AS at
  FROM firsts JOIN failures f ON f.signature = firsts.signature AND f.at = firsts.at
  JOIN starts s ON s.run = f.run AND s.at <= f.at GROUP BY f.signature, f.run
), own AS (
  SELECT l.signature, s.run, s.job, s.at, MIN(s.script) AS script, MIN(s.facts) AS facts
  FROM last_starts l JOIN starts s ON s.run = l.run AND s.at = l.at GROUP BY l.signature, s.run, s.job, s.at
), paired AS (
  SELECT own.*, (
    SELECT MAX(b.at) FROM starts b WHERE b.script = own.script AND b.at < own.at
    AND NOT (b.run = own.run AND b.job = own.job AND b.at > own.at - 60)) AS before_at
  FROM own
)
SELECT p.signature, p.run, p.job, p.facts, b.run AS old_run, b.job AS old_job, MIN(b.facts) AS old_facts
FROM paired p JOIN starts b ON b.script = p.script AND b.at = p.before_at
GROUP BY p.signature, p.run, p.job, p.facts, b.run, b.job ORDER BY p.run, b.run
"""
_NODES_OF_RUNS = """
SELECT DISTINCT a.run, a.job, a.alias FROM attempts a JOIN runs r ON r.id = a.run
WHERE a.run IN ({}) AND a.launched = r.launched AND a.alias IS NOT NULL
"""
_INJECTED = """
SELECT COUNT(*) FROM (
  SELECT DISTINCT run, job, attempt, incident FROM failures WHERE at >= :since AND injected IS TRUE) told
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
LAUNCHER_KILLED = "launcher_killed"
"""The cause of a job that did not tell its end."""
_MOST_CHANGES = 12
_RUNS_AT_ONCE = 500
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
        """Return how much is indexed, and how many failures are not counted because a fault was injected."""
        ((runs, events, first_at, last_at),) = self._ask(_TOTALS)
        ((injected,),) = self._ask(_INJECTED, since=self._since)
        return {
            "runs": runs,
            "events": int(events or 0),
            "injected": injected,
            "first_at": first_at,
            "last_at": last_at,
        }

    def runs(self) -> list[IndexedRun]:
        """Return every run directory with its newest incident, those that told something last first."""
        return [
            IndexedRun(
                row.path, row.first_at, row.last_at, row.incident, row.kind, row.at, row.summary, int(row.of_all or 0)
            )
            for row in self._ask(_RUNS)
        ]  # fmt: skip

    def failures(self) -> list[Failure]:
        """Return all failures that nobody injected, by time; one that several nodes have told counts once.

        They are read once.
        """
        return self._told

    @cached_property
    def _told(self) -> list[Failure]:
        aliases: dict[tuple[Any, ...], dict[str, str]] = {}
        for run, job, attempt, node, alias in self._ask(_ALIASES, since=self._since):
            aliases.setdefault((run, job, attempt), {})[node] = alias
        found: dict[tuple[Any, ...], Failure] = {}
        for row in self._ask(_FAILURES, since=self._since):
            key = row.run, row.job, row.attempt
            known = aliases.get(key, {})
            nodes = tuple(sorted({known.get(node, node) for node in json.loads(row.nodes or "[]")}))
            failure = Failure(
                row.path, row.incident, row.at, row.category, row.cause, row.action or "", row.signature, nodes,
                row.of_nodes, row.ranks, row.summary or "", row.recovery_s, row.lost_steps, row.began_at,
                row.confidence,
            )  # fmt: skip
            found.setdefault((*key, row.incident), failure)
        killed = [
            Failure(
                row.path, "", row.at, "unknown", LAUNCHER_KILLED, "restart", LAUNCHER_KILLED, (), row.of_nodes,
                row.ranks, "the launcher was killed, or its node: the next job found that it told no end", None, None,
                row.began_at,
            )
            for row in self._ask(_KILLED, since=self._since)
            if row.at is not None and row.at >= self._since
        ]  # fmt: skip
        return sorted([*found.values(), *killed], key=lambda failure: failure.at)

    @cached_property
    def _worked(self) -> dict[int | None, float]:
        return {size: float(seconds or 0.0) for size, seconds in self._ask(_BY_SIZE, since=self._since)}

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
        worked = self._worked
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
        worked_s = sum(self._worked.values())
        found = [CauseRate(*key, count, worked_s, *_mean(worked_s, count)) for key, count in counts.items()]
        return sorted(found, key=lambda one: (-one.failures, one.cause, one.blame))

    def recurring(self) -> list[Recurring]:
        """Return what goes wrong, by signature, the most frequent first."""
        groups: dict[str, list[Failure]] = {}
        for failure in self.failures():
            groups.setdefault(failure.signature, []).append(failure)
        worked_s, changes = sum(self._worked.values()), self._changes()
        found = [
            Recurring(
                signature, told[0].cause, told[0].category, told[0].blame, len(told), len({one.run for one in told}),
                told[0].at, told[-1].at, told[0].run, *_mean(worked_s, len(told)), changes.get(signature, ()),
            )
            for signature, told in groups.items()
        ]  # fmt: skip
        return sorted(found, key=lambda one: (-one.count, one.signature))

    def _changes(self) -> dict[str, tuple[dict[str, Any], ...]]:
        """Return by signature what its first start differs in from the one of that script before."""
        rows = {row.signature: row for row in reversed(self._ask(_CHANGES, since=self._since))}
        runs = sorted({run for row in rows.values() for run in (row.run, row.old_run)})
        nodes: dict[tuple[int, str], list[str]] = {}
        for at in range(0, len(runs), _RUNS_AT_ONCE):
            told = ",".join(str(int(run)) for run in runs[at : at + _RUNS_AT_ONCE])
            for run, job, alias in self._ask(_NODES_OF_RUNS.format(told)):
                nodes.setdefault((run, job), []).append(alias)
        lists = {job: hostlist(names) for job, names in nodes.items()}

        def facts(text: str, job: tuple[int, str]) -> dict[str, Any]:
            return {**json.loads(text or "{}"), "nodes": lists.get(job, "")}

        return {
            signature: _differences(
                facts(row.old_facts, (row.old_run, row.old_job)), facts(row.facts, (row.run, row.job))
            )
            for signature, row in rows.items()
        }

    def recurrence(self, signature: str, run: str, at: float) -> dict[str, Any] | None:
        """Return how often something has gone wrong up to a time, and in how many runs of all; None: never before."""
        rows = self._ask(_EARLIER, signature=signature, since=self._since, at=at)
        earlier = {(row.run, row.job, row.attempt, row.incident): row for row in reversed(rows)}
        others = [row for row in reversed(earlier.values()) if row.path != run or row.at < at - 1.0]
        if not others:
            return None
        runs = {row.path for row in rows} | {run}
        return {
            "times": len(others) + 1, "runs": len(runs), "of_runs": self.totals()["runs"], "first_at": others[0].at,
            "first_run": others[0].path,
        }  # fmt: skip


def _rate(size: int | None, failures: int, worked_s: float) -> Rate:
    return Rate(size, failures, worked_s, *_mean(worked_s, failures))


def _mean(worked_s: float, failures: int) -> tuple[float | None, float, float | None]:
    """Return the mean time between failures, and its limits."""
    return (worked_s / failures if failures and worked_s else None, *mean_time_between_s(worked_s, failures))


def _differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    changed = [what for what in sorted({*old, *new}) if old.get(what) != new.get(what) and what not in _UNTOLD]
    return tuple({"what": what, "before": old.get(what), "after": new.get(what)} for what in changed[:_MOST_CHANGES])
