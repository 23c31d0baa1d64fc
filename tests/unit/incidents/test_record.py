"""What a culprit's stack shows: the user's program, not how it was started."""

from __future__ import annotations

from pathlib import Path

import resilience_sdk
from resilience_sdk.incidents import Culprit

PACKAGE = Path(resilience_sdk.__file__).parent
USERS = ("/home/me/model.py:7 forward", "/home/me/train.py:30 main", "/home/me/train.py:40 <module>")
STARTERS = (
    "<frozen runpy>:88 _run_code",
    f"{PACKAGE}/launcher/worker.py:90 _run_file",
    f"{PACKAGE}/launcher/entry.py:20 main",
    "<string>:1 <module>",
)


def test_a_stack_ends_with_the_users_program():
    """Frames that started the script are left out at the outer end, and only there."""
    assert Culprit(0, stack=USERS + STARTERS).stack == USERS
    assert Culprit(0, stack=(*USERS[:2], *STARTERS[:1], USERS[2], *STARTERS)).stack == (
        *USERS[:2],
        STARTERS[0],
        USERS[2],
    )
    inner = (f"{PACKAGE}/checkpoint/payload.py:5 write", *USERS)
    assert Culprit(0, stack=inner).stack == inner


def test_what_is_not_ours_or_all_there_is_stays():
    """A program given with -c is the user's, and a stack of nothing else is better than none."""
    assert Culprit(0, stack=(USERS[0], "<string>:3 <module>")).stack == (USERS[0], "<string>:3 <module>")
    assert Culprit(0, stack=STARTERS[:3]).stack == STARTERS[:3]
