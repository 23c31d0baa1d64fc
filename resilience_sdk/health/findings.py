"""Findings of probes: one for each thing looked at, graded; their report, what differs between nodes, their events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from resilience_sdk.core.json_records import from_values, to_values
from resilience_sdk.core.words import thing_words


class Status(str, Enum):
    """How a thing is. The order is the order of severity."""

    OK = "ok"
    UNAVAILABLE = "unavailable"  # could not be looked at, which is no fault: no GPU, no permission, not installed
    DEGRADED = "degraded"  # works, and will be slower, shorter or riskier than it should
    FAILED = "failed"  # a job that needs it will not run, or will die


OWN_FAULT = "own_fault"  # the key in `Finding.data` of what a fault of the SDK has kept from being seen
_SEVERITIES = tuple(Status)


@attrs.frozen(kw_only=True)
class Finding:
    """What was seen of one thing.

    `probe` is the probe's name, `check` what was looked at in the terms of the field (`ecc_uncorrected`), `subject` the
    one thing among many (`GPU 3`, `/dev/shm`, `mlx5_0 port 1`), empty where there is only one. `value` and
    `threshold` are in `unit`; both are None where there is nothing to measure. `cure` is empty when nothing is wrong.
    A finding that `must` be good stops a preflight when it is `failed`. `data` holds what compares nodes or times:
    plain JSON values; `own_fault` says that a fault of the SDK kept this from being seen, `cause` is the fault's name
    in the taxonomy, `works` tells of a link whether it is up (and `lost` what to do where it was before), and `growth`
    (`per_minute`, `cure`) makes `value` a counter of which only the growth between two looks may be wrong (see
    `watch`).
    """

    probe: str
    check: str
    status: Status = attrs.field(converter=Status)
    subject: str = ""
    value: float | int | str | None = None
    unit: str = ""
    threshold: float | int | str | None = None
    evidence: str = ""
    cure: str = ""
    must: bool = False
    data: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def stops(self) -> bool:
        """Tell whether a job should not be started on this."""
        return self.must and self.status is Status.FAILED

    @property
    def is_bad(self) -> bool:
        """Tell whether something is wrong."""
        return self.status in (Status.DEGRADED, Status.FAILED)

    @property
    def key(self) -> tuple[str, str, str]:
        """Name what was looked at."""
        return self.probe, self.check, self.subject

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with every key, from which `from_values` makes an equal value."""
        return to_values(self)


def severity(status: Status) -> int:
    """Return the place of a status in the order of severity; ok is 0."""
    return _SEVERITIES.index(status)


def low(value: float, *, degraded: float, failed: float = float("-inf")) -> Status:
    """Return the status of a value of which there can be too little; the limits themselves are good."""
    return Status.FAILED if value < failed else Status.DEGRADED if value < degraded else Status.OK


def high(value: float, *, degraded: float, failed: float = float("inf")) -> Status:
    """Return the status of a value of which there can be too much; the limits themselves are good."""
    return Status.FAILED if value > failed else Status.DEGRADED if value > degraded else Status.OK


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names as a person writes them, each once: `a`, `a, b and c`, `a, b and 7 more`."""
    shown = list(dict.fromkeys(names))
    if len(shown) > most:
        shown = [*shown[:most], f"{len(shown) - most} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def own_fault(probe: str, subject: str, evidence: str, error: str) -> Finding:
    """Return the finding of a probe that failed by a fault of the SDK, so that nothing was seen.

    `error` is the line that Python says of it: it tells what to do, which is never anything with the node.
    """
    cure = "report this line"
    if error.startswith(("ModuleNotFoundError", "ImportError")) or ": can't open file " in error:
        cure = "the installation of resilience_sdk is not whole: install it again with pip, and with it what it needs"
    return unseen(probe, subject, evidence, cure, data={OWN_FAULT: True})


def unseen(probe: str, subject: str, evidence: str, cure: str, **more: Any) -> Finding:
    """Return the finding of a probe that could not look."""
    values = {"status": Status.UNAVAILABLE, "evidence": evidence, "cure": cure, **more}
    return Finding(probe=probe, check="probe", subject=subject, **values)


def told_faults(findings: Iterable[Finding]) -> list[str]:
    """Return what faults of the SDK have kept from being seen as lines: each once, with all probes it concerns."""
    kept: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.data.get(OWN_FAULT):
            kept.setdefault((finding.evidence, finding.cure), []).append(finding.probe)
    return [
        f"a fault of the SDK, not of this node, kept {listed(names)} from being looked at: {evidence}; {cure}"
        for (evidence, cure), names in kept.items()
    ]


@attrs.frozen(kw_only=True)
class HealthReport:
    """The findings on one node, or on several with their differences.

    `at` is Unix time in seconds, `took_s` how long the probes took. `ok` tells whether a job may be started: nothing
    that must be good has failed.
    """

    node: str
    at: float
    took_s: float
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Tell whether nothing stands against starting a job."""
        return not any(finding.stops for finding in self.findings)

    @property
    def status(self) -> Status:
        """Return the most severe status among the findings; ok when there are none."""
        return max((finding.status for finding in self.findings), key=severity, default=Status.OK)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `report_from_json` makes an equal value."""
        return {**to_values(self), "ok": self.ok, "status": self.status.value}


def report_from_json(data: Any) -> HealthReport:
    """Return the report that `HealthReport.to_json` described; raise ValueError for anything else."""
    return from_values(HealthReport, data)


# Those that make ranks disagree about what goes over the wire, or about what a checkpoint holds.
_MUST_BE_EQUAL = frozenset({"torch", "cuda", "nccl", "resilience-sdk"})
_REINSTALL = "install the same version everywhere: one image or environment on a shared file system for all nodes"
_CURES_OF_DIFFERENCES = {
    "settings": "give every node the same options, or one --config file for all",
    "environment": "export the same value on every node: in the batch script, not in a shell profile",
    **dict.fromkeys(("torch", "nccl", "python", "packages"), _REINSTALL),
}


def compare(findings: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return a finding for each value that differs between the nodes or ranks, which are named by the keys.

    A finding that is to be equal everywhere says so itself: `data["same"]` holds values by name. The odd ones are those
    that differ from more than half; where no value has that many, nobody is called odd.
    """
    values: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for who, told in findings.items():
        for finding in told:
            if isinstance(same := finding.data.get("same"), Mapping):
                values.setdefault((finding.probe, finding.check), {})[who] = same
    found = []
    for (probe, check), by_who in values.items():
        for name in sorted({name for same in by_who.values() for name in same}):
            answers = {who: "(not set)" if same.get(name) is None else str(same[name]) for who, same in by_who.items()}
            if len(set(answers.values())) > 1:
                found.append(_difference(probe, check, name, answers))
    return found


