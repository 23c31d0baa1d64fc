"""A session on every rank, or on none: what follows from one is collective."""

from __future__ import annotations

from collections.abc import Callable

from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready, raise_together
from resilience_sdk.console import say_once
from resilience_sdk.session.rank_session import Session


def session_on_all_ranks(begin: Callable[[], Session | None]) -> Session | None:
    """Return what `begin()` gives if every rank has a session: what follows is collective, and so is this.

    None on all ranks where one cannot be recorded, which is said. Raises on all ranks what `begin` raises on one.
    """
    if not group_is_ready():
        return begin()
    ranks = find_ranks()
    session = raise_together(ranks, begin)
    if all(ranks.gather(session is not None)):
        return session
    if session is not None and session.identity.rank == 0:
        say_once(
            "ranks",
            "a rank cannot be recorded, for the reason above: this training is not watched as a whole, and NOTHING IS "
            "SAVED or resumed in it",
        )
    return None
