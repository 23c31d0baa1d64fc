"""A session on every rank, or on none, and one way to agree on a stop: what follows from them is collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resilience_sdk import environ
from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready, raise_together
from resilience_sdk.console import say_once
from resilience_sdk.preemption import rank as preemption
from resilience_sdk.session import stopping
from resilience_sdk.session.base import Session
from resilience_sdk.session.lifecycle import effective_settings, lacks_page


def session_on_all_ranks(begin: Callable[[], Session | None]) -> Session | None:
    """Return what `begin()` gives if every rank has a session: what follows is collective, and so is this.

    None on all ranks where one cannot be recorded, which is said. Where the ranks have no monitor in common, they agree
    on a stop by themselves from here on. All may resume, or none. Raises on all ranks what `begin` raises on one.
    """
    if not group_is_ready():
        return begin()
    ranks = find_ranks()
    session = raise_together(ranks, begin)
    told = ranks.gather(
        {
            "is_recorded": session is not None,
            "is_heard": lacks_page() or preemption.is_heard(),
            "pages": None if session is None else session.pages_key,
            "may_resume": session is not None and session.may_resume,
        }
    )
    if not have_one_monitor(told, ours=environ.INTERNAL_JOB in environ.environment()):
        _leave_stop_to_ranks([rank for rank, one in enumerate(told) if not one["is_heard"]])
    if session is not None and all(one["is_recorded"] for one in told):
        _resume_together(session, [one["may_resume"] for one in told])
        return session
    if session is not None and session.identity.rank == 0:
        say_once(
            "ranks",
            "a rank cannot be recorded, for the reason above: this training is not watched as a whole, and NOTHING IS "
            "SAVED or resumed in it",
        )
    return None


def have_one_monitor(told: Sequence[dict[str, Any]], *, ours: bool) -> bool:
    """Tell whether monitors see all ranks, by what these have told: one, or several that our launcher connects. Pure.

    A rank without a page is seen by none.
    """
    pages = {one["pages"] for one in told}
    return None not in pages and (ours or len(pages) == 1)


def _resume_together(session: Session, may: Sequence[bool]) -> None:
    """Let this rank resume only where all may: who does it waits for the others."""
    session.may_resume = all(may)
    if any(may) and not all(may) and session.identity.rank == 0:
        say_once(
            "resume",
            f"NOTHING IS RESUMED: the run directory has no name on rank {may.index(False)}, and one on others; name it "
            f"for all of them with {environ.RUN_DIR}",
        )


def _leave_stop_to_ranks(deaf: Sequence[int]) -> None:
    if not preemption.is_heard() and lacks_page():
        env = environ.environment()
        stopping.listen_without_page(effective_settings(env), env, is_agreed=True)
    preemption.leave_to_ranks(deaf)
