"""`resilience doctor`.

What will work on this machine and what will not, each with its cure; and the reports of several nodes compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cli.common import CommandParser, print_json, print_lines
from resilience_sdk.core import environ
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.fields import FIELDS
from resilience_sdk.core.settings.options import (
    MORE_OF_SETTINGS,
    add_setting_options,
    add_short_help,
    plain_switches,
    settings_from_options,
)
from resilience_sdk.core.settings.parse import positive_duration
from resilience_sdk.core.words import one_line, thing_words
from resilience_sdk.errors import ConfigError
from resilience_sdk.health.checkup import examine, job_context
from resilience_sdk.health.compute import slow_devices
from resilience_sdk.health.findings import (
    OWN_FAULT,
    Finding,
    HealthReport,
    Status,
    compare,
    report_from_json,
    told_faults,
)
from resilience_sdk.health.software import shown_values
from resilience_sdk.report.outcome import read_json_object

_WORDS = {Status.FAILED: "FAILED", Status.DEGRADED: "degraded", Status.UNAVAILABLE: "not seen", Status.OK: "ok"}
_WIDTH = max(map(len, _WORDS.values()))
_INDENT = " " * (_WIDTH + 2)


def page(report: HealthReport, settings: Settings, *, verbose: bool = False) -> list[str]:
    """Return the lines of the page; with `verbose` every finding and every setting has one."""
    lines = [headline(report), *told_faults(report.findings), ""]
    for status in (Status.FAILED, Status.DEGRADED, Status.UNAVAILABLE):
        for finding in report.findings:
            if finding.status is status and not finding.data.get(OWN_FAULT):
                lines += problem(finding)
    good = [finding for finding in report.findings if finding.status is Status.OK]
    lines += [_entry(finding) for finding in good] if verbose else list(_in_order(good))
    return [*lines, "", *_settings(settings, verbose=verbose)]


def headline(report: HealthReport, node: str = "") -> str:
    """Return the verdict on a node in one line."""
    stops = sum(finding.stops for finding in report.findings)
    verdict = f"a job should not start: {_count(stops, 'thing')} must be cured first" if stops else "a job can start"
    if not stops and told_faults(report.findings):
        verdict = "nothing that was seen stands against a job, but not all could be looked at"
    others = sum(finding.status in (Status.FAILED, Status.DEGRADED) for finding in report.findings) - stops
    warned = f", {_count(others, 'warning')}" if others else ""
    return f"{node or report.node}: {verdict}{warned} (looked for {report.took_s:.1f} s)"


def problem(finding: Finding) -> list[str]:
    """Return the lines of a finding and of its cure."""
    cure = [f"{_INDENT}cure: {one_line(finding.cure)}"] if finding.cure else []
    return [_entry(finding), *cure]


def _entry(finding: Finding) -> str:
    thing = one_line(thing_words(*finding.key, between=": "))
    return f"{_WORDS[finding.status]:<{_WIDTH}}  {thing}: {one_line(finding.evidence)}"


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
        pairs = (f"{name}={item}" if isinstance(item, str) else f"{name}:{item:g}" for name, item in value.items())
        return ",".join(pairs) or "learned"
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


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
            report = report_from_json(data)
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


_MOST_PATIENCE = 100
# What `--help` shows; the other settings only matter here as what a job would be started with.
_USUAL = {
    "what to look at": ("--data", "--rendezvous", "--local-ranks", "--compute", "--compare"),
    "how": ("--limit", "--patience", "--verbose", "--json"),
    "settings of the job": ("--run-dir", "--config"),
    "help": ("--help", "--help-all"),
}
_DESCRIPTION = "Look at this machine before a job: devices, limits, network, storage, versions and settings."


def main(argv: Sequence[str]) -> int:
    """Print the page and return 0; 1 when something that must be good has failed."""
    parser = CommandParser("doctor", _DESCRIPTION)
    parser.add_argument(
        "--data", action="append", default=[], metavar="PATH", help="what the job reads; may be repeated"
    )
    parser.add_argument(
        "--rendezvous",
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where the nodes meet; without it MASTER_ADDR and MASTER_PORT",
    )
    parser.add_argument("--local-ranks", type=int, metavar="N", help="ranks on this machine, else one for each GPU")
    parser.add_argument("--compute", action="store_true", help="also let each GPU (else the CPU) compute; needs torch")
    parser.add_argument("--limit", metavar="SECONDS", help="longest time of one look, else 3.5 (GPUs: 15)")
    parser.add_argument(
        "--patience", default="1", metavar="FACTOR", help="so many times as long for each look, on a busy machine"
    )
    parser.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="look at nothing: compare what `doctor --json` wrote on several nodes, and say which to leave out",
    )
    parser.add_argument("--verbose", action="store_true", help="also what is in order, and settings at defaults")
    parser.add_argument("--json", action="store_true", help="print JSON; docs/health.md has the schema")
    add_setting_options(parser)
    add_short_help(parser, _USUAL, usage="[options]", more=MORE_OF_SETTINGS)
    options = parser.parse_args(plain_switches(argv, lambda _: False, to_the_end=True))
    if options.compare:
        return _compare(options.compare, as_json=options.json)
    if options.local_ranks is not None and options.local_ranks < 1:
        raise ConfigError(f"--local-ranks: expected 1 or more, not {options.local_ranks}")
    settings = settings_from_options(options)
    context = job_context(
        environ.environment(),
        settings,
        data=options.data,
        rendezvous=options.rendezvous,
        local_ranks=options.local_ranks,
    )
    limit_s, patience = _limit(options.limit), _patience(options.patience)
    report = examine(context, settings, compute=options.compute, limit_s=limit_s, patience=patience)
    if options.json:
        print_json({**report.to_json(), "settings": settings_rows(settings)})
    else:
        print_lines(page(report, settings, verbose=options.verbose))
    return 0 if report.ok else 1


def _compare(files: Sequence[str], *, as_json: bool) -> int:
    reports = read_reports(files)
    told = comparison(reports)
    if as_json:
        print_json(told)
    else:
        print_lines(comparison_page(reports, told))
    return 0 if told["ok"] else 1


def _limit(text: str | None) -> float | None:
    try:
        return None if text is None else positive_duration(text)
    except ValueError as error:
        raise ConfigError(f"--limit: {error}, not {text!r}") from None


def _patience(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor <= _MOST_PATIENCE:
        raise ConfigError(f"--patience: expected a factor from 1 to {_MOST_PATIENCE}, not {text!r}")
    return factor