def _difference(probe: str, check: str, name: str, answers: Mapping[str, str]) -> Finding:
    counts = Counter(answers.values()).most_common()
    usual, times = counts[0]
    odd = [who for who, value in answers.items() if value != usual] if 2 * times > len(answers) else []
    groups = [f"{value} on {listed(who for who, own in answers.items() if own == value)}" for value, _ in counts]
    must = name in _MUST_BE_EQUAL
    return Finding(
        probe=probe,
        check="same_everywhere",
        subject=name,
        status=Status.FAILED if must else Status.DEGRADED,
        value=len(counts),
        unit="different values",
        threshold=1,
        evidence="; ".join(groups),
        cure=_CURES_OF_DIFFERENCES.get(check, "make the nodes equal, or leave the odd one out"),
        must=must,
        data={"check": check, "odd": odd, "values": dict(answers)},
    )


# Happen and are over: they are no state of the node.
EVENTS = frozenset({"xid", "kernel_log", "oom_kills"})


def to_event(finding: Finding, *, lasts: bool = False) -> dict[str, Any]:
    """Return the fields of the journal's `health` event of a finding.

    `lasts`: its end will be told. What was looked at only once, or has happened and is over, is no state of the node.
    """
    told = finding.to_json()
    return {
        "lasts": lasts and finding.check not in EVENTS,
        "at": finding.data.get("at"),
        "what": thing_words(*finding.key),
        "ok": not finding.is_bad,
        "why": finding.evidence or None,
        **{name: told[name] for name in ("probe", "check", "subject", "status", "value", "unit", "threshold")},
        "cure": finding.cure or None,
        "cause": finding.data.get("cause"),
    }


@attrs.frozen(kw_only=True)
class HealthSign:
    """A health event near an incident; `after_s` is negative where it came before."""

    after_s: float
    event: Mapping[str, Any]

    @property
    def before(self) -> bool:
        """Tell whether the sign was there before the incident was."""
        return self.after_s <= 0


# The window in which Meta's study of its clusters attributes a failure to a health check.
_BEFORE_S, _AFTER_S = 600.0, 300.0


def signs_near(at: float, events: Iterable[Mapping[str, Any]]) -> list[HealthSign]:
    """Return the bad health events around an incident at Unix time `at`: what has failed first, then the nearest."""
    signs = [
        HealthSign(after_s=_when(event) - at, event=event)
        for event in events
        if event.get("event") == "health" and event.get("ok") is False and -_BEFORE_S <= _when(event) - at <= _AFTER_S
    ]
    return sorted(signs, key=lambda sign: (sign.event.get("status") != Status.FAILED, abs(sign.after_s)))


def _when(event: Mapping[str, Any]) -> float:
    """Return when it happened, which may be long before somebody looked; else when it was seen. Unix seconds."""
    at = event.get("at")
    return float(at if isinstance(at, (int, float)) else event["t"])
