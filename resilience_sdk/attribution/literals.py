"""Pieces of plain text of which whatever fits a regular expression must hold one. Pure.

Looking for plain text costs a hundredth of a search with a pattern, so most patterns need never be tried on a line.
Less is found than could be, but never too much: where nothing is known, the empty text is in every line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

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
