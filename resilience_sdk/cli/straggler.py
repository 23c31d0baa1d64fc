"""`resilience straggler`: who is slow in a run, and what may be changed about it while it runs."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import attrs

from resilience_sdk.cli.common import open_run_dir, print_json, print_lines, reading_parser
from resilience_sdk.core.journal import read_journal
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.settings import Settings
from resilience_sdk.core.settings.fields import FIELDS as SETTINGS
from resilience_sdk.core.settings.options import add_switch, plain_switches
from resilience_sdk.core.words import ago
from resilience_sdk.errors import ConfigError
from resilience_sdk.report.run_state import live_ranks, standing_now, state_of
from resilience_sdk.straggler import published
from resilience_sdk.straggler.published import read_report, read_settings, remove_settings, write_settings

KEYS = ("run_dir", "running", "settings", "enabled", "verdicts", "at", "report")


def main(argv: Sequence[str]) -> int:
    """Change what is asked for, print what is known, and return 0.

    Raises:
        RunDirectoryError: It is no run directory.
        ConfigError: A value is wrong, or the file cannot be written or is somebody else's.
    """
    parser = reading_parser(
        "straggler",
        "Print who is slow in a run, and change its settings while it runs: the monitor sees it in a second.",
    )
    for name in published.FIELDS:
        _add_option(parser, name)
    parser.add_argument("--reset", action="store_true", help="go back to what the job was started with")
    options = parser.parse_args(plain_switches(argv, lambda _: False, to_the_end=True))
    run_dir = open_run_dir(options.run_dir)
    given = {name: getattr(options, name) for name in published.FIELDS if getattr(options, name) is not None}
    try:
        settings = _change(run_dir, given, reset=options.reset)
        found = collect(run_dir, settings)
    except (PermissionError, OSError) as error:
        raise ConfigError(f"the straggler files of {run_dir.path} cannot be used: {error}") from None
    if options.json:
        print_json(found)
    else:
        print_lines(render(found, time.time()))
    return 0


def _add_option(parser: argparse.ArgumentParser, name: str) -> None:
    option, field = "--" + name.replace("_", "-"), SETTINGS[name]
    if isinstance(field.default, bool):
        add_switch(parser, [option], dest=name, help_text=f"{field.metadata['doc']} Also {option}=false.")
    else:
        parser.add_argument(option, metavar=field.metadata["metavar"], help=field.metadata["doc"])


def _change(run_dir: RunDirectory, given: dict[str, Any], *, reset: bool) -> dict[str, Any]:
    """Return what is set in the run directory, after the changes."""
    standing = {} if reset else _read(run_dir)
    if given:
        standing |= published.checked(given, "command line")
        write_settings(run_dir.path, json.dumps(standing, indent=1) + "\n")
    elif reset:
        remove_settings(run_dir.path)
    return standing


def _read(run_dir: RunDirectory) -> dict[str, Any]:
    text = read_settings(run_dir.path)
    return {} if text is None else published.values_of(text, "settings.json")


def collect(run_dir: RunDirectory, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the object that `--json` prints (`KEYS`); `settings` are those set while the job runs."""
    is_running = bool(current_holder(run_dir) or live_ranks(run_dir))
    state = state_of(read_journal(run_dir.journal).events)
    standing, report = standing_now(run_dir, state, is_running=is_running), read_report(run_dir.path)
    count = settings.get("scores_to_print", Settings().scores_to_print)
    return {
        "run_dir": str(run_dir.path),
        "running": is_running,
        "settings": settings,
        "enabled": None if standing is None else standing.enabled,
        "verdicts": [] if standing is None else [_verdict(verdict) for verdict in standing.verdicts],
        "at": None if standing is None else standing.at,
        "report": None if report is None else {**json.loads(report.to_json()), "text": report.text(count)},
    }


def _verdict(verdict: Any) -> dict[str, Any]:
    return {**attrs.asdict(verdict), "text": verdict.text()}


def render(found: dict[str, Any], now: float) -> list[str]:
    """Return it as lines for a person; `now` is Unix time in seconds."""
    lines = [f"{name} = {published.shown(value)}, set while the job runs" for name, value in found["settings"].items()]
    if not found["running"]:
        lines.append("no job runs here, so nobody is slow now")
    elif found["at"] is None:
        lines.append("nothing is known about stragglers: no windows of 8 steps were compared yet")
    elif not found["enabled"]:
        return [*lines, "the comparison is switched off"]
    else:
        texts = [verdict["text"] for verdict in found["verdicts"]]
        lines += texts or [f"nobody is slow, as of {ago(found['at'], now)}"]
    if found["report"] is not None:
        lines += ["", "the newest report:", *found["report"]["text"].splitlines()]
    return lines
