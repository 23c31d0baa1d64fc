"""Metrics.

Each one's name, unit, labels and meaning, once; and texts and numbers that others do not take, made plain.

Names are OpenTelemetry's (`checkpoint.duration`, unit `s`); Prometheus' follow from them by the rules of
OpenTelemetry's "Prometheus and OpenMetrics Compatibility": dots become underscores, units are spelt out, counters end
in `_total`. No label is called `job` or `instance`, which are Prometheus' own.

A sink that could not write such a value would fail at it for ever, and everything behind it would wait.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

NAMESPACE = "resilience"
Kind = Literal["counter", "gauge", "histogram"]

_UNIT_NAMES = {"s": "seconds", "By": "bytes", "1": "ratio"}
# From a save into memory to a restart that waits for nodes.
DURATION_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@attrs.frozen
class Family:
    """One metric, whatever its labels say."""

    name: str
    """Without the namespace, as OpenTelemetry writes it."""
    kind: Kind
    about: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    """`s`, `By`, or `1` for a share; an annotation such as `{step}`, or nothing, where things are counted."""

    @property
    def otel_name(self) -> str:
        """The name with its namespace."""
        return f"{NAMESPACE}.{self.name}"

    @property
    def prometheus_name(self) -> str:
        """The name as it is exposed."""
        parts = [self.otel_name.replace(".", "_")]
        if unit := _UNIT_NAMES.get(self.unit):
            parts.append(unit)
        if self.kind == "counter":
            parts.append("total")
        return "_".join(parts)


@attrs.define
class Durations:
    """A histogram over `DURATION_BOUNDS_S`: how many fell into each bucket (one more than bounds), and their sum."""

    counts: list[int] = attrs.field(factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    sum_s: float = 0.0
    least_s: float = 0.0
    most_s: float = 0.0
    last_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.least_s = seconds if self.count == 0 else min(self.least_s, seconds)
        self.most_s, self.last_s = max(self.most_s, seconds), seconds
        self.counts[bisect.bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)


@attrs.frozen
class Sample:
    """One value of one family; `labels` are the values of its labels, in their order."""

    family: Family
    labels: tuple[str, ...]
    value: float | Durations


def _table(*families: Family) -> Mapping[str, Family]:
    return {family.name: family for family in families}


FAMILIES = _table(
    # What the journal tells, of this node's processes.
    Family("run.info", "gauge", "Always 1; the labels name the job and the SDK.", ("job_key", "version")),
    Family("run.starts", "counter", "Jobs that began in this run directory.", unit="{job}"),
    Family("run.start_timestamp", "gauge", "When the newest job began, in Unix time.", unit="s"),
    Family("run.finished", "gauge", "1 once training is complete."),
    Family("run.time", "counter", "Time since the run began, by what it went into.", ("state",), "s"),
    Family("run.lost_time", "counter", "Training time whose steps were lost, or in which a rank hung.", unit="s"),
    Family(
        "run.bucket", "gauge", "Time since the run began, by the buckets of `resilience goodput`.", ("bucket",), "s"
    ),
    Family("run.goodput", "gauge", "Time of steps that count, as a share of all time since the run began.", unit="1"),
    Family("run.ettr", "gauge", "Effective training time, as a share of all time since the run began.", unit="1"),
    Family("attempt.number", "gauge", "Number of the current attempt, from 0."),
    Family("attempts", "counter", "Attempts that began.", unit="{attempt}"),
    Family("restarts", "counter", "Attempts after the first one of their job.", unit="{restart}"),
    Family("rank.exits", "counter", "Ranks that ended, by exit code or signal.", ("result",), "{rank}"),
    Family("suspects", "counter", "Deadlines that expired.", unit="{deadline}"),
    Family("incidents", "counter", "Incidents, by what and why.", ("kind", "category", "cause"), "{incident}"),
    Family(
        "incident.last_timestamp",
        "gauge",
        "When there was the newest one of these incidents, in Unix time.",
        ("kind", "category", "cause"),
        "s",
    ),
    Family("recovery.duration", "histogram", "From an incident to all ranks stepping again.", unit="s"),
    Family("lost.steps", "counter", "Steps that have to be done again after incidents.", unit="{step}"),
    Family("decisions", "counter", "What the launcher decided at the end of an attempt.", ("verdict",), "{decision}"),
    Family("decision.last_timestamp", "gauge", "When that was last decided, in Unix time.", ("verdict",), "s"),
    Family("checkpoints", "counter", "Checkpoints, by what became of them.", ("outcome",), "{checkpoint}"),
    Family("checkpoint.duration", "histogram", "From the beginning of a save to its commit.", unit="s"),
    Family("checkpoint.stall", "counter", "Time that training stood still for checkpoints.", unit="s"),
    Family("checkpoint.size", "gauge", "Size of the newest checkpoint.", unit="By"),
    Family("checkpoint.last_step", "gauge", "Step of the newest checkpoint.", unit="{step}"),
    Family("checkpoint.last_timestamp", "gauge", "When the newest checkpoint was committed, in Unix time.", unit="s"),
    Family("checkpoint.last_failure_timestamp", "gauge", "When a checkpoint last failed, in Unix time.", unit="s"),
    Family("resume.step", "gauge", "Step that the newest resume went on from.", unit="{step}"),
    Family("resume.duration", "histogram", "How long loading a checkpoint took.", unit="s"),
    Family("preemption.notices", "counter", "Notices to leave, by who told.", ("source",), "{notice}"),
    Family("preemption.stops", "counter", "Stops that all ranks agreed on.", unit="{stop}"),
    Family("stragglers", "gauge", "Ranks, nodes or sections that are slow now."),
    Family("straggler.findings", "counter", "How often somebody was found slow.", unit="{finding}"),
    Family("straggler.score", "gauge", "Scores of the newest straggler report, 0 (slow) to 1.", ("score",)),
    Family("numerics.findings", "counter", "Losses and gradient norms, by what was found.", ("found",), "{finding}"),
    Family("degraded", "counter", "What the SDK could not do, by what it was.", ("what",), "{event}"),
    Family("degraded.last_timestamp", "gauge", "When the newest one of these came, in Unix time.", ("what",), "s"),
    Family("health.ok", "gauge", "1 where the last look at something found it well, else 0.", ("what",)),
    Family(
        "health.findings",
        "counter",
        "Findings of the node's probes that were not well.",
        ("check", "status"),
        "{finding}",
    ),
    Family(
        "health.last_finding_timestamp",
        "gauge",
        "When there was the newest one of these findings, in Unix time.",
        ("check", "status"),
        "s",
    ),
    Family("journal.lines", "counter", "Lines of the journal.", unit="{line}"),
    Family("journal.torn_lines", "counter", "Lines of the journal that cannot be read.", unit="{line}"),
    Family("journal.last_timestamp", "gauge", "Time of the newest event, in Unix time.", unit="s"),
    # What the rank pages and /proc tell at the moment.
    Family("run.up", "gauge", "1 while the job runs on this node, 0 once it has ended; 1 stays where it was killed."),
    Family("telemetry.timestamp", "gauge", "When these values were looked up, in Unix time.", unit="s"),
    Family("ranks", "gauge", "Ranks that live on this node."),
    Family("rank.step", "gauge", "Step that a rank is at.", ("rank",), "{step}"),
    Family("rank.heartbeats", "counter", "Completed heartbeats of a rank in this attempt.", ("rank",), "{heartbeat}"),
    Family("rank.heartbeat_age", "gauge", "Time since a rank's last sign of life.", ("rank",), "s"),
    Family("process.cpu", "counter", "CPU time of the SDK's own processes.", ("process",), "s"),
    Family("process.memory", "gauge", "Resident memory of the SDK's own processes.", ("process",), "By"),
)
NEWEST: Mapping[str, str] = {
    "incidents": "incident.last_timestamp",
    "decisions": "decision.last_timestamp",
    "degraded": "degraded.last_timestamp",
    "health.findings": "health.last_finding_timestamp",
}
"""When a counter with labels last grew: whoever asks for what is new cannot tell it from counts, which a job that is
started again in an old run directory brings along."""
OF_TIME = frozenset({"run.time", "run.lost_time", "run.bucket", "run.goodput", "run.ettr"})
"""What grows without an event, and is told by `goodput`."""


_LAST_S = 4e9  # in the year 2096


def clean_text(text: str, most: int) -> str:
    """Return a text as one printable line of at most `most` characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:most])


def clean_time(seconds: float) -> float:
    """Return a Unix time that every clock can show."""
    return min(max(seconds, 0.0), _LAST_S)


def clean_json(value: Any) -> Any:
    """Return a JSON value without NaN and infinities, which are Python's own: they become texts."""
    if isinstance(value, dict):
        return {key: clean_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def amount(value: object) -> float | None:
    """Return a finite number that is 0 or more; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
