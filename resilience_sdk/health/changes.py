"""What is different between two looks. Pure: the findings of both, and the time between them, are arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from resilience_sdk.health.findings import Finding, Status, severity

_MINUTE_S = 60.0
_GREW = "grew"


def judge_growth(before: Iterable[Finding], after: Sequence[Finding], seconds: float) -> list[Finding]:
    """Return `after`, with each counter that grew faster than it may since `before` degraded.

    `seconds` lie between the two looks; less than a minute counts as one, so that a single event is no high rate.
    A counter that became smaller was reset, and counts from zero.
    """
    earlier = {_key(finding): finding.value for finding in before}
    return [_judged(finding, earlier.get(_key(finding)), max(seconds, _MINUTE_S)) for finding in after]


def has_grown(finding: Finding) -> bool:
    """Tell whether `judge_growth` has found that a counter grew too fast."""
    return bool(finding.data.get(_GREW))


def worsened(before: Iterable[Finding], after: Iterable[Finding]) -> list[Finding]:
    """Return the findings of `after` that are degraded or failed, and were less or nothing at `before`."""
    earlier = {_key(finding): severity(finding.status) for finding in before}
    return [
        finding
        for finding in after
        if finding.status in (Status.DEGRADED, Status.FAILED)
        and severity(finding.status) > earlier.get(_key(finding), 0)
    ]


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.probe, finding.check, finding.subject


def _judged(finding: Finding, earlier: object, seconds: float) -> Finding:
    growth = finding.data.get("growth")
    if growth is None or not isinstance(finding.value, int) or not isinstance(earlier, int):
        return finding
    grown = finding.value - earlier if finding.value >= earlier else finding.value
    allowed = float(growth["per_minute"])
    if not grown or grown * _MINUTE_S / seconds <= allowed:
        return finding
    rate = f"grew by {grown} to {finding.value} within {seconds:.0f} s"
    limit = f", at most {allowed:g} a minute is good" if allowed else ""
    evidence = f"{finding.evidence}; {rate}{limit}" if finding.evidence else f"{rate}{limit}"
    status = max(finding.status, Status.DEGRADED, key=severity)
    data = {**finding.data, _GREW: True}
    return attrs.evolve(finding, status=status, evidence=evidence, cure=finding.cure or growth["cure"], data=data)
