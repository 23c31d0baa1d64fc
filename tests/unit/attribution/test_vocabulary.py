"""Words are told apart once, and the lines of the telling ones are all found."""

import random
import string
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.diagnosis import diagnose_stream
from resilience_sdk.attribution.exceptions import exception_rules
from resilience_sdk.attribution.log_scan import Vocabulary, has_trouble, may_mean, meaningful, words_with
from resilience_sdk.attribution.log_signs import signs

WORDS = st.sampled_from([b"bad", b"badly", b"good", b"x" * 3000, b"x" * 3000 + b"bad"])


def tell(words):
    """Words with `bad` in them."""
    return words_with([b"bad"], words)


@given(st.lists(st.lists(WORDS, max_size=4), min_size=1, max_size=6))
def test_every_line_with_a_telling_word_is_found_in_its_place(lines):
    """Also when words come again, and when a word is as long as a file."""
    text = b"".join(b" ".join(words) + b"\n" for words in lines)
    vocabulary = Vocabulary(tell)
    expected = [line for line in text.split(b"\n") if b"bad" in line]
    for _ in range(2):
        assert [text[start:end] for start, end in vocabulary.lines(text)] == expected
    assert all(bool(vocabulary.telling(line)) is (b"bad" in line) for line in text.split(b"\n"))


def test_a_part_may_ask_for_where_a_word_begins_or_ends():
    """A line break stands for either."""
    words = {b"os", b"position", b"across", b"to", b"told"}
    assert words_with([b"\nos"], words) == {b"os"}
    assert words_with([b"os\n"], words) == {b"os"}
    assert words_with([b"\nto\n"], words) == {b"to"}
    assert words_with([b"to"], []) == set()


def test_what_may_mean_something_holds_a_meaningful_word():
    """Of every example of every sign and rule, by itself and behind other words: the closer look passes none over."""
    examples = [sign.example for sign in signs()]
    examples += [f"{rule.example['type']}: {rule.example['message']}".splitlines()[0] for rule in exception_rules()]
    dice = random.Random(3)
    for example in examples:
        for before in ("", "[rank3]: ", "ERROR 2026-01-01 " + "".join(dice.choices("abcdef0123456789 ", k=30)) + " "):
            line = (before + example).encode()
            if may_mean(line) and has_trouble(line.decode()):
                assert meaningful(set(line.translate(None, b"0123456789").split())), line


class OneWord:
    """A stream of 100 MB without a space or an end of line, no part of it like another."""

    def __init__(self):
        self.left, self.letters = 100, random.Random(1).choices(string.ascii_letters.encode(), k=1 << 20)

    def peek(self, _size):
        """Tell that it is not compressed."""
        return b"word"

    def read(self, _size):
        """Return the next megabyte."""
        self.left -= 1
        return bytes(self.letters[self.left :] + self.letters[: self.left]) if self.left >= 0 else b""


def test_a_word_as_long_as_a_file_is_not_kept():
    """Memory is bounded by what is read at a time, not by the longest word."""
    tracemalloc.start()
    try:
        diagnose_stream(OneWord(), "blob")
        assert tracemalloc.get_traced_memory()[1] < 75e6
    finally:
        tracemalloc.stop()
