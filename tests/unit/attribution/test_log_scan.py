"""What of a log is read at all."""

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.attribution.log_reader import LogReader
from resilience_sdk.attribution.log_scan import scan

FAULT = b"RuntimeError: CUDA error: an illegal memory access was encountered"


class Listening:
    """A reader that notes what it is given, and wants nothing else."""

    def __init__(self, answer=-1):
        self.answer, self.heads, self.fed, self.last = answer, [], [], []

    def head(self, number, raw):
        self.heads.append((number, raw))

    def feed(self, number, raw, *, trouble):
        self.fed.append((number, raw))
        return self.answer

    def before(self, lines):
        raise AssertionError("nobody asked")

    def wants_before(self):
        return False

    def tail(self, lines):
        self.last = lines


class Counting(LogReader):
    """The reader, and how many lines it was given."""

    fed = 0

    def feed(self, number, raw, *, trouble):
        self.fed += 1
        return super().feed(number, raw, trouble=trouble)


def scanned(*lines, answer=-1):
    reader = Listening(answer)
    scan(io.BytesIO(b"\n".join(lines) + b"\n"), reader)
    return reader


def hexadecimal(dice, digits):
    return f"{dice.getrandbits(4 * digits):0{digits}x}".encode()


def test_progress_is_not_read_and_a_fault_in_it_is():
    """Lines that differ by numbers are one shape; a line with a word of trouble is another."""
    steps = [b"step %d loss %d.%d" % (n, n % 7, n) for n in range(50_000)]
    assert scanned(*steps[:30_000], FAULT, *steps[30_000:]).fed == [(30_001, FAULT)]


@pytest.mark.parametrize("digits", [16, 32], ids=lambda digits: f"{digits}-digits")
def test_identifiers_make_no_line_another_one(digits):
    """Lines that differ by an identifier and mean nothing are read three times, not each; the fault among them is."""
    dice = random.Random(digits)
    requests = [b"request %s took 7 ms, not cached" % hexadecimal(dice, digits) for _ in range(40_000)]
    found = scanned(*requests[:25_000], FAULT, *requests[25_000:])
    assert (25_001, FAULT) in found.fed
    assert len(found.fed) < 20


def test_uuids_are_identifiers():
    """They hold dashes."""
    dice = random.Random(0)
    requests = [
        b"-".join(hexadecimal(dice, digits) for digits in (8, 4, 4, 4, 12)) + b" not found" for _ in range(40_000)
    ]
    assert len(scanned(*requests).fed) < 20


def test_what_comes_by_the_thousand_is_no_news():
    """Of one kind of line a thousand are read, whatever their numbers."""
    assert len(scanned(*(b"CUDA error %d: launch failed" % n for n in range(20_000)), answer=0).fed) == 1000


def test_of_tracebacks_by_the_thousand_few_are_read_to_their_end():
    """Each may want 200 lines after it, of which the next traceback is none that it wants."""
    one = [
        b"Traceback (most recent call last):",
        b'  File "/job/train.py", line 7, in step',
        b"    loss.backward()",
        FAULT,
        *(b"step %d of the others" % n for n in range(4)),
    ]
    reader = Counting("log")
    scan(io.BytesIO(b"\n".join(one * 20_000)), reader)
    assert reader.fed < 20_000  # of 160,000
    (exception, *_) = reader.facts().sightings
    assert exception.number <= len(one)


@given(
    st.lists(st.sampled_from([b"step 1", b"error 7", b"a\rb\rfatal", b"", b"\xff nan", FAULT]), min_size=1, max_size=60)
)
def test_every_line_keeps_its_number(lines):
    """What is read is what stands there, in order; a carriage return begins no line."""
    found = scanned(*lines, answer=2)
    numbers = [number for number, _ in found.fed]
    assert numbers == sorted(numbers)
    for number, raw in [*found.heads, *found.fed, *found.last]:
        assert raw in lines[number - 1].split(b"\r")
