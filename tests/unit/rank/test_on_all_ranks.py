"""What ranks settle together at the begin of a run, as one of two sees it."""

from __future__ import annotations

import pytest

from resilience_sdk.rank import all_ranks
from resilience_sdk.rank.identity import Identity
from resilience_sdk.rank.session import Session


@pytest.fixture
def settled(monkeypatch):
    """Return the session of rank 0 after it has met another one; the two may resume or not."""

    def settled(own, other):
        class Ranks:
            def gather(self, mine):
                return [mine, mine and {**mine, "may_resume": other}]

        monkeypatch.setattr(all_ranks, "group_is_ready", lambda: True)
        monkeypatch.setattr(all_ranks, "find_ranks", Ranks)
        session = Session()
        session.identity = Identity(0, 0, 2, provisional=False)
        session.may_resume = own
        return all_ranks.session_on_all_ranks(lambda: session)

    return settled


@pytest.mark.parametrize(("own", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_all_resume_or_none(settled, capsys, own, other):
    """To resume is collective: who did it alone would wait for the others. It is said where one was to."""
    assert settled(own, other).may_resume is (own and other)
    assert ("NOTHING IS RESUMED" in capsys.readouterr().err) is (own != other)
