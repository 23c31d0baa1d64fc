"""The limits of a resume: what it will not make exact, said at the start of a training and, as of now, at a resume.

An adapter calls `note` as soon as it knows; rank 0 of the job says it on the screen and journals it. Whoever looks at
the run later reads it from the journal with `read_limits`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from resilience_sdk.core import environ
from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event


@attrs.frozen
class ResumeLimit:
    """Something that a resume will not repeat: `thing` is a noun, `means` a clause, `cure` what to do about it."""

    key: str
    thing: str
    means: str
    cure: str

    @property
    def is_conditional(self) -> bool:
        """Whether the resume may be exact all the same, as `means` says: of what nobody can see."""
        return "the resume is exact" in self.means

    def words(self, *, at_resume: bool = False) -> str:
        """Return the line that says it, as of the training's start or as of a resume that was just made."""
        which = "this resume does not" if at_resume else "a resume will not"
        return f"{which} repeat {self.thing}: {self.means}; {self.cure}"


@attrs.define
class _Noted:
    limits: dict[str, ResumeLimit] = attrs.field(factory=dict)
    is_resumed: bool = False
    emit: Callable[..., None] | None = None
    rank: Callable[[], int] | None = None
    unwritten: list[tuple[ResumeLimit, bool]] = attrs.field(factory=list)
    """What was said before there was a journal, and whether at a resume."""
    lock: threading.RLock = attrs.field(factory=threading.RLock)


_noted = _Noted()


def note(key: str, thing: str, means: str, cure: str) -> None:
    """Say once that a resume will not repeat `thing`; behind a resume, that this one does not. Any rank; never raises.

    Call it on all ranks alike: rank 0 says it. `key` names the limit, so that it is said once however often it is met.

    Example:
        note("sampler", "the order of sampler Shuffled", "samples of this epoch come twice or not at all",
             "give it to attach() as data=")
    """
    with _noted.lock:
        if key not in _noted.limits:
            _noted.limits[key] = ResumeLimit(key, thing, means, cure)
            _tell(_noted.limits[key])


def lift(key: str) -> None:
    """Take back what was noted for every resume, since the one that is being made repeats it. Before `resumed`."""
    with _noted.lock:
        if not _noted.is_resumed:
            _noted.limits.pop(key, None)


def resumed() -> None:
    """Note that this process goes on from a checkpoint: what was noted is said again as of now. May be repeated."""
    with _noted.lock:
        if not _noted.is_resumed:
            _noted.is_resumed = True
            for limit in _noted.limits.values():
                _tell(limit)


def limits() -> tuple[ResumeLimit, ...]:
    """Return what was noted in this process, in order."""
    return tuple(_noted.limits.values())


def record_in(emit: Callable[..., None], rank: Callable[[], int]) -> None:
    """Have it journalled by `emit(event, **fields)` from now on, on rank 0; also what was said before."""
    with _noted.lock:
        _noted.emit, _noted.rank = emit, rank
        unwritten, _noted.unwritten = _noted.unwritten, []
        for limit, at_resume in unwritten:
            _record(limit, at_resume)


def read_limits(events: Iterable[Mapping[str, Any]]) -> tuple[ResumeLimit, ...]:
    """Return what the events of a journal say of it, each limit once, in order."""
    found: dict[str, ResumeLimit] = {}
    for event in events:
        parts = [event.get(name) for name in ("limit", "thing", "means", "cure")]
        if event.get("event") == Event.RESUME_LIMIT.value and all(isinstance(part, str) for part in parts):
            found.setdefault(str(parts[0]), ResumeLimit(*map(str, parts)))
    return tuple(found.values())


def _tell(limit: ResumeLimit) -> None:
    at_resume = _noted.is_resumed
    if _is_first() and say_once(f"resume limit:{at_resume}:{limit.key}", limit.words(at_resume=at_resume)):
        _record(limit, at_resume)


def _record(limit: ResumeLimit, at_resume: bool) -> None:
    if _noted.emit is None:
        _noted.unwritten.append((limit, at_resume))
    else:
        # Not as `key`, which a journal takes for a secret.
        facts = {"limit": limit.key, "thing": limit.thing, "means": limit.means, "cure": limit.cure}
        _noted.emit(Event.RESUME_LIMIT, **facts, at_resume=at_resume)


def _is_first() -> bool:
    if _noted.rank is not None:
        return _noted.rank() == 0
    found = environ.rank_identity(environ.environment())
    distributed = sys.modules.get("torch.distributed")
    if found is None and distributed is not None and getattr(distributed, "is_initialized", bool)():
        return bool(distributed.get_rank() == 0)
    return found is None or found.rank == 0
