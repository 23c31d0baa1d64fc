"""The timeline of a run: its attempts, the stretches of its time, the pins on it, and what happened, in sentences.

All of it follows from the events that a digest has kept and from the account of goodput. Lists are bounded: of what is
too much the newest is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.words import one_line
from resilience_sdk.goodput.ledger import Stretch, shortened
from resilience_sdk.goodput.summary import Summary
from resilience_sdk.report.digest import LossRows, step_of
from resilience_sdk.report.event_words import NewestEvents
from resilience_sdk.report.facts import AttemptTimes, IncidentFacts, Pin, Segment
from resilience_sdk.report.series import attempt_at

MOST_ATTEMPTS = 200
MOST_SEGMENTS = 600
MOST_PINS = 200
MOST_EVENTS = 100
_SAME_STOP_S = 600.0


def beginnings_of(account: Summary) -> list[float]:
    """Return when each attempt began, in the order of time."""
    return [float(one["began_at"]) for one in account.attempts]


def attempts_of(account: Summary, incidents: Iterable[IncidentFacts]) -> tuple[tuple[AttemptTimes, ...], int]:
    """Return the newest attempts, oldest first, and how many are left out. An incident belongs to the one before it."""
    beginnings = beginnings_of(account)
    ids: dict[int, list[str]] = {}
    for incident in incidents:
        if incident.at is not None and beginnings:
            ids.setdefault(attempt_at(beginnings, incident.at), []).append(incident.id)
    shown = list(enumerate(account.attempts))[-MOST_ATTEMPTS:]
    found = tuple(
        AttemptTimes(
            job=one_line(one["job"]),
            attempt=one["attempt"],
            began_at=one["began_at"],
            ended_at=one["ended_at"],
            buckets={name: seconds for name, seconds in one["buckets"].items() if seconds > 0},
            first_step=one["first_step"],
            steps=one["steps"],
            lost_steps=one["lost_steps"],
            incidents=tuple(ids.get(place, ())),
        )
        for place, one in shown
    )
    return found, len(account.attempts) - len(shown)


def segments_of(account: Summary) -> tuple[Segment, ...]:
    """Return the run's time in its order; of thousands of stretches the shortest have become part of others."""
    joined: list[Stretch] = []
    for one in account.stretches:
        last = joined[-1] if joined else None
        if last is not None and (last.bucket, last.account, last.ended_at) == (one.bucket, one.account, one.began_at):
            joined[-1] = attrs.evolve(last, ended_at=one.ended_at)
        else:
            joined.append(one)
    return tuple(
        Segment(one.bucket.value, one.began_at, one.ended_at, one.account) for one in shortened(joined, MOST_SEGMENTS)
    )


def pins_of(incidents: Sequence[IncidentFacts], events: Iterable[Mapping[str, Any]]) -> tuple[Pin, ...]:
    """Return what is marked on every picture with a time axis, in the order of time."""
    pins = [Pin(one.id, one.at, one.kind, one.headline, _step_number(one)) for one in incidents if one.at is not None]
    asked = [pin.at for pin in pins if pin.kind == "preemption"]
    told_at = float("-inf")
    for event in events:
        at = float(event["t"])
        if event["event"] != Event.STOP_AGREED.value or at - told_at < _SAME_STOP_S:
            continue
        told_at = at  # each rank tells of it
        if not any(abs(at - one) < _SAME_STOP_S for one in asked):
            step = step_of(event)
            label = "all ranks agreed to stop" + (f" at step {step}" if step >= 0 else "")
            pins.append(Pin(f"stop-{at:.0f}", at, "preemption", label, step if step >= 0 else None))
    return tuple(sorted(pins, key=lambda pin: pin.at)[-MOST_PINS:])


def _step_number(incident: IncidentFacts) -> int | None:
    """Return the step of the first culprit, where it counts over attempts."""
    words = (incident.culprits[0][2] or "") if incident.culprits else ""
    number_of_step = words.removeprefix("step ")
    return int(number_of_step) if number_of_step.isdecimal() and len(number_of_step) < 19 else None


def note_bad_numbers(losses: LossRows, events: Iterable[Mapping[str, Any]]) -> None:
    """Add to the losses what was no number: told at once, while `loss` events come at a pace of their own."""
    for event in events:
        name, found = event.get("what"), event.get("found")
        if event["event"] == Event.NUMERICS.value and name in ("loss", "grad_norm") and found in ("nan", "inf"):
            losses.note(name, event, str(found))


def events_of(events: Iterable[Mapping[str, Any]]) -> tuple[tuple[float, str, str], ...]:
    """Return the newest events that a person cares about, each with a sentence, in the order of time."""
    newest = NewestEvents(MOST_EVENTS)
    newest.add(events)
    return newest.all()
