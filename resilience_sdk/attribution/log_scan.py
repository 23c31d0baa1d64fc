"""Which lines of a log are worth a look: one pass over its bytes, in bounded memory. No I/O but the stream's.

Nearly all of a log is the same few lines with other numbers. So a chunk is compared by *shapes*, its lines
without their digits: a shape that was seen before costs one lookup of a set, and only new shapes are searched
for the words of trouble. Lines with such a word go to the reader, and after each of them as many as it asks for;
of the rest the first and last lines of the log and those just before a fault are kept.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from resilience_sdk.attribution.glance import may_mean

_CHUNK = 1 << 20
_MOST_SHAPES = 50_000
_MOST_SHAPE_BYTES = 16 << 20
_MOST_WORDS = 100_000
_DIGITS = b"0123456789"
_LOWER = bytes(range(256)).lower()
_HEAD = 120
_TAIL = 200
# One of these is in a word of every line that means something to `signatures`, in lower case (tested).
_TROUBLE = (
    b"error", b"exception", b"fail", b"traceback", b"signal", b"kill", b"abort", b"fatal", b"fault", b"timed",
    b"timeout", b"cancel", b"nvrm", b"watchdog", b"nan", b"straggl", b"oom", b"memory", b"refused", b"denied",
    b"closed", b"preempt", b"sigterm", b"interrupt", b"warn", b"not", b"n't", b"unable", b"blocked", b"lost",
    b"down", b"hung", b"hang", b"remap", b"left", b"read-only", b"stuck", b"corrupt", b"truncat", b"mismatch",
    b"panic", b"throttl", b"sxid", b"segmentation", b"limit", b"died", b"invalid", b"inf", b"^c", b"already",
    b"slow", b"exceed", b"errno", b"ecc", b"gsp", b"bus", b"reset", b"reach", b"quota", b"requeue", b"lockup",
    b"many", b"enospc", b"spike",
)  # fmt: skip
# Words that hold one of those and mean nothing.
_HARMLESS = re.compile(rb".*(?:info|config|inference|note(?:book)?|information)\W*")
# Where the number is what matters, lines of one shape can differ in meaning.
_NUMBERED = re.compile(rb"errno|xid|exit|signal|with error")
_PATIENCE = 3
_MOST_READS = 4000  # a line that comes so often is no news any more
_MOST_IN_VAIN = 2000  # lines with a word of trouble that meant nothing: from then on a closer look comes first
_PIECE = 1 << 16
_MOST_OF_A_SHAPE = 4000


class Reader(Protocol):
    """What lines are handed to."""

    def head(self, number: int, raw: bytes) -> None:
        """Take one of the first lines."""

    def feed(self, number: int, raw: bytes, *, trouble: bool) -> int:
        """Take a line and return how many of the next lines are wanted too; negative: it meant nothing at all.

        `trouble`: it holds a word of trouble; else it is read because a line before it was.
        """

    def before(self, lines: list[tuple[int, bytes]]) -> None:
        """Take the lines that came before the one just fed, the oldest first."""

    def wants_before(self) -> bool:
        """Tell whether the line just fed made the ones before it interesting."""

    def tail(self, lines: list[tuple[int, bytes]]) -> None:
        """Take the last lines, once, at the end."""


def scan(stream: BinaryIO, reader: Reader) -> None:
    """Read the stream to its end, in time linear in its length, and hand the reader what matters."""
    _Scan(reader).run(stream)


class _Scan:
    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._words = _Words()
        self._cold: set[bytes] = set()
        self._hot: dict[bytes, int] = {}  # shape -> how often it was read in vain, in a row
        self._reads: Counter[bytes] = Counter()
        self._known_bytes = 0
        self._wanted = 0
        self._in_vain = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_TAIL)

    def run(self, stream: BinaryIO) -> None:
        number = 1
        for chunk in _chunks(stream):
            self._chunk(number, chunk)
            number += chunk.count(b"\n")
        self._reader.tail(list(self._recent))

    def _chunk(self, first: int, chunk: bytes) -> None:
        numbers: list[int] | range
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n")
        body = chunk[:-1] if chunk.endswith(b"\n") else chunk
        if b"\r" in body:
            # A progress bar writes many states into one line.
            numbers = [n for n, line in enumerate(body.split(b"\n"), first) for _ in line.split(b"\r")]
            body = body.replace(b"\r", b"\n")
            lines = body.split(b"\n")
        else:
            lines = body.split(b"\n")
            numbers = range(first, first + len(lines))
        shapes = body.translate(_LOWER, _DIGITS).split(b"\n")
        self._learn(set(shapes))
        self._read(numbers, lines, shapes)
        self._recent.extend(zip(numbers[-_TAIL:], lines[-_TAIL:], strict=True))

    def _learn(self, shapes: set[bytes]) -> None:
        """Sort the shapes that are new into those with a word of trouble and those without."""
        new = shapes - self._cold
        new.difference_update(self._hot)
        if not new:
            return
        joined = b"\n".join(new) + b"\n"
        self._known_bytes += len(joined)
        if len(self._cold) + len(self._hot) > _MOST_SHAPES or self._known_bytes > _MOST_SHAPE_BYTES:
            self._cold.clear()
            self._hot.clear()
            self._reads.clear()
            joined = b"\n".join(shapes) + b"\n"
            new, self._known_bytes = shapes, len(joined)
        hot = self._words.lines_with_trouble(joined)
        self._hot.update(dict.fromkeys(hot, 0))
        self._cold.update(new - hot)

    def _read(self, numbers: list[int] | range, lines: list[bytes], shapes: list[bytes]) -> None:
        reader = self._reader
        if numbers[0] <= _HEAD:
            for number, line in zip(numbers, lines, strict=True):
                if number > _HEAD:
                    break
                reader.head(number, line)
        hot = self._hot
        hits = [index for index, shape in enumerate(shapes) if shape in hot] if hot else []
        next_hit = index = 0
        while index < len(lines):
            if self._wanted <= 0:
                next_hit = bisect_left(hits, index, next_hit)
                if next_hit == len(hits):
                    return
                index = hits[next_hit]
            trouble = shapes[index] in hot
            if trouble and self._wanted <= 0 and self._in_vain > _MOST_IN_VAIN and not may_mean(lines[index]):
                index += 1
                continue
            wanted = reader.feed(numbers[index], lines[index], trouble=trouble)
            if trouble:
                self._judge(shapes[index], wanted)
            if reader.wants_before():
                reader.before(self._before(index, numbers, lines))
            self._wanted = max(self._wanted - 1, wanted)
            index += 1

    def _before(self, index: int, numbers: list[int] | range, lines: list[bytes]) -> list[tuple[int, bytes]]:
        start = max(0, index - _TAIL)
        near = list(zip(numbers[start:index], lines[start:index], strict=True))
        return [*list(self._recent)[len(near) :], *near] if len(near) < _TAIL else near

    def _judge(self, shape: bytes, wanted: int) -> None:
        """Stop reading a shape that comes too often, or that never meant anything, unless its numbers may."""
        self._reads[shape] += 1
        self._in_vain += wanted < 0
        is_numbered = _NUMBERED.search(shape, 0, _MOST_OF_A_SHAPE)
        self._hot[shape] = 0 if wanted >= 0 or is_numbered else self._hot[shape] + 1
        if self._hot[shape] >= _PATIENCE or self._reads[shape] >= _MOST_READS:
            del self._hot[shape]
            del self._reads[shape]
            self._cold.add(shape)


class _Words:
    """The words of a log, known by now to be dull or to tell of trouble: a language has fewer words than lines."""

    def __init__(self) -> None:
        self._dull: set[bytes] = set()
        self._telling: set[bytes] = set()

    def lines_with_trouble(self, joined: bytes) -> set[bytes]:
        """Return the lines with a word of trouble; each line of `joined` is in lower case and ends with a newline."""
        found: set[bytes] = set()
        start = 0
        while start < len(joined):
            end = joined.find(b"\n", start + _PIECE) + 1 or len(joined)
            piece = joined[start:end]
            words = piece.split()
            # Nearly always true, and faster than to make a set of them.
            if not self._dull.issuperset(words):
                self._find(piece, set(words), found)
            start = end
        return found

    def _find(self, piece: bytes, words: set[bytes], found: set[bytes]) -> None:
        if len(self._dull) + len(self._telling) > _MOST_WORDS:
            self._dull.clear()
            self._telling.clear()
        self._learn(words - self._dull - self._telling)
        for word in words & self._telling:
            at = piece.find(word)
            while at >= 0:
                start, end = piece.rfind(b"\n", 0, at) + 1, piece.find(b"\n", at)
                found.add(piece[start:end])
                at = piece.find(word, end)

    def _learn(self, new: set[bytes]) -> None:
        text = b"\n" + b"\n".join(new) + b"\n"
        telling: set[bytes] = set()
        for part in _TROUBLE:
            at = text.find(part)
            while at >= 0:
                end = text.find(b"\n", at)
                telling.add(text[text.rfind(b"\n", 0, at) + 1 : end])
                at = text.find(part, end)
        telling = {word for word in telling if not _HARMLESS.fullmatch(word)}
        self._telling |= telling
        self._dull |= new - telling


def has_trouble(text: str) -> bool:
    """Tell whether a line would be read at all."""
    return bool(_Words().lines_with_trouble(text.encode().translate(_LOWER, _DIGITS) + b"\n"))


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield whole lines, about a megabyte at a time; a line longer than that comes in pieces."""
    rest = b""
    while data := stream.read(_CHUNK):
        data = rest + data
        end = data.rfind(b"\n") + 1
        if end:
            yield data[:end]
            rest = data[end:]
        elif len(data) >= _CHUNK:
            yield data
            rest = b""
        else:
            rest = data
    if rest:
        yield rest
