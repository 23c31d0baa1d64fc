"""How ranks ended that somebody else's launcher collects."""

from __future__ import annotations

import os
import signal

from resilience_sdk.monitor.ranks import WatchedRank


def is_clean(watched: WatchedRank) -> bool:
    """Tell whether a dead rank ended well, by its own word and its exit status where that is known."""
    if watched.wait_status is not None:
        return watched.wait_status == 0
    return watched.snapshot.exit_state == "clean"


def exit_code(watched: WatchedRank) -> int | None:
    """Return the exit code of a dead rank, negative for a signal; None where nobody could tell."""
    return None if watched.wait_status is None else os.waitstatus_to_exitcode(watched.wait_status)


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
