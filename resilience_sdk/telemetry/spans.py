"""Spans as a pure function of the journal's events: run > attempt > incident > recovery, and checkpoints.

A span is told when it has ended. Its ids follow from what it is, so that one that is sent again (a restarted exporter,
an answer that was lost) is the same span. A run ends with the next one or with the exporter: no event says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from resilience_sdk.core.events import Event
from resilience_sdk.errors import EXIT_PREEMPTED
from resilience_sdk.telemetry.metrics import clean_text, clean_time

Attributes = Mapping[str, str | int | float]
_MOST_OPEN = 1000
_MOST_CHARACTERS = 500
_NEVER_ENDED = {"recovery": "not recovered", "checkpoint": "cut off"}
_NO_FAULT = ("preemption", "interrupt", "membership")  # of what ends an attempt


@attrs.frozen
class Span:
    """One that has ended. Times are Unix seconds."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    start: float
    end: float
    attributes: Attributes
    error: str | None = None
    """What went wrong; None where nothing did."""


@attrs.define
class _Open:
    name: str
    key: str
    parent: str | None
    start: float
    attributes: dict[str, str | int | float]


class Spans:
    """The spans that are open after some events."""

    def __init__(self, run: str) -> None:
        """`run` names the run directory: two runs have different traces."""
        self._run = run
        self._trace = ""
        self._open: dict[str, _Open] = {}
        self._has_launcher = False
        self._trouble_at: float | None = None
        self._last_at = 0.0

    def apply(self, event: Mapping[str, Any]) -> list[Span]:
        """Take one event; return the spans that have ended by it."""
        ended: list[Span] = []
        at = clean_time(float(event["t"]))
        rule = _RULES.get(str(event["event"]))
        if not self._trace and event["event"] != Event.RUN_START.value:
            ended += self._begin_run(event, at)
        if rule is not None:
            ended += rule(self, event, at)
        self._last_at = max(self._last_at, at)
        return ended

    def close(self) -> list[Span]:
        """Return what is still open, ended by the newest event: the job is over."""
        return [
            self._end(key, self._last_at, error=_NEVER_ENDED.get(self._open[key].name))
            for key in reversed(list(self._open))
        ]

    # -- rules

    def _begin_run(self, event: Mapping[str, Any], at: float) -> list[Span]:
        ended = self.close()
        self._trace = f"{self._run} {event.get('job')} {at:.6f}"
        self._trouble_at = None
        self._has_launcher = event["event"] == Event.RUN_START.value
        self._begin("run", "run", None, at, {"resilience.run": self._run, "resilience.job": str(event.get("job"))})
        return ended

    def _begin_attempt(self, event: Mapping[str, Any], at: float) -> list[Span]:
        ended = [self._end(key, self._last_at) for key in list(self._open) if key.startswith(("attempt", "save"))]
        self._trouble_at = None
        known: dict[str, str | int | float] = {"resilience.attempt": _number(event)}
        if isinstance(size := event.get("world_size"), int) and abs(size) < 1 << 63:
            known["resilience.world_size"] = size
        self._begin("attempt", _attempt(event), "run", at, known)
        return ended

    def _rank_began(self, event: Mapping[str, Any], at: float) -> list[Span]:
        """Under a foreign launcher the first rank of an attempt tells that it began."""
        is_known = self._has_launcher or _attempt(event) in self._open
        return [] if is_known else self._begin_attempt(event, at)

    def _end_attempt(self, event: Mapping[str, Any], at: float) -> list[Span]:
        key = _attempt(event)
        ended_by, codes = str(event.get("ended_by")), event.get("exit_codes")
        went_well = isinstance(codes, Mapping) and all(code in (0, EXIT_PREEMPTED) for code in codes.values())
        error = None if went_well or ended_by in _NO_FAULT else ended_by
        saves = [self._end(save, at, error="cut off") for save in list(self._open) if save.startswith("save")]
        return [*saves, *([self._end(key, at, error=error, ended_by=ended_by)] if key in self._open else [])]

    def _note_trouble(self, event: Mapping[str, Any], at: float) -> list[Span]:
        if event["event"] != Event.RANK_EXIT.value or event.get("exit_code") != 0:
            self._trouble_at = at if self._trouble_at is None else self._trouble_at
        return []

    def _incident(self, event: Mapping[str, Any], at: float) -> list[Span]:
        name = f"incident {event.get('id')}"
        words = {f"resilience.{key}": str(event.get(key)) for key in ("id", "kind", "category", "cause", "action")}
        self._begin("incident", name, _attempt(event), self._trouble_at or at, {**words})
        self._begin("recovery", f"recovery {event.get('id')}", name, at, {"resilience.id": str(event.get("id"))})
        return [self._end(name, at, error=str(event.get("cause")))]

    def _recovered(self, event: Mapping[str, Any], at: float) -> list[Span]:
        key = f"recovery {event.get('id')}"
        return [self._end(key, at)] if key in self._open else []

    def _begin_save(self, event: Mapping[str, Any], at: float) -> list[Span]:
        self._begin("checkpoint", _save(event), _attempt(event), at, {"resilience.step": str(event.get("step"))})
        return []

    def _end_save(self, event: Mapping[str, Any], at: float) -> list[Span]:
        key = _save(event)
        seconds = event.get("seconds")
        if key not in self._open and isinstance(seconds, float) and 0 <= seconds < at:
            self._begin_save(event, at - seconds)
        error = str(event.get("error")) if event["event"] == Event.CKPT_FAIL.value else None
        return [self._end(key, at, error=error)] if key in self._open else []

    # -- open and ended

    def _begin(
        self, name: str, key: str, parent: str | None, start: float, known: dict[str, str | int | float]
    ) -> None:
        while len(self._open) >= _MOST_OPEN:  # what nobody ends is forgotten, the oldest first
            del self._open[next(old for old in self._open if not old.startswith(("run", "attempt")))]
        self._open[key] = _Open(name, key, parent, start, known)

    def _end(self, key: str, at: float, *, error: str | None = None, **words: str) -> Span:
        span = self._open.pop(key)
        attributes = {**span.attributes, **{f"resilience.{name}": text for name, text in words.items()}}
        return Span(
            name=span.name,
            trace_id=_digest(self._trace, 16),
            span_id=self._id(span.key, span.start),
            parent_id=None if span.parent is None else self._id(span.parent),
            start=span.start,
            end=max(at, span.start),
            attributes={
                key: clean_text(value, _MOST_CHARACTERS) if isinstance(value, str) else value
                for key, value in attributes.items()
            },
            error=None if error is None else clean_text(error, _MOST_CHARACTERS),
        )

    def _id(self, key: str, start: float | None = None) -> int:
        """Return the id of a span: of one that may come again (a save of one step) with its beginning."""
        return _digest(f"{self._trace} {key} {start if key.startswith('save') else ''}", 8)


