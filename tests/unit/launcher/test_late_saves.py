"""Which ranks still save behind their training, by looks at their stacks: those are not ended by `exit_timeout`."""

import pytest

from resilience_sdk.launcher.asking import LastLook, LateSaves

SAVES = """Thread 0x00007f2b8a7fe700 (most recent call first):
  File "/usr/lib/python3.11/json/__init__.py", line 180 in dump
  File "/home/user/train.py", line 40 in save_checkpoint
"""
IDLES = """Thread 0x00007f2b8a7fe700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 300 in wait
  File "/home/user/train.py", line 50 in prefetch
"""


@pytest.fixture
def answers():
    """What one look after the other finds, two seconds apart."""

    def ask(*stacks: str | None, grace_s: float = 5.0) -> list[bool]:
        now, left = [0.0], list(stacks)

        def look(rank: int) -> LastLook:
            text = left.pop(0)
            return LastLook((rank,), {} if text is None else {rank: text}, {})

        saves = LateSaves(look, grace_s, lambda: now[0])
        found = []
        while left:
            found.append(saves.is_saving(3, now[0]))
            now[0] += 2.0
        return found

    return ask


def test_a_save_that_is_over_leaves_the_process_its_time_to_end(answers, capsys):
    """What follows the last piece, a file to be renamed, is no reason to end it at once."""
    assert answers(SAVES, SAVES, IDLES, IDLES, IDLES, IDLES) == [True, True, True, True, False, False]
    assert capsys.readouterr().err.count("rank 3 has finished, and still saves at train.py:40 in save_checkpoint") == 1


def test_a_rank_that_is_seen_to_save_nothing_is_no_such_rank(answers):
    """One look is enough where it was answered."""
    assert answers(IDLES, IDLES) == [False, False]


def test_no_answer_is_no_proof_for_half_a_minute(answers):
    """A machine may be loaded, and a save may let nobody in; one that never answers has no claim for ever."""
    assert answers(None, SAVES, None, None) == [True] * 4
    assert answers(*[None] * 16) == [True] * 14 + [False] * 2
    assert answers(None, IDLES) == [True, False]
