"""What a preflight found, as one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.health.findings import Finding, Status, finding_from_json, worst


def _as_tuple(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(findings)


@attrs.frozen(kw_only=True)
class HealthReport:
    """The findings on one node, or on several with their differences.

    `at` is Unix time in seconds, `took_s` how long the probes took. `ok` tells whether a job may be started: nothing
    that must be good has failed.
    """

    node: str
    at: float
    took_s: float
    findings: tuple[Finding, ...] = attrs.field(converter=_as_tuple)

    @property
    def ok(self) -> bool:
        """Tell whether nothing stands against starting a job."""
        return not any(finding.stops for finding in self.findings)

    @property
    def status(self) -> Status:
        """Return the most severe status among the findings."""
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `report_from_json` makes an equal value."""
        return {
            "node": self.node,
            "at": self.at,
            "took_s": self.took_s,
            "ok": self.ok,
            "status": self.status.value,
            "findings": [finding.to_json() for finding in self.findings],
        }


def report_from_json(data: Any) -> HealthReport:
    """Return the report that `HealthReport.to_json` described; raise ValueError for anything else."""
    try:
        findings = [finding_from_json(item) for item in data["findings"]]
        if not all(isinstance(finding.data, Mapping) for finding in findings):
            raise TypeError("`data` of a finding is no object")
        return HealthReport(
            node=str(data["node"]), at=float(data["at"]), took_s=float(data["took_s"]), findings=findings
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the JSON object of a health report: {error}") from None
