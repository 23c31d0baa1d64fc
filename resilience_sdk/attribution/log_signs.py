"""Signs of single lines, by `causes/*.toml`, and the literals that any line with a sign must hold. Pure.

Looking for plain text costs a hundredth of a search with a pattern, so most patterns need never be tried on a line.
Less is found than could be, but never too much: where nothing is known, the empty text is in every line.

A sign's role tells how much a line that fits may claim:

    proof    the kernel, the driver or the scheduler says so: it counts whatever the program did next
    fault    a program says it of itself as it ends
    hint     a program mentions it: it may have been handled, so it counts only where nothing stronger does
    symptom  it only says that a peer is gone or silent: the cause lies elsewhere
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import attrs

from resilience_sdk.attribution.exceptions import exception_rules
from resilience_sdk.attribution.taxonomy import cause_tables

_OPTIONAL = "*?{"
_CLASSES = "dDsSwWbBAZ0123456789"
_NOWHERE = ("(?!", "(?<", "(?=")  # looking around asks for text that may lie outside of the match
_NOTHING = ("",)
_RUN = 3
_MOST_WORDS = 50_000
_LONGEST_WORD = 60


def required_literals(pattern: str) -> tuple[str, ...]:
    """Return lower-case texts of which one is in every match of `pattern`, lower-cased; `("",)` when none is known."""
    found: set[str] = set()
    for part in _alternatives(pattern.removeprefix("(?i)")):
        best = max(_candidates(part), key=lambda words: (min(map(len, words)), -len(words)), default=_NOTHING)
        found.update(best)
    return _NOTHING if "" in found else tuple(sorted(found))


def all_required(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Return groups of lower-case texts; every match of `pattern`, lower-cased, holds one of each group."""
    parts = list(_alternatives(pattern.removeprefix("(?i)")))
    return tuple(_candidates(parts[0])) if len(parts) == 1 else (required_literals(pattern),)


def _candidates(part: str) -> Iterator[tuple[str, ...]]:
    """Yield, for each thing in a sequence that must be there, the texts of which one is in it."""
    run = ""
    for token, repeat in _tokens(part):
        optional = repeat[:1] in _OPTIONAL if repeat else False
        literal = "" if optional else _literal(token)
        if literal:
            run += literal
            if not repeat:
                continue
        if run:
            yield (run.lower(),)
        run = ""
        if token[0] == "(" and not optional and (not token.startswith(_NOWHERE) or token.startswith("(?P<")):
            yield required_literals(_inside(token))
    if run:
        yield (run.lower(),)


def _literal(token: str) -> str:
    if token[0] == "\\":
        return "" if token[1:] in _CLASSES else token[1:]
    return "" if token[0] in "[(.^$" else token


def _inside(group: str) -> str:
    """Return what a group holds, without its own syntax: `(?P<name>x)`, `(?:x)`, `(?i:x)`, `(x)`."""
    body = group[1:-1]
    if body.startswith("?P<"):
        return body[body.index(">") + 1 :]
    return body[body.index(":") + 1 :] if body.startswith("?") else body


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield each element of a sequence with its repetition: `a`, `\\d`, `[^x]`, `(...)`."""
    at = 0
    while at < len(pattern):
        end = _token_end(pattern, at)
        after = _repeat_end(pattern, end)
        yield pattern[at:end], pattern[end:after]
        at = after


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the parts between the `|` that stand outside every group and class."""
    start = at = 0
    while at < len(pattern):
        if pattern[at] == "|":
            yield pattern[start:at]
            start = at = at + 1
        else:
            at = _token_end(pattern, at)
    yield pattern[start:]


def _token_end(pattern: str, at: int) -> int:
    char = pattern[at]
    if char == "\\":
        return at + 2
    if char == "[":
        end = at + 2 + (pattern[at + 1] == "^")  # the first character of a class is never its end
        while pattern[end] != "]":
            end += 2 if pattern[end] == "\\" else 1
        return end + 1
    if char == "(":
        end = at + 1
        while pattern[end] != ")":
            end = _token_end(pattern, end)
        return end + 1
    return at + 1


def _repeat_end(pattern: str, at: int) -> int:
    char = pattern[at : at + 1]
    if not char or char not in "*+?{":
        return at
    end = pattern.index("}", at) + 1 if char == "{" else at + 1
    return end + 1 if pattern[end : end + 1] == "?" else end


