"""All ranks together: a session on every rank or on none, one way to stop, and the clean end of a training."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready, raise_together
from resilience_sdk.core import environ
from resilience_sdk.core.console import say, say_once
from resilience_sdk.core.journal import Event
from resilience_sdk.errors import ResilienceError
from resilience_sdk.preemption import listener as preemption
from resilience_sdk.rank import preemption as stopping
from resilience_sdk.rank.lifecycle import effective_settings, lacks_page
from resilience_sdk.rank.session import Session


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


_finished_here: weakref.WeakSet[Session] = weakref.WeakSet()


def finish(session: Session | None, step: int, *, is_complete: bool = True) -> bool:
    """Set the finished flag if all ranks have come to a clean end; tell whether this rank has set it. Collective.

    A rank that is not complete, or has no session, says so here to the others, which would wait for it otherwise. Under
    our launcher nothing is done: it sees every exit code, and sets the flag.
    """
    if environ.INTERNAL_JOB in environ.environment():
        return False
    if not _all_ranks_end(is_complete and session is not None) or session is None:
        return False
    try:
        session.run_dir.mark_finished()
    except ResilienceError as failure:
        say(str(failure))
        return False
    session.journal.emit(Event.FINISHED, step=step)
    _finished_here.add(session)
    return True


def reopen(session: Session) -> None:
    """Take back the flag, if `finish` has set it in this process: it trains on. Never raises."""
    if session not in _finished_here:
        return
    _finished_here.discard(session)
    flags = [session.run_dir.finished]
    if named := environ.environment().get(environ.FINISHED_FLAG_FILE):
        flags.append(Path(named))
    for flag in flags:
        with contextlib.suppress(OSError):
            flag.unlink()


def _all_ranks_end(is_clean: bool) -> bool:
    """Tell rank 0 whether all ranks have come to a clean end, as far as they can tell one another."""
    if not has_peers():
        return is_clean
    if not group_is_ready():
        return False
    try:
        ranks = find_ranks()
        ends = ranks.gather("clean" if is_clean else "not clean")
    except Exception:  # noqa: BLE001 - a peer that failed is the very thing that is asked about here
        return False
    return ranks.rank == 0 and all(end == "clean" for end in ends)


def has_peers() -> bool:
    """Tell whether this job has other ranks, by its process group or else its variables."""
    if group_is_ready():
        import torch.distributed as dist

        return bool(dist.get_world_size() > 1)
    identity = environ.rank_identity(environ.environment())
    return identity is not None and identity.world_size > 1
