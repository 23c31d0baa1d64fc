"""The clean end of a training: the finished flag, where no launcher of ours sets it."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path

from resilience_sdk import environ
from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready
from resilience_sdk.console import say
from resilience_sdk.errors import ResilienceError
from resilience_sdk.events import Event
from resilience_sdk.session.base import Session

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