class LiteralIndex:
    """Tells which of many patterns a text may fit, by their literals, without trying each.

    Each literal is filed under its rarest run of three characters. What the runs of a word lead to is remembered:
    a log has few words.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        entries = [required_literals(pattern) for pattern in patterns]
        self._groups = [all_required(pattern) for pattern in patterns]
        runs = Counter(run for literals in entries for literal in literals for run in _runs(literal))
        self._always: list[int] = []
        self._by_run: dict[str, list[tuple[str, int]]] = {}
        for number, literals in enumerate(entries):
            if not all(map(_runs, literals)):
                self._always.append(number)
                continue
            for literal in literals:
                rarest = min(sorted(_runs(literal)), key=lambda run: runs[run])
                self._by_run.setdefault(rarest, []).append((literal, number))
        self._by_word: dict[str, list[tuple[str, int]]] = {}

    def candidates(self, lowered: str) -> list[int]:
        """Return the numbers of the patterns that `lowered` has the literals of, in their order."""
        found = set(self._always)
        for word in lowered.split():
            filed = self._by_word.get(word)
            if filed is None:
                filed = self._look_up(word)
            for literal, number in filed:
                if literal in lowered:
                    found.add(number)
        return sorted([number for number in found if self._has_all(number, lowered)])

    def _has_all(self, number: int, lowered: str) -> bool:
        for group in self._groups[number]:
            for literal in group:
                if literal in lowered:
                    break
            else:
                return False
        return True

    def _look_up(self, word: str) -> list[tuple[str, int]]:
        filed = [entry for run in _runs(word) for entry in self._by_run.get(run, ())]
        if len(word) <= _LONGEST_WORD:
            if len(self._by_word) >= _MOST_WORDS:
                self._by_word.clear()
            self._by_word[word] = filed
        return filed


def _runs(text: str) -> set[str]:
    """Return the runs of three characters that lie inside a word."""
    return {word[at : at + _RUN] for word in text.split() for at in range(len(word) - _RUN + 1)}


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
# Who speaks of hardware by profession; everybody else may be the user's own print.
_SYSTEM = re.compile(
    r"NVRM|\bnvidia-\w+|fabricmanager|\bdcgmi?\b|amdgpu|\bslurm\w*[:\-]|\bsrun:|kubelet|ORTE|"
    r"\bNCCL (?:WARN|INFO)|\bUCX\b|\bThe node with node id\b|\bssh:"
)
_MOST_CHARACTERS = 4000
_PLAIN_CONFIDENCE = 0.8


@attrs.frozen
class Sign:
    """One way in which a cause shows in a log. `anybody`: in words that programs use of their own accord too."""

    cause: str
    role: str
    confidence: float
    patterns: tuple[re.Pattern[str], ...]
    source: str
    example: str
    anybody: bool = False


@attrs.frozen
class SignReading:
    """What a line says: a cause with role and confidence, and whom it names, where it does.

    `hearsay`: in anybody's words, and nothing in the line tells that a system wrote them.
    """

    cause: str
    role: str
    confidence: float
    rank: int | None = None
    node: str | None = None
    hearsay: bool = False


@lru_cache(maxsize=1)
def signs() -> tuple[Sign, ...]:
    """Return every sign, the stronger roles first and the surer ones first among equals."""
    found = [_sign(cause, entry) for cause, table in cause_tables().items() for entry in table.get("sign", ())]
    return tuple(sorted(found, key=lambda sign: (ROLES.index(sign.role), -sign.confidence)))


@lru_cache(maxsize=1)
def xid_causes() -> Mapping[int, str]:
    """Return which cause each Xid number of the NVIDIA driver stands for; a number that is not there is none."""
    return {number: cause for cause, table in cause_tables().items() for number in table.get("xid", ())}


def is_xid(text: str) -> bool:
    """Tell whether a line is an Xid of the NVIDIA driver."""
    return "Xid" in text and _XID.search(text) is not None


def read_line(text: str) -> SignReading | None:
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


def _read_xid(number: int, text: str) -> SignReading | None:
    if number == 154:
        return SignReading("gpu_hardware_faulty", "proof", 0.7) if _RECOVERY.search(text) else None
    cause = xid_causes().get(number)
    if cause is None:
        return None
    confidence = _NONFATAL_CONFIDENCE if "Nonfatal" in text else _XID_CONFIDENCE
    return SignReading(cause, "proof", confidence)


def _reading(sign: Sign, match: re.Match[str]) -> SignReading:
    named = dict(_named(match))
    rank = named.get("rank")
    return SignReading(
        sign.cause,
        sign.role,
        sign.confidence,
        int(rank) if rank and rank.isdigit() else None,
        named.get("node"),
        sign.anybody and _SYSTEM.search(match.string) is None,
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
        anybody=entry.get("anybody", False),
    )
