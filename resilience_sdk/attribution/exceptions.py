"""Exceptions: the rules of `exceptions.toml` that read them, and the fingerprint by which two are the same error.

The first rule that matches wins, so the order in the file is from the special to the general.

A restart is pointless when the program raises the same exception at the same place again. "Same" is: same
type, same innermost frame of the user's code, and the same message after what differs between two runs of
one bug is replaced:

    0x7f3a...                       <addr>    where an object happened to live
    127.0.0.1:40551, [::1]:29500    <host>    gloo and sockets quote ephemeral ports
    port 29500, port=29500          port <n>
    pid 4711, pid(s) 71, 72         pid <n>
    2026-03-01 10:00:00,123         <time>    also with T and a zone, and the bare clock 10:00:00
    6f1c...-....-...                <uuid>
    /tmp/tmpab12cd                  <tmp>     names that tempfile invents, with what lies below kept

Other numbers stay: shapes, indices, steps and values are what tells two bugs apart (and an error that moves
from step 40 to step 57 is not deterministic).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import attrs

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same parser under its older name
    import tomli as tomllib

# An exception as the rank's error file has it: `{type, message, frames, user_frame, step}`.
ExceptionRecord = Mapping[str, Any]
_MOST_CHARACTERS = 20_000
_CUT = "\n  ...\n"  # as `rank.exceptions` does
_NOT_ALONE = ("the direct cause of the following exception", "During handling of the above exception", _CUT)
_SOURCE_LINE = re.compile(r'^  File "[^"\n]*", line \d+, in [^\n]*\n    (\S[^\n]*)', re.MULTILINE)


@attrs.frozen
class ExceptionRule:
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
def exception_rules() -> tuple[ExceptionRule, ...]:
    """Return the rules in their order. Read once from the package's data."""
    text = (resources.files(__package__) / "exceptions.toml").read_text(encoding="utf-8")
    return tuple(_rule(entry) for entry in tomllib.loads(text)["rule"])


def match_exception(exception: ExceptionRecord) -> ExceptionRule | None:
    """Return the first rule that fits, or None: then it is an ordinary exception of the program."""
    kind, message, frames = type_of(exception), message_of(exception), tuple(frames_of(exception))
    return next((rule for rule in exception_rules() if rule.matches(kind, message, frames)), None)


def is_raised_by_program(exception: ExceptionRecord) -> bool:
    """Tell whether a `raise` in the user's code made the exception, and not one that it had caught.

    What it says is then the program's own word, and no device's: a parser of logs may quote one. Of a traceback that
    was cut nobody can tell.
    """
    text = _string(exception.get("traceback"))
    innermost = next(frames_of(exception), None)
    if innermost is None or not is_users_frame(innermost) or any(words in text for words in _NOT_ALONE):
        return False
    lines = _SOURCE_LINE.findall(text)
    return bool(lines) and lines[-1].startswith("raise ")


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


def _rule(entry: Mapping[str, Any]) -> ExceptionRule:
    return ExceptionRule(
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


_REPLACEMENTS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b", "<uuid>"),
        (r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)?", "<time>"),
        (r"(?<![\w.:])\d\d:\d\d:\d\d(?:[.,]\d+)?(?![\w:])", "<time>"),
        (r"\b0x[0-9a-fA-F]+\b", "<addr>"),
        (r"\[?\b\d{1,3}(?:\.\d{1,3}){3}\b\]?(?::\d{1,5}\b)?", "<host>"),
        (r"\[[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?:%\w+)?\]:\d{1,5}\b", "<host>"),
        (r"(?i)\bport(\s*[=:]?\s*)\d{1,5}\b", r"port\g<1><n>"),
        (r"(?i)\bpid(\(s\))?(\s*[=:]?\s*)\d+(?:, \d+)*\b", r"pid\g<1>\g<2><n>"),
        (r"/tmp/tmp[a-z0-9_]{6,}", "<tmp>"),  # noqa: S108 - a pattern, no file is made
    )
)
# Frames of these are not the user's: installed packages, the standard library, and what has no file.
_NOT_THE_USERS = re.compile(r"/(?:site|dist)-packages/|/lib/python3(?:\.\d+)?/|^<|^File \"<")

_OURS = str(Path(__file__).parents[1]) + "/"


class Fingerprint(NamedTuple):
    """Two exceptions with equal fingerprints are one error."""

    type: str
    message: str
    user_frame: str | None


def fingerprint(exception: ExceptionRecord) -> Fingerprint:
    """Return what identifies the error: type, normalised message, innermost frame of the user's code."""
    user_frame = exception.get("user_frame")
    if not isinstance(user_frame, str):
        user_frame = next(filter(is_users_frame, frames_of(exception)), None)
    return Fingerprint(type_of(exception), normalise_message(message_of(exception)), user_frame)


def is_users_frame(frame: str) -> bool:
    """Tell whether a frame, written `file:line function`, is of the user's code."""
    return _NOT_THE_USERS.search(frame) is None and not is_our_frame(frame)


def is_our_frame(frame: str) -> bool:
    """Tell whether a frame is of this package, wherever it is installed."""
    return _OURS in frame


def normalise_message(message: str) -> str:
    """Return the message without what differs between two runs of the same bug (see the module)."""
    for pattern, replacement in _REPLACEMENTS:
        message = pattern.sub(replacement, message)
    return message.strip()