_Rule = Callable[[Spans, Mapping[str, Any], float], list[Span]]
_RULES: Mapping[str, _Rule] = {
    Event.RUN_START.value: Spans._begin_run,
    Event.ATTEMPT_START.value: Spans._begin_attempt,
    Event.RANK_START.value: Spans._rank_began,
    Event.ATTEMPT_END.value: Spans._end_attempt,
    Event.SUSPECT.value: Spans._note_trouble,
    Event.CONFIRMED.value: Spans._note_trouble,
    Event.RANK_EXIT.value: Spans._note_trouble,
    Event.INCIDENT.value: Spans._incident,
    Event.RECOVERED.value: Spans._recovered,
    Event.CKPT_BEGIN.value: Spans._begin_save,
    Event.CKPT_COMMIT.value: Spans._end_save,
    Event.CKPT_FAIL.value: Spans._end_save,
}


def _number(event: Mapping[str, Any]) -> int:
    number = event.get("attempt")
    return number if isinstance(number, int) and abs(number) < 1 << 63 else 0


def _attempt(event: Mapping[str, Any]) -> str:
    return f"attempt {_number(event)}"


def _save(event: Mapping[str, Any]) -> str:
    return f"save {event.get('step')} {event.get('rank')}"


def _digest(text: str, size: int) -> int:
    """Return a number of `size` bytes that is not 0, which OpenTelemetry takes for no id."""
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:size], "big") or 1
