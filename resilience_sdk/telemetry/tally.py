"""Metrics as a pure function of the journal's events.

Counters are folded from the first line of the journal, never kept in a file: a restarted exporter counts the same.
Fields may be missing, of another version or of the wrong type; what cannot be understood is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

from resilience_sdk._version import __version__
from resilience_sdk.core.journal import Event
from resilience_sdk.goodput.ledger import Ledger, RunPhase
from resilience_sdk.goodput.summary import ettr, goodput, unknown_buckets
from resilience_sdk.telemetry.metrics import (
    FAMILIES,
    NEWEST,
    OF_TIME,
    Durations,
    Sample,
    amount,
    clean_text,
    clean_time,
)

_MOST_LABEL_CHARACTERS = 64
_MOST_SERIES = 200
"""Of one family: whatever a journal holds, it cannot flood a time-series database."""
OTHERS = "other"
Series = tuple[str, tuple[str, ...]]
"""Name of the family, values of its labels."""


@attrs.frozen
class _Slow:
    """Who is slow in what. Its ranks may change while it lasts, so two are the same where they share one."""

    what: tuple[str, ...]
    ranks: frozenset[int]

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> _Slow:
        given = event.get("ranks")
        what = (
            *(str(event.get(key)) for key in ("section", "section_kind", "role")),
            str(event.get("kind") == "global"),
        )
        ranks = given if isinstance(given, (list, tuple)) else ()
        return cls(what, frozenset(rank for rank in ranks if isinstance(rank, int)))

    def is_about(self, other: _Slow) -> bool:
        return self.what == other.what and (bool(self.ranks & other.ranks) or not self.ranks | other.ranks)


class Tally:
    """The state after some events. Not thread-safe."""

    def __init__(self) -> None:
        """Begin with no events; every metric without labels that counts something begins at 0."""
        self._values: dict[Series, float | Durations] = {}
        self._changed: list[Series] = []
        self._series: dict[str, int] = {}
        self._attempts_seen: set[tuple[str, int]] = set()
        self._slow: list[_Slow] = []
        self._has_launcher = False
        self._stop_counted = False
        self._at = 0.0  # time of the event that is being taken
        self.first_at: float | None = None
        """Time of the first event: when the counters began, in Unix seconds."""
        self.job: str | None = None
        self.attempt = 0
        self.step = 0
        """The newest step that an event carried."""
        for name in _FROM_THE_START:
            self._values[name, ()] = Durations() if FAMILIES[name].kind == "histogram" else 0.0

    def apply(self, event: Mapping[str, Any]) -> list[Sample]:
        """Take one event; return what it has changed."""
        self._changed = []
        at = self._at = clean_time(float(event["t"]))
        self.first_at = at if self.first_at is None else self.first_at
        self._add("journal.lines")
        self._set_newest("journal.last_timestamp")
        name = str(event["event"])
        if (step := _integer(event.get("step"))) is not None:
            self.step = step
        if (rule := _RULES.get(name)) is not None:
            rule(self, event)
        changed = dict.fromkeys(self._changed)
        return [Sample(FAMILIES[series[0]], series[1], self._values[series]) for series in changed]

    def apply_torn(self, lines: int) -> None:
        """Count lines that could not be read."""
        if lines:
            self._add("journal.torn_lines", amount=lines)

    def samples(self) -> Iterable[Sample]:
        """Return every value, family by family."""
        for name, labels in sorted(self._values):
            yield Sample(FAMILIES[name], labels, self._values[name, labels])

    # -- rules

    def _on_run_start(self, event: Mapping[str, Any]) -> None:
        self._has_launcher = True
        self.job = _text(event.get("job"))
        self._forget("run.info")
        self._forget("health.ok")  # of an earlier job, perhaps of another time: nobody has looked yet
        self._set("run.info", 1, self.job or "", __version__)
        self._add("run.starts")
        self._set("run.start_timestamp", clean_time(float(event["t"])))
        self._set("run.finished", 0)

    def _on_attempt_start(self, event: Mapping[str, Any]) -> None:
        self._has_launcher = True
        self._begin_attempt(event)

    def _on_rank_start(self, event: Mapping[str, Any]) -> None:
        """Under a foreign launcher the first rank of an attempt tells that it began."""
        attempt = (str(event.get("job")), _integer(event.get("attempt")) or 0)
        if not self._has_launcher and attempt not in self._attempts_seen:
            self._attempts_seen.add(attempt)
            self._begin_attempt(event)

    def _begin_attempt(self, event: Mapping[str, Any]) -> None:
        self.attempt = _integer(event.get("attempt")) or 0
        self._set("attempt.number", self.attempt)
        self._add("attempts")
        if self.attempt > 0:
            self._add("restarts")
        self._stop_counted = False
        self._slow.clear()
        self._set("stragglers", 0)

    def _on_rank_exit(self, event: Mapping[str, Any]) -> None:
        code = _integer(event.get("exit_code"))
        self._add("rank.exits", _text(event.get("signal")) or ("unknown" if code is None else str(code)))

    def _on_suspect(self, _: Mapping[str, Any]) -> None:
        self._add("suspects")

    def _on_incident(self, event: Mapping[str, Any]) -> None:
        self._add("incidents", *(_text(event.get(key)) or "unknown" for key in ("kind", "category", "cause")))

    def _on_recovered(self, event: Mapping[str, Any]) -> None:
        if (seconds := amount(event.get("recovery_s"))) is not None:
            self._observe("recovery.duration", seconds)
        if (lost := amount(event.get("lost_steps"))) is not None:
            self._add("lost.steps", amount=lost)

    def _on_decision(self, event: Mapping[str, Any]) -> None:
        # A node that leaves alone has ended nothing: the job goes on without it.
        if (verdict := _text(event.get("verdict"))) is not None and event.get("others_go_on") is not True:
            self._add("decisions", verdict)

    def _on_commit(self, event: Mapping[str, Any]) -> None:
        self._add("checkpoints", "committed")
        if (seconds := amount(event.get("seconds"))) is not None:
            self._observe("checkpoint.duration", seconds)
        if (stall := amount(event.get("stall_s"))) is not None:
            self._add("checkpoint.stall", amount=stall)
        if (size := amount(event.get("bytes"))) is not None:
            self._set("checkpoint.size", size)
        if (step := _integer(event.get("step"))) is not None:
            self._set("checkpoint.last_step", step)
        self._set("checkpoint.last_timestamp", clean_time(float(event["t"])))

    def _on_save_failed(self, _: Mapping[str, Any]) -> None:
        self._add("checkpoints", "failed")
        self._set_newest("checkpoint.last_failure_timestamp")

    def _on_resume(self, event: Mapping[str, Any]) -> None:
        if (step := _integer(event.get("step"))) is not None:
            self._set("resume.step", step)
        if (seconds := amount(event.get("seconds"))) is not None:
            self._observe("resume.duration", seconds)

    def _on_notice(self, event: Mapping[str, Any]) -> None:
        self._add("preemption.notices", _text(event.get("source")) or "unknown")

    def _on_stop_agreed(self, _: Mapping[str, Any]) -> None:
        if not self._stop_counted:  # every rank tells it
            self._stop_counted = True
            self._add("preemption.stops")

    def _on_straggler(self, event: Mapping[str, Any]) -> None:
        what = event.get("what")
        if what in ("found", "still", "over"):
            finding = _Slow.of(event)
            self._slow = [slow for slow in self._slow if not slow.is_about(finding)]
            if what != "over":
                self._slow.append(finding)
            if what == "found":
                self._add("straggler.findings")
            self._set("stragglers", len(self._slow))
        elif what == "report" and isinstance(scores := event.get("scores"), Mapping):
            for name, value in scores.items():
                if (score := amount(value)) is not None:
                    self._set("straggler.score", score, str(name))

    def _on_numerics(self, event: Mapping[str, Any]) -> None:
        self._add("numerics.findings", _text(event.get("found")) or "unknown")

    def _on_health(self, event: Mapping[str, Any]) -> None:
        ok, status = event.get("ok"), _text(event.get("status"))
        if isinstance(ok, bool):
            if event.get("lasts") is not False:  # what happened and is over, or was seen once, is no state
                self._set("health.ok", int(ok), _text(event.get("what")) or "unknown")
            if not ok and status is not None:  # of a probe; else it is a resource that somebody waited for
                self._add("health.findings", _text(event.get("check")) or "unknown", status)

    def _on_degraded(self, event: Mapping[str, Any]) -> None:
        self._add("degraded", _text(event.get("what")) or "unknown")

    def _on_finished(self, _: Mapping[str, Any]) -> None:
        self._set("run.finished", 1)

    # -- values

    def _add(self, name: str, *labels: str, amount: float = 1) -> None:
        series = self._find(name, labels)
        value = self._values.get(series, 0.0)
        if isinstance(value, float):
            self._values[series] = value + amount
        if (newest := NEWEST.get(name)) is not None:
            self._set_newest(newest, *labels)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[self._find(name, labels)] = float(value)

    def _set_newest(self, name: str, *labels: str) -> None:
        """Set a time to that of this event, unless a later one is known: lines of several writers may come late."""
        series = self._find(name, labels)
        value = self._values.get(series, 0.0)
        if isinstance(value, float):
            self._values[series] = max(value, self._at)

    def _observe(self, name: str, seconds: float) -> None:
        if isinstance(durations := self._values[self._find(name, ())], Durations):
            durations.observe(seconds)

    def _forget(self, name: str) -> None:
        for series in [series for series in self._values if series[0] == name]:
            del self._values[series]
        self._series.pop(name, None)

    def _find(self, name: str, labels: tuple[str, ...]) -> Series:
        series = (name, tuple(map(label_text, labels)))
        if series not in self._values:
            if self._series.get(name, 0) >= _MOST_SERIES:
                series = (name, (OTHERS,) * len(labels))
            else:
                self._series[name] = self._series.get(name, 0) + 1
        self._changed.append(series)
        return series


_FROM_THE_START = tuple(
    name for name, family in FAMILIES.items()
    if not family.labels and family.kind != "gauge" and name not in OF_TIME
)  # fmt: skip
_RULES: Mapping[str, Callable[[Tally, Mapping[str, Any]], None]] = {
    Event.RUN_START.value: Tally._on_run_start,
    Event.ATTEMPT_START.value: Tally._on_attempt_start,
    Event.RANK_START.value: Tally._on_rank_start,
    Event.RANK_EXIT.value: Tally._on_rank_exit,
    Event.SUSPECT.value: Tally._on_suspect,
    Event.INCIDENT.value: Tally._on_incident,
    Event.RECOVERED.value: Tally._on_recovered,
    Event.DECISION.value: Tally._on_decision,
    Event.CKPT_COMMIT.value: Tally._on_commit,
    Event.CKPT_FAIL.value: Tally._on_save_failed,
    Event.CKPT_SKIP.value: lambda tally, _: tally._add("checkpoints", "skipped"),
    Event.CKPT_QUARANTINE.value: lambda tally, _: tally._add("checkpoints", "quarantined"),
    Event.RESUME.value: Tally._on_resume,
    Event.PREEMPT_NOTICE.value: Tally._on_notice,
    Event.STOP_AGREED.value: Tally._on_stop_agreed,
    Event.STRAGGLER.value: Tally._on_straggler,
    Event.NUMERICS.value: Tally._on_numerics,
    Event.HEALTH.value: Tally._on_health,
    Event.DEGRADED.value: Tally._on_degraded,
    Event.FINISHED.value: Tally._on_finished,
}


def label_text(text: str) -> str:
    """Return what may stand as the value of a label: one short line that UTF-8 can write."""
    return clean_text(text, _MOST_LABEL_CHARACTERS)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63 else None


@attrs.define
class GoodputMetrics:
    """The account of one run on one node. Not thread-safe.

    Of each node by itself: who restarts waits for all nodes, so they hardly differ, but what was lost is journalled by
    the node of rank 0 alone.
    """

    ledger: Ledger = attrs.field(factory=Ledger)
    _shown: dict[str, float] = attrs.field(factory=dict)

    def samples(self, now: float | None) -> Iterator[Sample]:
        """Return the values at `now`, as the ledger's `when` told it; None where the job is not running.

        What is counted never becomes less, though an event may come later than the moment that it tells of.
        """
        reading = self.ledger.read(now)
        for phase in RunPhase:
            yield Sample(FAMILIES["run.time"], (phase.value,), self._at_least(phase.value, reading.phases[phase]))
        yield Sample(FAMILIES["run.lost_time"], (), self._at_least("lost", reading.lost_s))
        unknown = unknown_buckets(self.ledger, reading.buckets)
        for bucket, seconds in reading.buckets.items():
            if bucket in unknown:
                continue
            yield Sample(FAMILIES["run.bucket"], (bucket.value,), seconds)
        for name, ratio in (("run.goodput", goodput(reading.buckets)), ("run.ettr", ettr(reading.buckets))):
            if ratio is not None:
                yield Sample(FAMILIES[name], (), ratio)

    def _at_least(self, name: str, value: float) -> float:
        self._shown[name] = max(value, self._shown.get(name, 0.0))
        return self._shown[name]
