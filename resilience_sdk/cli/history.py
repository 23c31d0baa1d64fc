"""`resilience history`: what goes wrong again and again over many runs, and how long jobs last."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.cli.common import CommandParser, print_json, print_lines
from resilience_sdk.core import environ
from resilience_sdk.core.redaction import redact_text
from resilience_sdk.core.settings.parse import duration_or_zero
from resilience_sdk.core.words import ago, counted, duration, when
from resilience_sdk.errors import ConfigError
from resilience_sdk.history.exclusion import DATABASE
from resilience_sdk.history.indexer import Index, run_directories
from resilience_sdk.history.questions import CauseRate, History, Rate, Recurring
from resilience_sdk.history.schema import default_path

RUNS = "resilience-runs"
_MOST_CAUSES = 12
_MOST_SIZES = 12


def main(argv: Sequence[str]) -> int:
    """Index, or print what recurs, and return 0; raises ConfigError and MissingExtraError."""
    words = list(argv)
    return _index(words[1:]) if words[:1] == ["index"] else _show(words)


def _index(words: Sequence[str]) -> int:
    parser = CommandParser("history index", "Take what is new in the journals of runs into the index.")
    parser.add_argument("dirs", nargs="*", metavar="DIR", help=f"run directories, or folders of them (./{RUNS})")
    add_database(parser)
    options = parser.parse_args(words)
    dirs = options.dirs or [RUNS]
    found, problems = run_directories(dirs)
    if not found:  # before a database is made for nothing
        raise ConfigError("; ".join(problems))
    began_s = time.monotonic()
    named = options.db or environ.environment().get(DATABASE) or str(default_path(_folder(dirs[0])))
    index = Index(named)
    try:
        done = index.add(dirs)
    finally:
        index.close()
    took_s = time.monotonic() - began_s
    if options.json:
        print_json({"db": redact_text(named), "took_s": took_s, **attrs.asdict(done)})
    else:
        torn = f", {counted(done.torn, 'torn line')} skipped" if done.torn else ""
        new, runs = counted(done.events, "new event"), counted(done.runs, "run")
        lines = [f"{new} of {runs} in {redact_text(named)}{torn}"]
        if named not in (environ.environment().get(DATABASE), str(default_path(Path(RUNS)))):
            lines.append(f"to read it: resilience history --db {shlex.quote(redact_text(named))}")
        print_lines([*lines, *(f"note: {problem}" for problem in done.problems)])
    return 0


def _folder(named: str) -> Path:
    """Return the folder of runs that a run directory lies in, or that was named itself."""
    path = Path(named)
    return path.resolve().parent if (path / "journal").is_dir() else path


def add_database(parser: CommandParser) -> None:
    """Add the options that `history` and `nodes` share."""
    place = default_path(Path(RUNS))
    parser.add_argument("--db", metavar="URL", help=f"file or URL of the index; else {DATABASE}, else ./{place}")
    parser.add_argument("--json", action="store_true", help="print JSON; docs/history.md has the schema")


def add_since(parser: CommandParser, default: str | None) -> None:
    """Add `--since`."""
    told = f" (default {default})" if default else ""
    parser.add_argument("--since", metavar="T", default=default, help=f"how far back, such as 7d or 36h{told}")


def open_history(options: Any) -> History:
    """Return the index that the options, the environment or the working directory name; raises ConfigError."""
    named = options.db or environ.environment().get(DATABASE) or str(default_path(Path(RUNS)))
    return History(named, since=since_of(options))


def since_of(options: Any) -> float:
    """Return the Unix time that `--since` means; raises ConfigError."""
    if options.since is None:
        return 0.0
    try:
        return time.time() - duration_or_zero(options.since)
    except ValueError as error:
        raise ConfigError(f"--since {options.since!r}: {error}") from None


def _show(words: Sequence[str]) -> int:
    parser = CommandParser(
        "history",
        "Print what goes wrong again and again over many runs, and how long jobs last. `resilience history index "
        "DIR...` takes runs in.",
    )
    add_database(parser)
    add_since(parser, None)
    options = parser.parse_args(words)
    history = open_history(options)
    try:
        totals, causes, rates, by_cause = history.totals(), history.recurring(), history.rates(), history.causes()
    finally:
        history.close()
    if options.json:
        print_json(
            {
                "totals": totals,
                "causes": [attrs.asdict(one) for one in causes],
                "mttf": [attrs.asdict(rate) for rate in rates],
                "mttf_by_cause": [attrs.asdict(rate) for rate in by_cause],
            }
        )
    else:
        print_lines(render(totals, causes, rates, by_cause, time.time(), options.since))
    return 0


def render(
    totals: dict[str, Any],
    causes: Sequence[Recurring],
    rates: Sequence[Rate],
    by_cause: Sequence[CauseRate],
    now: float,
    since: str | None = None,
) -> list[str]:
    """Return the answers as lines for a person; `since` as it was given."""
    if not totals["runs"]:
        return ["no run is indexed yet: resilience history index DIR..."]
    runs, events = counted(totals["runs"], "run"), counted(totals["events"], "event")
    lines = [f"{runs}, {events}, {when(totals['first_at'])} to {when(totals['last_at'])}"]
    lately = "" if since is None else f" in the last {since}"
    for title, blames in (("", ("infrastructure", "unknown", "nobody")), ("of the programs, not of nodes:", ("user",))):
        found = [one for one in causes if one.blame in blames]
        if found:
            lines += ["", *([title] if title else [])]
            lines += [line for one in found[:_MOST_CAUSES] for line in _cause(one, now)]
    if not causes:
        lines += ["", f"nothing has failed{lately}"]
    if totals["injected"]:
        lines += ["", f"{counted(totals['injected'], 'injected fault')} not counted"]
    if rates:
        lines += ["", f"mean time to failure, by size of the job{lately}:"]
        lines += [_rate(_size(rate), rate) for rate in [*rates[:-1][:_MOST_SIZES], rates[-1]]]
    if by_cause:
        lines += ["", f"mean time to failure, by cause, over the work of all jobs{lately}:"]
        lines += [_rate(rate.cause, rate) for rate in by_cause[:_MOST_CAUSES]]
    return lines


def _cause(one: Recurring, now: float) -> list[str]:
    times = "once" if one.count == 1 else f"{one.count} times"
    runs = counted(one.runs, "run")
    first = "" if one.count == 1 else f", first {ago(one.first_at, now)}"
    between = "" if one.mttf_s is None or one.count < 2 else f", every {duration(one.mttf_s)} of work"
    lines = [f"{times:>9} in {runs}: {one.signature} ({one.category}){first}, last {ago(one.last_at, now)}{between}"]
    if one.changed and one.count > 1:
        told = ", ".join(f"{c['what']} {c['before']} -> {c['after']}" for c in one.changed[:4])
        lines.append(f"{'':>9} changed before the first: {told}")
    return lines


def _size(rate: Rate) -> str:
    return "all" if rate.world_size is None else counted(rate.world_size, "rank")


def _rate(what: str, rate: Rate | CauseRate) -> str:
    high = "" if rate.high_s is None else f" to {duration(rate.high_s)}"
    mean = "no failure" if rate.mttf_s is None else duration(rate.mttf_s)
    least = "at least " if rate.high_s is None else ""
    worked = duration(rate.worked_s)
    failures = counted(rate.failures, "failure")
    return f"{what:>12}: {mean} ({least}{duration(rate.low_s)}{high}; {failures} in {worked})"
