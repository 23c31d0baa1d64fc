"""`resilience nodes`: which nodes are suspect, by the failures of many runs, and the list that keeps jobs off them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import attrs

from resilience_sdk.cli.common import CommandParser, open_run_dir, print_json, print_lines
from resilience_sdk.cli.history import add_database, add_since, open_history, since_of
from resilience_sdk.core import environ
from resilience_sdk.core.console import hide_progress, say
from resilience_sdk.core.words import counted, duration, when
from resilience_sdk.errors import ConfigError
from resilience_sdk.history.exclusion import nodes_to_leave_out
from resilience_sdk.history.suspects import LEAST_FAILURES, NodeRecord, Omen, hostlist

_SINCE = "28d"
_MOST_NODES = 12
_MOST_FAILURES = 6


def main(argv: Sequence[str]) -> int:
    """Print the nodes, or the list, and return 0; raises ConfigError and MissingExtraError."""
    parser = CommandParser("nodes", "Print which nodes have failed, which are suspect, and why.")
    add_database(parser)
    add_since(parser, _SINCE)
    parser.add_argument(
        "--least", type=int, default=LEAST_FAILURES, metavar="N",
        help=f"independent failures below which no node is suspect (default and least {LEAST_FAILURES})",
    )  # fmt: skip
    parser.add_argument(
        "--exclude-list", action="store_true", help="print the suspect nodes alone, in Slurm's form; nothing for none"
    )
    parser.add_argument(
        "--after", metavar="RUN_DIR",
        help="print what the next job of this run leaves out: suspect nodes, and those that its last verdict blames; "
        "takes the run in first",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.least < LEAST_FAILURES:
        raise ConfigError(f"--least {options.least}: from one failure no node can be told; {LEAST_FAILURES} or more")
    if options.after is not None:
        return _leave_out(options)
    history = open_history(options)
    try:
        records = history.nodes(least=options.least)
        warnings = history.omens(records, time.time())
    finally:
        history.close()
    suspects = [record.name for record in records if record.suspect]
    if options.json:
        print_json(
            {
                "suspects": suspects,
                "exclude_list": hostlist(suspects),
                "nodes": [_to_json(record) for record in records],
                "warnings": [{**attrs.asdict(omen), "text": omen.text} for omen in warnings],
            }
        )
    elif options.exclude_list:
        if suspects:
            hide_progress()
            print(hostlist(suspects))
    else:
        print_lines(render(records, warnings, options.since))
    return 0


def _leave_out(options: Any) -> int:
    run_dir = open_run_dir(options.after).path
    found = nodes_to_leave_out(run_dir, environ.environment(), since=since_of(options), named=options.db)
    if found.problem is not None:
        say(found.problem)
    if not options.json:
        for warning in found.warnings:
            say(f"warning: {warning}")
    if options.json:
        answer = {"exclude_list": found.hostlist, "reasons": dict(found.reasons), "problem": found.problem}
        print_json({**answer, "warnings": list(found.warnings)})
    elif options.exclude_list:
        if found.reasons:
            say(f"left out: {found.told}")
            hide_progress()
            print(found.hostlist)
    else:
        print_lines([f"{node}: {why}" for node, why in found.reasons.items()] or ["no node is to be left out"])
    return 0


def _to_json(record: NodeRecord) -> dict[str, Any]:
    return {**attrs.asdict(record), "why": record.why}


def render(records: Sequence[NodeRecord], warnings: Sequence[Omen], since: str) -> list[str]:
    """Return the nodes as lines for a person: suspects with their evidence, then the others that failed."""
    suspects = [record for record in records if record.suspect]
    lines = [] if suspects else [f"no suspect among {counted(len(records), 'node')} in the last {since}"]
    for record in suspects:
        lines += [f"SUSPECT {record.name}: {record.why}", *_evidence(record), ""]
    if suspects:
        lines += [f"leave out: {hostlist(record.name for record in suspects)}", ""]
    lines += [f"WARNING {omen.text}" for omen in warnings]
    others = [record for record in records if record.failures and not record.suspect]
    lines += [
        f"{record.name}: {record.why}; probability of so many on a healthy node: {record.chance:.2g}"
        for record in others[:_MOST_NODES]
    ]
    if others[_MOST_NODES:]:
        lines.append(f"and {len(others) - _MOST_NODES} more with a failure (--json has them all)")
    users = [f"{record.name} {record.of_users}" for record in records if record.of_users]
    if users:
        lines.append(f"failures of programs, which say nothing about a node: {', '.join(users[:_MOST_NODES])}")
    return lines


def _evidence(record: NodeRecord) -> list[str]:
    lines = [
        f"    {when(failure.at)} {failure.run} {failure.incident}: {failure.summary or failure.cause}"
        for failure in record.failures[-_MOST_FAILURES:]
    ]
    worked = f"{duration(record.worked_s)} of work in {counted(record.runs, 'run')}"
    return [*lines, f"    {worked}; probability of so many failures in it on a healthy node: {record.chance:.2g}"]
