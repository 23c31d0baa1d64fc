"""The output of a rank, and its forked children, such as the workers of a DataLoader."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

from resilience_sdk.rank.session import WatchedSession


def test_a_forked_child_leaves_the_journal_of_its_rank_alone(capsys):
    """It may have been forked while another thread held the lock of the journal: its `print` would wait for ever."""
    child_of_a_rank: Any = SimpleNamespace(pid=os.getpid() + 1)  # nothing of the parent is to be touched
    WatchedSession._output_goes_on(cast(WatchedSession, child_of_a_rank), "standard output has no reader any more")
    assert capsys.readouterr().err == ""
