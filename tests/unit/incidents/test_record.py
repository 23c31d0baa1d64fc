"""An incident as a record: what a culprit's stack shows, and what is made of what was read."""

from __future__ import annotations

from pathlib import Path

import resilience_sdk
from resilience_sdk.incidents import Culprit, Evidence, Incident

PACKAGE = Path(resilience_sdk.__file__).parent
USERS = ("/home/me/model.py:7 forward", "/home/me/train.py:30 main", "/home/me/train.py:40 <module>")
STARTERS = (
    "<frozen runpy>:88 _run_code",
    f"{PACKAGE}/launcher/worker.py:90 _run_file",
    f"{PACKAGE}/begin.py:20 main",
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
    inner = (f"{PACKAGE}/checkpoint/commit.py:5 write", *USERS)
    assert Culprit(0, stack=inner).stack == inner


def test_what_is_not_ours_or_all_there_is_stays():
    """A program given with -c is the user's, and a stack of nothing else is better than none."""
    assert Culprit(0, stack=(USERS[0], "<string>:3 <module>")).stack == (USERS[0], "<string>:3 <module>")
    assert Culprit(0, stack=STARTERS[:3]).stack == STARTERS[:3]


def test_what_was_observed_is_kept_where_nobody_says_by_whom():
    """Evidence without a source, or with none that is a text, has an unknown one; without a text it is none."""
    told = [
        {"text": "exit 1"},
        {"source": 7, "text": "died"},
        {"source": "exit"},
        "?",
        {"source": "log", "text": "OOM"},
    ]
    incident = Incident.from_json({"evidence": told})
    assert incident.evidence == (Evidence("unknown", "exit 1"), Evidence("unknown", "died"), Evidence("log", "OOM"))
