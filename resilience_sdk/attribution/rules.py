"""The rules that read an exception, from `exceptions.toml`: data, each with a source and an example.

The first rule that matches wins, so the order in the file is from the special to the general.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

import attrs

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

# An exception as the rank's error file has it: `{type, message, frames, user_frame, step}`.
ExceptionRecord = Mapping[str, Any]
_MOST_CHARACTERS = 20_000


@attrs.frozen
class Rule:
    """What an exception means. A pattern that is None asks nothing; `symptom`: it only tells of a peer."""

    cause: str
    confidence: float
    type: re.Pattern[str] | None
    message: re.Pattern[str] | None
    frame: re.Pattern[str] | None
    symptom: bool
    source: str
    example: Mapping[str, Any]

    def matches(self, kind: str, message: str, frames: Sequence[str]) -> bool:
        """Tell whether type, message and some frame all fit."""
        return (
            (self.type is None or self.type.search(kind) is not None)
            and (self.message is None or self.message.search(message) is not None)
            and (self.frame is None or any(self.frame.search(frame) for frame in frames))
        )


@lru_cache(maxsize=1)
def exception_rules() -> tuple[Rule, ...]:
    """Return the rules in their order. Read once from the package's data."""
    text = (resources.files(__package__) / "exceptions.toml").read_text(encoding="utf-8")
    return tuple(_rule(entry) for entry in tomllib.loads(text)["rule"])


def match_exception(exception: ExceptionRecord) -> Rule | None:
    """Return the first rule that fits, or None: then it is an ordinary exception of the program."""
    kind, message, frames = type_of(exception), message_of(exception), tuple(frames_of(exception))
    return next((rule for rule in exception_rules() if rule.matches(kind, message, frames)), None)


def is_peer_symptom(exception: ExceptionRecord | None) -> bool:
    """Tell whether the exception only says that another rank is gone or silent."""
    rule = match_exception(exception) if exception else None
    return rule is not None and rule.symptom


def own_exception(exception: ExceptionRecord | None) -> ExceptionRecord | None:
    """Return the record, or None where it says no more than the exit code: `sys.exit(1)` is no exception."""
    if not exception or type_of(exception) != "SystemExit":
        return exception or None
    message = message_of(exception).strip()
    return None if message in ("", "None") or message.lstrip("-").isdigit() else exception


def type_of(exception: ExceptionRecord) -> str:
    """Return the exception's type name, possibly qualified; empty when the record has none."""
    return _string(exception.get("type"))


def message_of(exception: ExceptionRecord) -> str:
    """Return the message, cut to what the rules may look at."""
    return _string(exception.get("message"))[:_MOST_CHARACTERS]


def frames_of(exception: ExceptionRecord) -> Iterator[str]:
    """Yield the frames, innermost first."""
    frames = exception.get("frames")
    if isinstance(frames, (list, tuple)):
        yield from (frame for frame in frames if isinstance(frame, str))


def _rule(entry: Mapping[str, Any]) -> Rule:
    return Rule(
        cause=entry["cause"],
        confidence=float(entry["confidence"]),
        type=_pattern(entry.get("type")),
        message=_pattern(entry.get("message")),
        frame=_pattern(entry.get("frame")),
        symptom=bool(entry.get("symptom", False)),
        source=entry["source"],
        example=entry["example"],
    )


def _pattern(text: str | None) -> re.Pattern[str] | None:
    return None if text is None else re.compile(text)


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""
