"""The words of a log, sorted once into those that tell of something and those that do not. Pure.

A log has fewer words than lines, and to look a word up costs a hundredth of what a search of its line would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_MOST_WORDS = 100_000
_LONGEST_WORD = 1000
_END = 500
_PIECE = 1 << 16  # what fits into the processor's cache together with its words


class Vocabulary:
    """Finds the lines that hold a telling word; `find_telling(words)` returns those of new words that are."""

    def __init__(self, find_telling: Callable[[set[bytes]], set[bytes]]) -> None:
        self._find_telling = find_telling
        self._dull: set[bytes] = set()
        self._telling: set[bytes] = set()
        self._known: set[bytes] = set()  # both

    def telling(self, line: bytes) -> set[bytes]:
        """Return the telling words of one line."""
        words = line.split()
        return self._telling.intersection(words) if self._known.issuperset(words) else self._sort(set(words))

    def lines(self, text: bytes) -> list[tuple[int, int]]:
        """Return where the lines with a telling word begin and end, in their order; every line ends with a newline."""
        found: dict[int, int] = {}
        start = 0
        while start < len(text):
            end = text.find(b"\n", start + _PIECE) + 1 or len(text)
            piece = text[start:end]
            words = piece.split()
            # Nearly always true, and faster than to make a set of them.
            if not self._dull.issuperset(words):
                for word in self._sort(set(words)):
                    _find_lines(piece, word, start, found)
            start = end
        return sorted(found.items())

    def _sort(self, words: set[bytes]) -> set[bytes]:
        """Return the telling ones, and remember which ones these were."""
        if len(self._known) > _MOST_WORDS:
            self._dull.clear()
            self._telling.clear()
            self._known.clear()
        new = words - self._known
        kept = {word for word in new if len(word) <= _LONGEST_WORD}
        telling = self._find_telling(kept) if kept else set()
        self._telling |= telling
        self._dull |= kept - telling
        self._known |= kept
        # Of a blob without a space only the ends are looked at, as of a line, and it is not kept.
        ends = {word[:_END] + word[-_END:]: word for word in new if len(word) > _LONGEST_WORD}
        long = {ends[end] for end in self._find_telling(set(ends))} if ends else set()
        return (words & self._telling) | long


def words_with(parts: Iterable[bytes], words: Iterable[bytes]) -> set[bytes]:
    """Return those of the words that hold one of the parts; a line break in a part is where a word begins or ends."""
    text = b"\n" + b"\n".join(words) + b"\n"
    found: set[bytes] = set()
    if len(text) == 2:
        return found
    for part in parts:
        at = text.find(part)
        while at >= 0:
            inside = at + part.startswith(b"\n")
            end = text.find(b"\n", inside)
            found.add(text[text.rfind(b"\n", 0, inside) + 1 : end])
            at = text.find(part, end)
    return found


def _find_lines(piece: bytes, word: bytes, offset: int, found: dict[int, int]) -> None:
    at = piece.find(word)
    while at >= 0:
        start, end = piece.rfind(b"\n", 0, at) + 1, piece.find(b"\n", at)
        found[offset + start] = offset + end
        at = piece.find(word, end)
