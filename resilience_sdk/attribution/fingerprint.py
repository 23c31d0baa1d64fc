"""When are two exceptions the same error? Pure.

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
from pathlib import Path
from typing import NamedTuple

from resilience_sdk.attribution.rules import ExceptionRecord, frames_of, message_of, type_of

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
