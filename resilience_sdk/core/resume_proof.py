"""The proof of a resume: what was compared, with which result, and what a reader of the journal makes of it. Pure.

A check is journalled as `resume_check`; one that has found a difference as `resume_not_exact`. Nothing else follows
from it: no incident, exit code, restart or stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.resume_limits import read_limits

EXACT = "exact"
NOT_EXACT = "resume_not_exact"
NOT_PROVEN = "not_proven"
"""What was compared is equal, but for what may differ by itself."""
NOT_COMPARED = "not_compared"

STATE, ORDER, STEPS = "state", "order", "steps"
"""What is compared: the state right after the restore, what is read again of an epoch, steps that are done twice."""
_MAX_NAMED = 3
_LEADS = {EXACT: "resume exact", NOT_PROVEN: "resume not proven exact", NOT_EXACT: NOT_EXACT}
UNLEARNED = "losses and weights not compared"
"""What the text of equal steps says of which nobody has seen what they made of their samples."""
_EVENTS = {Event.RESUME_CHECK.value: (EXACT, NOT_PROVEN, NOT_COMPARED), Event.RESUME_NOT_EXACT.value: (NOT_EXACT,)}


@attrs.frozen
class ResumeCheck:
    """One comparison. `component` differs first, at `step` where that is known, on `rank`; `cure`: what to do."""

    what: str
    result: str
    text: str
    component: str | None = None
    step: int | None = None
    rank: int | None = None
    cure: str | None = None

    @property
    def event(self) -> Event:
        """The event that it is journalled as."""
        return Event.RESUME_NOT_EXACT if self.result == NOT_EXACT else Event.RESUME_CHECK

    @property
    def line(self) -> str:
        """The line that says it on the screen."""
        if self.result == NOT_COMPARED:
            return f"the resume was not compared: {self.text}"
        is_of_one = self.result == NOT_EXACT and self.what != STATE and self.rank  # that of the state names it
        where = f"rank {self.rank}: " if is_of_one else ""
        cure = f"; {self.cure}" if self.cure else ""
        lead = _LEADS[self.result]
        if self.result == EXACT and UNLEARNED in self.text:
            lead = "resume exact as far as compared"
        return f"{lead}: {where}{self.text}{cure}"

    def facts(self) -> dict[str, Any]:
        """Return the fields of its event beside the step."""
        return {"what": self.what, "result": self.result, "text": self.text, "component": self.component,
                "on_rank": self.rank, "cure": self.cure}  # fmt: skip

    @classmethod
    def from_event(cls, event: Mapping[str, Any]) -> ResumeCheck | None:
        """Return the check of an event; None for any other, and for what another version has written differently."""
        results = _EVENTS.get(str(event.get("event")), ())
        what, result, words = event.get("what"), event.get("result"), event.get("text")
        if result not in results or not isinstance(what, str) or not isinstance(words, str):
            return None
        return cls(
            what,
            str(result),
            words,
            component=_text(event.get("component")),
            step=_count(event.get("step")),
            rank=_count(event.get("on_rank")),
            cure=_text(event.get("cure")),
        )


def not_all(check: ResumeCheck, things: Sequence[str]) -> ResumeCheck:
    """Return what an exact result comes to where the resume has said that it does not repeat these things. Pure."""
    if check.result != EXACT or not things:
        return check
    rest = len(things) - _MAX_NAMED
    listed = "; ".join(things[:_MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
    return attrs.evolve(check, result=NOT_PROVEN, text=f"{check.text}; this resume does not repeat {listed}")


def proof_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what is known of the newest resume, for `resume` in what programs read; None where there was none.

    `events` are those of a journal in the order of time.
    """
    events = tuple(events)
    begun: Mapping[str, Any] | None = None
    checks: list[ResumeCheck] = []
    attempt: Any = None
    said: dict[Any, list[Mapping[str, Any]]] = {}
    for event in events:
        of = event.get("job"), event.get("attempt")
        if event.get("event") == Event.RESUME_LIMIT.value and event.get("at_resume") is True:
            said.setdefault(of, []).append(event)
        if event.get("event") == Event.RESUME.value:
            begun, checks, attempt = event, [], of
        elif (check := ResumeCheck.from_event(event)) is not None:
            if of != attempt:  # of a resume by somebody else's checkpoint
                begun, checks, attempt = None, [], of
            checks.append(check)
    if begun is None and not checks:
        return None
    decides = _deciding(checks)
    if decides is not None and decides.what != STEPS:  # that of the steps knows of it, and of their losses
        decides = not_all(decides, [limit.thing for limit in read_limits(said.get(attempt, ()))])
    return {
        "at": None if begun is None else begun.get("t"),
        "step": None if begun is None else _count(begun.get("step")),
        "checkpoint": None if begun is None else _text(begun.get("checkpoint")),
        "result": None if decides is None else decides.result,
        "text": None if decides is None else decides.line,
        "component": None if decides is None else decides.component,
        "differs_at": decides.step if decides is not None and decides.result == NOT_EXACT else None,
        "checks": [attrs.asdict(check) for check in checks],
        "limits": [attrs.asdict(limit) for limit in read_limits(events)],
    }


_ORDER = (STEPS, ORDER, STATE)
"""Which check says most about a resume that is exact: the last one that it has passed."""


def _deciding(checks: Iterable[ResumeCheck]) -> ResumeCheck | None:
    """Return the check that stands for all: the difference that comes first, else the best proof that there is none."""
    checks = list(checks)
    found = [check for check in checks if check.result == NOT_EXACT]
    if found:  # what was not restored explains what differs later
        return min(found, key=lambda check: (-_rank_of(check), check.step or 0))
    for result in (NOT_PROVEN, EXACT, NOT_COMPARED):
        passed = [check for check in checks if check.result == result]
        if passed:
            return min(passed, key=_rank_of)
    return None


def _rank_of(check: ResumeCheck) -> int:
    return _ORDER.index(check.what) if check.what in _ORDER else len(_ORDER)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
