"""The scan of a log: one pass over its bytes, in bounded memory, picks the lines that may mean anything.

Asked only where lines with a word of trouble come by the hundred and mean nothing. It may say yes in vain, never no to
a line that the reader would take for a sign, an exception, a traceback or a launcher's report. `meaningful` answers for
single words: a line without such a word means nothing.

A log has fewer words than lines, and to look a word up costs a hundredth of what a search of its line would.

Nearly all of a log is the same few lines with other numbers. So a chunk is compared by *shapes*, its lines
without their digits: a shape that was seen before costs one lookup of a set, and only new shapes are searched
for the words of trouble. Where most lines have shapes of their own, hexadecimal identifiers are left out too, and
where that does not help their words alone are looked up. Lines with such a word go to the reader, and after each of
them as many as it asks for; of the rest the first and last lines of the log and those just before a fault are kept.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import BinaryIO, Protocol

from resilience_sdk.attribution.log_signs import all_required, may_say, sign_patterns

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


_MOST_LOOKED_AT = 4000
# What is read by its form and not by a sign.
_FORMS = (
    b"Error", b"Exception", b"Interrupt", b"Exit", b"Iteration", b"Warning", b"Timeout", b"Killed", b"Preempted",
    b"Failure", b"Empty", b"Full", b"Traceback", b'File "', b"Root Cause", b"FAILED", b"Command", b"Primary job",
    b"Job step", b"Unable to shutdown", b"Sending process", b"Killing", b"SIGTERM", b"Xid",
)  # fmt: skip
_BY_FORM = re.compile(b"|".join(map(re.escape, _FORMS)))
# A pattern of lower case would be slow.
_BY_WORD = (b"what()", b"exit", b"srun", b"mpirun", b"closing", b"^C", b"(most", b'"MainThread"')
_FORM_WORDS = (*(form.split()[0] for form in _FORMS), *_BY_WORD)
_NUMBER = re.compile(rb"[a-fA-F\-:./,()\[\]{}]{8,}")  # what is left of a hexadecimal number, without its digits
_SHORTEST = 3
_DIGITS = str.maketrans("", "", "0123456789")
_EVERYDAY = frozenset({"the", "to", "out", "got", "did", "read", "could", "cannot", "this", "too", "device", "file"})
# In so many lines of trouble that they tell no sign from another.
_TROUBLE = frozenset({
    "error", "failed", "failure", "fail", "fatal", "warning", "exception", "not", "invalid", "timeout", "timed",
    "killed", "signal", "memory", "process", "abort", "rank", "limit", "lost", "down",
})  # fmt: skip


def may_mean(raw: bytes) -> bool:
    """Tell whether to read a line."""
    raw = raw[:_MOST_LOOKED_AT]
    if _BY_FORM.search(raw) is not None or any(word in raw for word in _BY_WORD):
        return True
    return may_say(raw.decode("latin-1"))


def meaningful(words: set[bytes]) -> set[bytes]:
    """Return those of the words, their digits taken out, of which every line that `may_mean` something holds one."""
    lowered: dict[bytes, list[bytes]] = {}
    words = {word for word in words if not _NUMBER.fullmatch(word)}
    for word in words:
        lowered.setdefault(word.lower(), []).append(word)
    found = words_with(_FORM_WORDS, words)
    found.update(*(lowered[word] for word in words_with(_sign_words(), lowered)))
    return found


@lru_cache(maxsize=1)
def _sign_words() -> frozenset[bytes]:
    """Return pieces of words, in lower case, of which one is in every line that fits a sign (see `words_with`)."""
    return frozenset(word.encode() for pattern in sign_patterns() for word in _words_of(pattern))


def _words_of(pattern: str) -> tuple[str, ...]:
    """Return the best of what a pattern requires: pieces of words that are not common; of these, the longest."""
    best: tuple[str, ...] = ()
    for literals in all_required(pattern):
        words = tuple(max(_pieces(literal), key=_worth, default="") for literal in literals)
        if all(words) and (not best or min(map(_worth, words)) > min(map(_worth, best))):
            best = words
    return best


def _pieces(literal: str) -> list[str]:
    """Return the words of a text without their digits, a line break where a word is known to begin or end."""
    words = ["".join(word.split()) for word in literal.translate(_DIGITS).split(" ")]
    last = len(words) - 1
    pieces = [("\n" if n else "") + word + ("\n" if n < last else "") for n, word in enumerate(words) if word]
    return [piece for piece in pieces if len(piece) >= _SHORTEST]


def _worth(piece: str) -> tuple[bool, bool, int]:
    word = piece.strip("\n:.")
    return word not in _TROUBLE, word not in _EVERYDAY, len(word)


_CHUNK = 1 << 20
_MOST_SHAPES = 50_000
_MOST_SHAPE_BYTES = 16 << 20
_DIGIT_BYTES = b"0123456789"
_IDENTIFIER = re.compile(rb"\b[0-9a-fA-F]{8,}(?:-[0-9a-fA-F]{4,})*\b")
_HEAD = 120
_TAIL = 200
# One of these is in a word of every line that means something to `signatures`, in lower case (tested).
_TROUBLE_BYTES = (
    b"error", b"exception", b"fail", b"traceback", b"signal", b"kill", b"abort", b"fatal", b"fault", b"timed",
    b"timeout", b"cancel", b"nvrm", b"watchdog", b"nan", b"straggl", b"oom", b"memory", b"refused", b"denied",
    b"closed", b"preempt", b"sigterm", b"interrupt", b"warn", b"not", b"n't", b"unable", b"blocked", b"lost",
    b"down", b"hung", b"hang", b"remap", b"left", b"read-only", b"stuck", b"corrupt", b"truncat", b"mismatch",
    b"panic", b"throttl", b"sxid", b"segmentation", b"limit", b"died", b"invalid", b"inf", b"^c", b"already",
    b"slow", b"exceed", b"errno", b"ecc", b"gsp", b"bus", b"reset", b"reach", b"quota", b"requeue", b"lockup",
    b"many", b"enospc", b"spike", b"unavailab", b"(most", b'"mainthread"', b"bootstrap",
)  # fmt: skip
# Words that hold one of those and mean nothing.
_HARMLESS = re.compile(rb".*(?:info|config|inference|note(?:book)?|information)\W*")
# Where the number is what matters, lines of one shape can differ in meaning.
_NUMBERED = re.compile(rb"(?i)errno|xid|exit|signal|with error")
_PATIENCE = 3
_MOST_READS = 1000  # lines of one kind, by their telling words: what comes so often is no news any more
_MANY_READS = 5000  # lines read in all, after which `_FEW_READS` of a kind suffice
_FEW_READS = 20
_MOST_KINDS = 20_000
_NO_KIND: frozenset[bytes] = frozenset()
_MOST_IN_VAIN = 2000  # lines with a word of trouble that meant nothing: from then on a closer look comes first
_MOST_OF_A_SHAPE = 4000
_LOOK_AGAIN = 16  # chunks after which lines may have begun to repeat themselves


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
        self._trouble = Vocabulary(_troublesome)
        self._meaning = Vocabulary(meaningful)
        self._cold: set[bytes] = set()
        self._hot: dict[bytes, int] = {}  # shape -> how often it was read in vain, in a row
        self._reads: Counter[frozenset[bytes]] = Counter()  # by the telling words of a line
        self._all_reads = 0
        self._known_bytes = 0
        self._wanted = 0
        self._in_vain = 0
        self._repeats = True  # whether the lines of the newest chunks had been seen before, but for their numbers
        self._leaves_out_identifiers = False
        self._chunks = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=_TAIL)

    def run(self, stream: BinaryIO) -> None:
        number = 1
        for chunk in _chunks(stream):
            self._chunk(number, chunk)
            number += chunk.count(b"\n")
        self._reader.tail(list(self._recent))

    @property
    def _is_vain(self) -> bool:
        return self._in_vain > _MOST_IN_VAIN

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
        self._chunks += 1
        looks = self._repeats or self._chunks % _LOOK_AGAIN == 0
        shapes = self._shapes_that_repeat(body) if looks else None
        self._repeats = shapes is not None
        hits = self._hits_by_shape(shapes) if shapes is not None else self._hits_by_word(_shapes(body) + b"\n")
        self._read(numbers, lines, hits)
        self._recent.extend(zip(numbers[-_TAIL:], map(_ends, lines[-_TAIL:]), strict=True))

    def _shapes_that_repeat(self, body: bytes) -> list[bytes] | None:
        """Return the shapes of the lines, made in the way by which most of them were seen before; None if none is."""
        for leave_out in (self._leaves_out_identifiers, not self._leaves_out_identifiers):
            shapes = _shapes(_IDENTIFIER.sub(b"", body) if leave_out else body).split(b"\n")
            if len(set(shapes).difference(self._cold, self._hot)) < len(shapes) / 2:
                self._leaves_out_identifiers = leave_out
                return shapes
        return None

    def _hits_by_shape(self, shapes: list[bytes]) -> dict[int, bytes]:
        """Return the lines worth a look with their shapes, after sorting the shapes that are new."""
        distinct = set(shapes)
        new = distinct.difference(self._cold, self._hot)
        if new:
            self._known_bytes += sum(map(len, new))
            if self._forget_if_many():
                new, self._known_bytes = distinct, sum(map(len, distinct))
            joined = b"\n".join(new) + b"\n"
            hot = {joined[start:end] for start, end in self._words().lines(joined)}
            self._hot.update(dict.fromkeys(hot, 0))
            self._cold.update(new - hot)
        hot_ones = self._hot
        return {index: shape for index, shape in enumerate(shapes) if shape in hot_ones} if hot_ones else {}

    def _hits_by_word(self, text: bytes) -> dict[int, bytes]:
        """Return the same where no line is like another, so that there is nothing to be gained by comparing them."""
        hits, index, counted = {}, 0, 0
        self._forget_if_many()
        for start, end in self._words().lines(text):
            index += text.count(b"\n", counted, start)
            counted = start
            shape = text[start:end]
            if shape not in self._cold:
                hits[index] = shape
                if shape not in self._hot:
                    self._hot[shape] = 0
                    self._known_bytes += len(shape)
        return hits

    def _words(self) -> Vocabulary:
        return self._meaning if self._is_vain else self._trouble

    def _forget_if_many(self) -> bool:
        is_many = len(self._cold) + len(self._hot) > _MOST_SHAPES or self._known_bytes > _MOST_SHAPE_BYTES
        if is_many:
            self._cold.clear()
            self._hot.clear()
            self._known_bytes = 0
        return is_many

    def _read(self, numbers: list[int] | range, lines: list[bytes], hits: dict[int, bytes]) -> None:
        reader = self._reader
        if numbers[0] <= _HEAD:
            for number, line in zip(numbers, lines, strict=True):
                if number > _HEAD:
                    break
                reader.head(number, line)
        order = list(hits)
        next_hit = index = 0
        while index < len(lines):
            if self._wanted <= 0:
                next_hit = bisect_left(order, index, next_hit)
                if next_hit == len(order):
                    return
                index = order[next_hit]
            shape = hits.get(index)
            kind = self._kind(shape) if shape is not None and shape in self._hot else _NO_KIND
            is_news = bool(kind) and self._is_news(kind)
            if kind and not is_news and shape is not None:
                self._leave_out(shape)
            if self._wanted <= 0 and not (is_news and shape is not None and self._is_worth(shape, lines[index])):
                index += 1
                continue
            wanted = reader.feed(numbers[index], lines[index], trouble=is_news)
            if shape is not None and is_news:
                self._judge(shape, kind, wanted)
            if reader.wants_before():
                reader.before(self._before(index, numbers, lines))
            self._wanted = max(self._wanted - 1, wanted)
            index += 1

    def _kind(self, shape: bytes) -> frozenset[bytes]:
        """Return the telling words of a line; none where it means nothing."""
        return frozenset(self._words().telling(shape[:_MOST_OF_A_SHAPE]))

    def _is_worth(self, shape: bytes, line: bytes) -> bool:
        """Take a closer look, once many lines with a word of trouble have been read for nothing."""
        return not self._is_vain or (may_mean(line) and bool(self._trouble.telling(shape)))

    def _is_news(self, kind: frozenset[bytes]) -> bool:
        """Tell whether lines of that kind have not been read so often that one more tells nothing."""
        return self._reads[kind] < (_MOST_READS if self._all_reads < _MANY_READS else _FEW_READS)

    def _before(self, index: int, numbers: list[int] | range, lines: list[bytes]) -> list[tuple[int, bytes]]:
        start = max(0, index - _TAIL)
        near = list(zip(numbers[start:index], lines[start:index], strict=True))
        return [*list(self._recent)[len(near) :], *near] if len(near) < _TAIL else near

    def _judge(self, shape: bytes, kind: frozenset[bytes], wanted: int) -> None:
        """Count what was read, and stop reading a shape that never meant anything, unless its numbers may."""
        self._all_reads += 1
        if kind in self._reads or len(self._reads) < _MOST_KINDS:
            self._reads[kind] += 1
        self._in_vain += wanted < 0
        is_numbered = _NUMBERED.search(shape, 0, _MOST_OF_A_SHAPE)
        self._hot[shape] = 0 if wanted >= 0 or is_numbered else self._hot[shape] + 1
        if self._hot[shape] >= _PATIENCE:
            self._leave_out(shape)

    def _leave_out(self, shape: bytes) -> None:
        """Read no line of that shape any more."""
        del self._hot[shape]
        self._cold.add(shape)


def _troublesome(words: set[bytes]) -> set[bytes]:
    """Return those of the words that tell of trouble, whatever their case."""
    lowered: dict[bytes, list[bytes]] = {}
    for word in words:
        lowered.setdefault(word.lower(), []).append(word)
    telling = [word for word in words_with(_TROUBLE_BYTES, lowered) if not _HARMLESS.fullmatch(word)]
    return {word for lower in telling for word in lowered[lower]}


def has_trouble(text: str) -> bool:
    """Tell whether a line would be read at all."""
    return bool(Vocabulary(_troublesome).telling(text.encode().translate(None, _DIGIT_BYTES)))


def _shapes(text: bytes) -> bytes:
    return text.translate(None, _DIGIT_BYTES)


def _ends(line: bytes) -> bytes:
    """Return what is looked at of a line: of a very long one its ends."""
    return line if len(line) <= 2 * _MOST_OF_A_SHAPE else line[:_MOST_OF_A_SHAPE] + b" ... " + line[-_MOST_OF_A_SHAPE:]


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
