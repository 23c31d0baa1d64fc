"""Common parts of the reading commands: the RUN_DIR argument, JSON, and text that is safe on a terminal."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from resilience_sdk.core.console import hide_progress, printable
from resilience_sdk.core.run_directory import RunDirectory, newest_run_dir
from resilience_sdk.core.settings.fields import nearest
from resilience_sdk.core.words import one_line
from resilience_sdk.errors import ConfigError

_RESUME_NAMES = {"stop": "after a repair", "hardware": "elsewhere"}  # by verdict: when or where that makes sense
_RESUME, _AGAIN = "resume with", "run again by"  # with a checkpoint of the SDK, without one
_PAGE = "page"
_UNCUT = frozenset((_PAGE, _RESUME, _AGAIN, *_RESUME_NAMES.values()))


class CommandParser(argparse.ArgumentParser):
    """The parser of a command: a mistake is a ConfigError, so one line, and a misspelt option has its nearest."""

    def __init__(self, command: str, description: str) -> None:
        """Parse the words after `resilience COMMAND`."""
        super().__init__(prog=f"resilience {command}", description=description, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is not known by its name, before argparse misses or doubts what stands beside it."""
        words = list(sys.argv[1:] if args is None else args)
        known = {name: action.help for action in self._actions for name in action.option_strings}
        for word in words[: words.index("--")] if "--" in words else words:
            spelt = word.partition("=")[0]
            if spelt.startswith("--") and spelt not in known:
                shown = [name for name, help_text in known.items() if help_text != argparse.SUPPRESS]
                raise ConfigError(f"unknown option {spelt}{nearest(spelt, shown) or f'; see {self.prog} --help'}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def reading_parser(command: str, description: str, *, schema: str = "docs/commands.md") -> CommandParser:
    """Return the parser of a command that reads one run directory; `schema`: where its JSON is described."""
    parser = CommandParser(command, description)
    parser.add_argument(
        "run_dir",
        nargs="?",
        metavar="RUN_DIR",
        help="run directory; without it RESILIENCE_RUN_DIR, else the newest under ./resilience-runs",
    )
    parser.add_argument("--json", action="store_true", help=f"print JSON; {schema} has the schema")
    return parser


def open_run_dir(named: str | None) -> RunDirectory:
    """Return the run directory that was named, else the newest; raises RunDirectoryError."""
    return RunDirectory.open(newest_run_dir() if named is None else named)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not know become null."""
    hide_progress()
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines; whatever in them could steer a terminal, or that it cannot encode, is replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    hide_progress()
    for line in lines:
        safe = printable(line).replace("\n", " ")
        print(safe.encode(encoding, "replace").decode(encoding))


def resume_row(outcome: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the row with the command that goes on after an outcome, for `aligned`; none where there is none."""
    if not outcome["resume"]:
        return []
    name = _AGAIN if outcome["checkpoint"] is None else _RESUME
    return [(_RESUME_NAMES.get(outcome["verdict"], name), outcome["resume"])]


def page_row(run_dir: RunDirectory) -> tuple[str, object]:
    """Return the row with the place of the run's report, or with the command that draws it, for `aligned`."""
    if run_dir.report.is_file():
        return _PAGE, str(run_dir.report)
    return _PAGE, shlex.join(["resilience", "report", str(run_dir.path)])


def aligned(rows: Sequence[tuple[str, object]]) -> list[str]:
    """Return `name value` lines; a command to copy is never cut or changed but for control characters."""
    return [
        f"{name:<14} {printable(str(value)) if name in _UNCUT else one_line(value)}".rstrip() for name, value in rows
    ]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
