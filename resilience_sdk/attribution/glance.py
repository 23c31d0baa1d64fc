"""Whether a line may mean anything, for a small part of the cost of reading it. Pure.

Asked only where lines with a word of trouble come by the hundred and mean nothing. It may say yes in vain, never no to
a line that the reader would take for a sign, an exception, a traceback or a launcher's report. `meaningful` answers for
single words: a line without such a word means nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache

from resilience_sdk.attribution.literals import all_required
from resilience_sdk.attribution.signatures import may_say, sign_patterns
from resilience_sdk.attribution.vocabulary import words_with

_MOST_LOOKED_AT = 4000
# What is read by its form and not by a sign.
_FORMS = (
    b"Error", b"Exception", b"Interrupt", b"Exit", b"Iteration", b"Warning", b"Timeout", b"Killed", b"Preempted",
    b"Failure", b"Empty", b"Full", b"Traceback", b'File "', b"Root Cause", b"FAILED", b"Command", b"Primary job",
    b"Job step", b"Unable to shutdown", b"Sending process", b"Killing", b"SIGTERM", b"Xid",
)  # fmt: skip
_BY_FORM = re.compile(b"|".join(map(re.escape, _FORMS)))
_BY_WORD = (b"what()", b"exit", b"srun", b"mpirun", b"closing", b"^C")  # a pattern of lower case would be slow
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
