"""`resilience diagnose`: cause, culprit and next action from logs alone, of any job and any launcher."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.attribution.diagnosis import (
    diagnose,
    diagnose_file,
    diagnose_ranks,
    diagnose_stream,
    is_run_directory,
    job_of,
    logs_below,
)
from resilience_sdk.attribution.log_facts import Suspect, Verdict
from resilience_sdk.cli.common import CommandParser, print_lines
from resilience_sdk.core import console
from resilience_sdk.core.words import one_line
from resilience_sdk.errors import ConfigError
from resilience_sdk.incidents import compact_ranks

_STDIN = "-"
_MOST_CULPRITS = 8


def main(argv: Sequence[str]) -> int:
    """Print one verdict per log and return 0; a log that cannot be read is a ConfigError."""
    parser = CommandParser(
        "diagnose", "Say what went wrong in a job from its logs: cause, culprit, evidence and what to do next."
    )
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="LOG",
        help="a file (plain or gzip), a directory (every file in it; of a run: its newest incident), - for stdin",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; docs/attribution.md has the schema")
    options = parser.parse_args(argv)
    if options.json:
        found = [_as_json(name, verdict) for name, verdict in _verdicts(options.logs)]
        console.hide_progress()
        print(json.dumps(found[0] if len(found) == 1 else found, indent=2))
        return 0
    for number, (name, verdict) in enumerate(_verdicts(options.logs)):
        print_lines(([""] if number else []) + render(name, verdict))
    return 0


def _verdicts(names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for name in names:
        if name == _STDIN:
            yield "stdin", diagnose_stream(sys.stdin.buffer, "stdin")
            continue
        path = Path(name)
        if not path.exists():
            raise ConfigError(f"there is no log {name!r}; name a file, a directory, or - for standard input")
        if path.is_dir() and not is_run_directory(path):
            yield from _below(path)
        else:
            yield name, diagnose(path)


def _below(directory: Path) -> Iterator[tuple[str, Verdict]]:
    """Diagnose every file of a directory, those of one attempt's ranks together; what cannot be read is said."""
    files = list(logs_below(directory))
    if not files:
        raise ConfigError(f"there is no file in {str(directory)!r}; name the logs, or the directory that holds them")
    for name, paths in _jobs(files):
        try:
            yield str(name), diagnose_file(paths[0]) if len(paths) == 1 else diagnose_ranks(paths)
        except ConfigError as error:
            console.say(str(error))


def _jobs(files: Sequence[Path]) -> Iterator[tuple[Path, list[Path]]]:
    """Yield files that belong together under the name of their directory, others by themselves."""
    jobs: dict[Path, list[Path]] = {}
    for path in files:
        jobs.setdefault(job_of(path) or path, []).append(path)
    for name, paths in jobs.items():
        yield (name if len(paths) > 1 else paths[0]), paths


def _as_json(name: str, verdict: Verdict) -> dict[str, Any]:
    return {"log": name, **verdict.to_json()}


def render(name: str, verdict: Verdict) -> list[str]:
    """Return one verdict as lines for a terminal; what a job wrote is flattened and cut."""
    lines = [
        one_line(name),
        f"  cause       {verdict.cause} ({verdict.category}), confidence {verdict.confidence:.2f}",
        f"              {verdict.meaning}",
    ]
    if verdict.culprits:
        lines.append(f"  culprit     {_who(verdict.culprits)}")
    for quoted in verdict.evidence:
        place = "" if quoted.line is None else f"line {quoted.line}: "
        lines.append(f"  evidence    {place}{one_line(quoted.text)}")
    lines.append(f"  action      {verdict.action}")
    return lines


def _who(culprits: Sequence[Suspect]) -> str:
    ranks = [suspect.rank for suspect in culprits if suspect.rank is not None]
    nodes = list(dict.fromkeys(one_line(suspect.node) for suspect in culprits if suspect.node))
    parts = [f"rank{'s' * (len(set(ranks)) > 1)} {compact_ranks(ranks)}"] if ranks else []
    if nodes:
        more = f" and {len(nodes) - _MOST_CULPRITS} more" if len(nodes) > _MOST_CULPRITS else ""
        parts.append(f"node{'s' * (len(nodes) > 1)} {', '.join(nodes[:_MOST_CULPRITS])}{more}")
    return ", ".join(parts) or "not named"
