"""Common parts of the reading commands: the RUN_DIR argument, JSON, and text that is safe on a terminal."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from resilience_sdk.core.console import printable
from resilience_sdk.core.run_directory import RunDirectory, newest_run_dir
from resilience_sdk.core.settings.fields import nearest
from resilience_sdk.errors import ConfigError

_RESUME_NAMES = {"stop": "after a repair", "hardware": "elsewhere"}  # by verdict: when or where that makes sense
_RESUME = "resume with"
_UNCUT = frozenset((_RESUME, *_RESUME_NAMES.values()))
_MOST_CHARACTERS = 400
# One JSON file of ours is a few kilobytes; a larger one is not ours.
_MOST_BYTES = 1 << 22


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


def reading_parser(command: str, description: str) -> CommandParser:
    """Return the parser of a command that reads one run directory."""
    parser = CommandParser(command, description)
    parser.add_argument(
        "run_dir",
        nargs="?",
        metavar="RUN_DIR",
        help="run directory; without it RESILIENCE_RUN_DIR, else the newest under ./resilience-runs",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; docs/commands.md has the schema")
    return parser


def open_run_dir(named: str | None) -> RunDirectory:
    """Return the run directory that was named, else the newest; raises RunDirectoryError."""
    return RunDirectory.open(newest_run_dir() if named is None else named)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not know become null."""
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def print_lines(lines: Sequence[str]) -> None:
    """Print lines; whatever in them could steer a terminal, or that it cannot encode, is replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        safe = printable(line).replace("\n", " ")
        print(safe.encode(encoding, "replace").decode(encoding))


def one_line(text: object) -> str:
    """Return job text as one line of bounded length, without control characters."""
    flat = " ".join(printable(str(text)).split())
    return flat if len(flat) <= _MOST_CHARACTERS else flat[:_MOST_CHARACTERS] + " ... (cut)"


def resume_row(outcome: Mapping[str, Any]) -> list[tuple[str, object]]:
    """Return the row with the command that goes on after an outcome, for `aligned`; none where there is none."""
    return [(_RESUME_NAMES.get(outcome["verdict"], _RESUME), outcome["resume"])] if outcome["resume"] else []


def aligned(rows: Sequence[tuple[str, object]]) -> list[str]:
    """Return `name value` lines; a command to copy is never cut or changed but for control characters."""
    return [
        f"{name:<14} {printable(str(value)) if name in _UNCUT else one_line(value)}".rstrip() for name, value in rows
    ]


def when(unix_s: float | None) -> str:
    """Return Unix time as local date and time, or `at an unknown time`."""
    try:
        if unix_s is not None:
            return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s))
    except (OverflowError, ValueError, OSError):
        pass
    return "at an unknown time"


def ago(unix_s: float | None, now: float) -> str:
    """Return how long ago a Unix time was, in one unit."""
    if unix_s is None:
        return "never"
    passed = max(0.0, now - unix_s)
    for unit, seconds in (("days", 86400), ("h", 3600), ("min", 60)):
        if passed >= 2 * seconds:
            return f"{passed / seconds:.0f} {unit} ago"
    return f"{passed:.0f} s ago"


def duration(seconds: float) -> str:
    """Return a duration as a person would say it, with three or four digits."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86400:.1f} days"


def read_json_object(path: Any) -> dict[str, Any] | None:
    """Return the JSON object in `path`, None when there is no such file.

    Raises:
        ConfigError: It cannot be read or is no JSON object; the message names it.
    """
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(_MOST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is torn or was changed: it holds no JSON") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} was changed: it holds no JSON object")
    return data


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
