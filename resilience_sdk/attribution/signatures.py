"""What a single line of a log says, by the signs in `causes/*.toml`. Pure.

A sign's role tells how much a line that fits may claim:

    proof    the kernel, the driver or the scheduler says so: it counts whatever the program did next
    fault    a program says it of itself as it ends
    hint     a program mentions it: it may have been handled, so it counts only where nothing stronger does
    symptom  it only says that a peer is gone or silent: the cause lies elsewhere
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import attrs

from resilience_sdk.attribution.literals import LiteralIndex
from resilience_sdk.attribution.rules import exception_rules
from resilience_sdk.attribution.taxonomy import cause_tables

ROLES = ("proof", "fault", "hint", "symptom")
_XID = re.compile(r"NVRM: Xid \(?(?:PCI:)?[\w:.]*\)?: (\d+)[, ]")
_XID_CONFIDENCE = 0.9
_NONFATAL_CONFIDENCE = 0.6
# Xid 154 carries the driver's own judgement; with `None` there is nothing to do.
_RECOVERY = re.compile(r"Xid .*: 154,.*changed from .* to 0x[0-9a-f]+ \((?!None\))")
# Words of advice and of warning categories: they name causes that nobody has seen.
_ADVICE_WORDS = (
    r"might be asynchronously reported|for debugging consider|compile with `?TORCH_USE_CUDA_DSA",
    r"(?:this|which) (?:may|might|could|can) be (?:caused|due)|most likely (?:caused|due)|typically caused by",
    r"it is possible that|to avoid data inconsistency|due to the asynchronous nature|you can (?:enable|try|set|avoid)",
    r"\b(?:User|Future|Deprecation|Runtime|Resource)Warning\b|consider (?:setting|using|increasing)",
    r"here is how to debug|make sure|please (?:check|try|see|set|refer|ensure|also)|to fix this",
    r"if you (?:see|want|are)|\bhint:|\bnote:|\btip:",
)
_ADVICE = re.compile("|".join(_ADVICE_WORDS), re.IGNORECASE)
_SENTENCES = re.compile(r"\\n|(?<=[.!;)])\s+(?=[A-Z])")
_MOST_CHARACTERS = 4000
_PLAIN_CONFIDENCE = 0.8


@attrs.frozen
class Sign:
    """One way in which a cause shows in a log."""

    cause: str
    role: str
    confidence: float
    patterns: tuple[re.Pattern[str], ...]
    source: str
    example: str


@attrs.frozen
class Reading:
    """What a line says: a cause with role and confidence, and whom it names, where it does."""

    cause: str
    role: str
    confidence: float
    rank: int | None = None
    node: str | None = None


@lru_cache(maxsize=1)
def signs() -> tuple[Sign, ...]:
    """Return every sign, the stronger roles first and the surer ones first among equals."""
    found = [_sign(cause, entry) for cause, table in cause_tables().items() for entry in table.get("sign", ())]
    return tuple(sorted(found, key=lambda sign: (ROLES.index(sign.role), -sign.confidence)))


@lru_cache(maxsize=1)
def xid_causes() -> Mapping[int, str]:
    """Return which cause each Xid number of the NVIDIA driver stands for; a number that is not there is none."""
    return {number: cause for cause, table in cause_tables().items() for number in table.get("xid", ())}


def read_line(text: str) -> Reading | None:
    """Return what a line says on its own, None when it says nothing of a fault.

    `text` is one line without its prefixes (see `log_lines`).
    """
    text = text[:_MOST_CHARACTERS]
    if "Xid" in text:
        xid = _XID.search(text)
        if xid is not None:
            return _read_xid(int(xid.group(1)), text)
    index, tests = _tests()
    for number in index.candidates(text.lower()):
        pattern, sign = tests[number]
        match = pattern.search(text)
        if match is None:
            continue
        if sign is not None:
            return _reading(sign, match)
        rest = without_advice(text)
        return read_line(rest) if rest and rest != text else None
    return None


def may_say(text: str) -> bool:
    """Tell whether `read_line` may find something in a line that still has its prefixes."""
    index, tests = _tests()
    for number in index.candidates(text.lower()):
        pattern, sign = tests[number]
        if sign is not None and _unanchored(pattern).search(text) is not None:
            return True
    return False


def sign_patterns() -> list[str]:
    """Return the patterns that `may_say` tries."""
    return [pattern.pattern for pattern, sign in _tests()[1] if sign is not None]


@cache
def _unanchored(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Return the pattern as it fits behind prefixes."""
    return re.compile(pattern.pattern.removeprefix("^"), pattern.flags) if pattern.pattern[:1] == "^" else pattern


@lru_cache(maxsize=1)
def _tests() -> tuple[LiteralIndex, list[tuple[re.Pattern[str], Sign | None]]]:
    """Return every pattern with its sign, in the order in which they are tried, and what finds those worth it.

    First come the patterns of advice, which have no sign.
    """
    tests: list[tuple[re.Pattern[str], Sign | None]] = [(re.compile(p, re.IGNORECASE), None) for p in _ADVICE_WORDS]
    tests += [(pattern, sign) for sign in (*signs(), *_message_signs()) for pattern in sign.patterns]
    return LiteralIndex([pattern.pattern for pattern, _ in tests]), tests


def _message_signs() -> Iterator[Sign]:
    """Yield the rules of exceptions that ask for a message alone: programs log the messages of what they caught."""
    for rule in exception_rules():
        if rule.message is None or rule.type is not None or rule.frame is not None or rule.cause == "nan_loss":
            continue  # `loss ... nan` is too little to ask of a line that may be anything
        role = "symptom" if rule.symptom else "hint"
        yield Sign(rule.cause, role, rule.confidence * _PLAIN_CONFIDENCE, (rule.message,), rule.source, "")


def without_advice(text: str) -> str:
    """Return the line without the sentences that only advise; empty when nothing else is left."""
    if not _ADVICE.search(text):
        return text
    return " ".join(sentence for sentence in _SENTENCES.split(text) if not _ADVICE.search(sentence))


def _read_xid(number: int, text: str) -> Reading | None:
    if number == 154:
        return Reading("gpu_hardware_faulty", "proof", 0.7) if _RECOVERY.search(text) else None
    cause = xid_causes().get(number)
    if cause is None:
        return None
    confidence = _NONFATAL_CONFIDENCE if "Nonfatal" in text else _XID_CONFIDENCE
    return Reading(cause, "proof", confidence)


def _reading(sign: Sign, match: re.Match[str]) -> Reading:
    named = dict(_named(match))
    rank = named.get("rank")
    return Reading(
        sign.cause, sign.role, sign.confidence, int(rank) if rank and rank.isdigit() else None, named.get("node")
    )


def _named(match: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Yield what the groups `rank`, `rank2`, `node`, ... caught: one name may stand in several alternatives."""
    for name, value in match.groupdict().items():
        if value:
            yield name.rstrip("0123456789"), value


def _sign(cause: str, entry: Mapping[str, Any]) -> Sign:
    flags = re.IGNORECASE if entry.get("ignore_case", False) else 0
    return Sign(
        cause=cause,
        role=entry["role"],
        confidence=float(entry["confidence"]),
        # Those that name somebody first: a line may fit several.
        patterns=tuple(sorted((re.compile(text, flags) for text in entry["any"]), key=lambda p: not p.groupindex)),
        source=entry["source"],
        example=entry["example"],
    )
