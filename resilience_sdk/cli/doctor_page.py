"""The page of `resilience doctor`: problems first, each with its cure; what is in order in one line a probe. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from resilience_sdk.cli.common import one_line
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.report import HealthReport
from resilience_sdk.health.software.shared import shown_values
from resilience_sdk.settings import Settings
from resilience_sdk.settings.fields import FIELDS

_WORDS = {Status.FAILED: "FAILED", Status.DEGRADED: "degraded", Status.UNAVAILABLE: "not seen", Status.OK: "ok"}
_WIDTH = max(map(len, _WORDS.values()))
_INDENT = " " * (_WIDTH + 2)


def page(report: HealthReport, settings: Settings, *, verbose: bool = False) -> list[str]:
    """Return the lines of the page; with `verbose` every finding and every setting has one."""
    lines = [headline(report), ""]
    for status in (Status.FAILED, Status.DEGRADED, Status.UNAVAILABLE):
        for finding in report.findings:
            if finding.status is status:
                lines += problem(finding)
    good = [finding for finding in report.findings if finding.status is Status.OK]
    lines += [_entry(finding) for finding in good] if verbose else list(_in_order(good))
    return [*lines, "", *_settings(settings, verbose=verbose)]


def headline(report: HealthReport, node: str = "") -> str:
    """Return the verdict on a node in one line."""
    stops = sum(finding.stops for finding in report.findings)
    verdict = (
        "a job can start" if not stops else f"a job should not start: {_count(stops, 'thing')} must be cured first"
    )
    others = sum(finding.status in (Status.FAILED, Status.DEGRADED) for finding in report.findings) - stops
    warned = f", {_count(others, 'warning')}" if others else ""
    return f"{node or report.node}: {verdict}{warned} (looked for {report.took_s:.1f} s)"


def problem(finding: Finding) -> list[str]:
    """Return the lines of a finding and of its cure."""
    cure = [f"{_INDENT}cure: {one_line(finding.cure)}"] if finding.cure else []
    return [_entry(finding), *cure]


def _entry(finding: Finding) -> str:
    name = finding.check.replace("_", " ")
    subject = f" {one_line(finding.subject)}" if finding.subject else ""
    return f"{_WORDS[finding.status]:<{_WIDTH}}  {finding.probe}: {name}{subject}: {one_line(finding.evidence)}"


def _in_order(good: Sequence[Finding]) -> Iterator[str]:
    """Yield one line for each probe, with the names of what is in order."""
    names: dict[str, list[str]] = {}
    for finding in good:
        told = names.setdefault(finding.probe, [])
        name = finding.check.replace("_", " ")
        if name not in told:
            told.append(name)
    for probe, told in names.items():
        yield f"{_WORDS[Status.OK]:<{_WIDTH}}  {probe}: {', '.join(told)}"


def settings_rows(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return each setting's value, redacted where it is a secret, and where it came from (`default`: nobody set it)."""
    values = shown_values(settings)
    return {
        name: {"value": values[name], "source": settings.sources.get(name, "default" if is_default else "code")}
        for name in FIELDS
        for is_default in [name not in settings.explicit]
    }


def _settings(settings: Settings, *, verbose: bool) -> Iterator[str]:
    rows = settings_rows(settings)
    shown = {name: row for name, row in rows.items() if verbose or row["source"] != "default"}
    width = max(map(len, shown), default=0)
    yield f"settings: {len(rows) - len(shown)} of {len(rows)} at their defaults" + ("" if verbose else " (--verbose)")
    for name, row in shown.items():
        yield f"  {name:<{width}}  {one_line(_plain(row['value']))}  from {one_line(row['source'])}"


def _plain(value: Any) -> str:
    """Return a value as it is written on a command line."""
    if isinstance(value, dict):
        return ",".join(f"{name}:{item:g}" for name, item in value.items()) or "learned"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
