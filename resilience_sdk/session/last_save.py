"""The save of a job that was asked to leave: made if it fits into the time that is left, else skipped and said.

And what is said of a training that ended before it was complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from resilience_sdk import environ, preemption
from resilience_sdk.checkpoint.ranks import find_ranks, group_is_ready
from resilience_sdk.console import say
from resilience_sdk.events import Event
from resilience_sdk.incidents import count_words

if TYPE_CHECKING:
    from resilience_sdk.session.base import Session


class _Saves(Protocol):
    def save(self, step: int) -> bool: ...


def save_at_stop(checkpointer: _Saves, step: int, session: Session | None) -> bool:
    """Save after `step` steps and tell whether that worked. Collective: rank 0 decides for all whether it fits."""
    return fits(checkpointer, step, session) and checkpointer.save(step)


def fits(checkpointer: object, step: int, session: Session | None) -> bool:
    """Tell whether a save after `step` steps fits into the time that is left; if not, say so. Collective."""
    wait = getattr(checkpointer, "wait", None)
    # The save would wait for one in the background, without an end.
    is_free = wait is None or wait(preemption.time_left())
    expected_s = float(getattr(checkpointer, "expected_save_s", 0.0) or 0.0)
    left_s = preemption.time_left()
    is_time = is_free and (left_s is None or expected_s <= left_s)
    if group_is_ready():
        is_time = bool(find_ranks().broadcast(is_time))
    if is_time:
        return True
    if session is not None:
        session.journal.emit(Event.CKPT_SKIP, step=step, why="no time", time_left_s=left_s, expected_s=expected_s)
        if session.identity.rank == 0:
            say(f"no last save: it takes about {expected_s:.1f} s, {left_s or 0.0:.1f} s are left")
    return False


def say_how_to_resume(session: Session, good_step: int | None, how: str = "stopped") -> None:
    """Say what is kept, where no launcher of ours does: a stopped run must not look like a lost one. On rank 0."""
    if good_step is None or session.identity.rank != 0 or environ.INTERNAL_JOB in environ.environment():
        return
    kept = f"the newest checkpoint is after {count_words(good_step)}"
    say(f"{how}; {kept}; to resume: {environ.RUN_DIR}={session.run_dir.path} and the same command")
