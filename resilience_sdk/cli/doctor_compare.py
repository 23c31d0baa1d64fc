"""`resilience doctor --compare`: the reports of several nodes side by side, and which of them to leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cli.common import one_line, read_json_object
from resilience_sdk.cli.doctor_page import headline, problem
from resilience_sdk.errors import ConfigError
from resilience_sdk.health.compute.probe import slow_devices
from resilience_sdk.health.findings import Finding, Status
from resilience_sdk.health.report import HealthReport, report_from_json
from resilience_sdk.health.software.comparing import compare


def read_reports(files: Sequence[str]) -> dict[str, HealthReport]:
    """Return the reports that `resilience doctor --json` wrote, by node; by node and file where a node has several.

    Raises:
        ConfigError: A file is not there, or holds something else.
    """
    found: list[tuple[str, HealthReport]] = []
    for file in files:
        data = read_json_object(file)
        if data is None:
            raise ConfigError(
                f"there is no file {file}; write one with `resilience doctor --json > {file}` on each node"
            )
        try:
            report = report_from_json({name: data.get(name) for name in ("node", "at", "took_s", "findings")})
        except ValueError as error:
            raise ConfigError(f"{file} is no report of `resilience doctor --json`: {error}") from None
        found.append((file, report))
    nodes = [report.node for _, report in found]
    return {
        report.node if nodes.count(report.node) == 1 else f"{report.node} ({Path(file).name})": report
        for file, report in found
    }


def comparison(reports: Mapping[str, HealthReport]) -> dict[str, Any]:
    """Return the comparison as a JSON object. Pure.

    `leave_out` names the nodes without which a job could start: those on which something that must be good has failed,
    and the odd ones where all must be equal. Where nobody is odd, leaving out does not help, and `ok` is false.
    """
    differences = compare({node: report.findings for node, report in reports.items()})
    odd = {node for finding in differences if finding.stops for node in finding.data["odd"]}
    is_split = any(finding.stops and not finding.data["odd"] for finding in differences)
    leave_out = [node for node, report in reports.items() if node in odd or not report.ok]
    return {
        "ok": not leave_out and not is_split,
        "nodes": {node: {"ok": report.ok, "status": report.status.value} for node, report in reports.items()},
        "leave_out": leave_out,
        "differences": [finding.to_json() for finding in (*differences, *_slow(reports))],
    }


def _slow(reports: Mapping[str, HealthReport]) -> list[Finding]:
    """Return the devices that are slower than those of the other nodes, where they were let compute."""
    speeds = [
        attrs.evolve(finding, subject=f"{node} {finding.subject}")
        for node, report in reports.items()
        for finding in report.findings
        if finding.check == "compute_speed"
    ]
    return [finding for finding in slow_devices(speeds) if finding.status is not Status.OK]


def comparison_page(reports: Mapping[str, HealthReport], told: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page. Pure."""
    lines = []
    for node, report in reports.items():
        lines.append(headline(report, node))
        for finding in report.findings:
            if finding.stops:
                lines += problem(finding)
    lines.append("")
    for data in told["differences"]:
        lines += problem(Finding(**data))
    if not told["differences"]:
        lines.append("nothing that should be equal differs between them")
    if told["leave_out"]:
        lines += ["", f"leave out: {one_line(', '.join(told['leave_out']))}"]
    return lines
