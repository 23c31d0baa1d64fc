"""The run directory may hang: whoever asks what is new in it goes on."""

import itertools
import threading
import time

from resilience_sdk.adapters.lightning.background_look import BackgroundLook


def test_it_looks_again_and_again_and_once_more_at_the_end():
    """What was found last is there without a wait."""
    numbers = itertools.count(1)
    seen = threading.Event()

    def look():
        number = next(numbers)
        if number == 3:
            seen.set()
        return number

    looking = BackgroundLook(look, 0.001, 0)
    assert seen.wait(30.0)
    known = looking.newest
    last = looking.end()
    assert known < last
    assert looking.end() == looking.newest == last


def test_a_look_that_hangs_holds_nobody_up():
    """Neither while the training goes on, nor for longer than two seconds at its end."""
    hangs, released = threading.Event(), threading.Event()

    def look():
        hangs.set()
        released.wait()
        return "late"

    looking = BackgroundLook(look, 0.001, "first")
    assert hangs.wait(30.0)
    assert looking.newest == "first"
    began = time.monotonic()
    assert looking.end() == "first"
    assert time.monotonic() - began < 20.0
    released.set()


def test_a_look_that_fails_is_repeated():
    """What was known stays until the next one is better."""
    answers = iter([OSError("stale file handle"), "there"])
    found = threading.Event()

    def look():
        answer = next(answers, "there")
        if isinstance(answer, Exception):
            raise answer
        found.set()
        return answer

    looking = BackgroundLook(look, 0.001, "first")
    assert found.wait(30.0)
    assert looking.end() == "there"
