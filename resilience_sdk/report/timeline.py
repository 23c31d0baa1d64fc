"""The timeline of a run: its attempts, the stretches of its time, the pins on it, and what happened, in sentences.

All of it follows from the events that a digest has kept and from the account of goodput. Lists are bounded: of what is
too much the newest is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resilience_sdk.core.journal import Event
from resilience_sdk.core.words import one_line
from resilience_sdk.goodput.buckets import Bucket
from resilience_sdk.goodput.ledger import Stretch
from resilience_sdk.goodput.summary import Summary
from resilience_sdk.report.digest import LossRows, step_of
from resilience_sdk.report.event_words import NewestEvents
from resilience_sdk.report.facts import AttemptTimes, IncidentFacts, Pin, Segment, StandstillFacts
from resilience_sdk.report.series import attempt_at
from resilience_sdk.report.standstills import as_sentence, job_numbers, standstills_of, words_of

MOST_ATTEMPTS = 200
MOST_SEGMENTS = 600
MOST_PINS = 200
MOST_STANDSTILLS = 50
MOST_EVENTS = 100
_SAME_STOP_S = 600.0
_SAME_S = 1e-3  # sums of the same times, as the clocks of a long run are added up


def beginnings_of(account: Summary) -> list[float]:
    """Return when each attempt began, in the order of time."""
    return [float(one["began_at"]) for one in account.attempts]


def attempts_of(
    account: Summary, segments: Iterable[Segment], incidents: Iterable[IncidentFacts]
) -> tuple[tuple[AttemptTimes, ...], int]:
    """Return the newest attempts, oldest first, and how many are left out. An incident belongs to the one before it."""
    beginnings = beginnings_of(account)
    ids: dict[int, list[str]] = {}
    for incident in incidents:
        if incident.at is not None and beginnings:
            ids.setdefault(attempt_at(beginnings, incident.at), []).append(incident.id)
    order: dict[int | None, dict[str, None]] = {}
    for segment in segments:
        order.setdefault(segment.attempt, {}).update(dict.fromkeys(segment.parts))
    numbers = job_numbers(account)
    shown = list(enumerate(account.attempts))[-MOST_ATTEMPTS:]
    found = tuple(
        AttemptTimes(
            job=one_line(one["job"]),
            attempt=one["attempt"],
            began_at=one["began_at"],
            ended_at=one["ended_at"],
            buckets={
                name: seconds
                for name in dict.fromkeys([*order.get(place, ()), *one["buckets"]])
                if (seconds := one["buckets"].get(name, 0.0)) > 0
            },
            first_step=one["first_step"],
            steps=one["steps"],
            lost_steps=one["lost_steps"],
            incidents=tuple(ids.get(place, ())),
            job_number=numbers[place],
            completed=one["completed"],
        )
        for place, one in shown
    )
    return found, len(account.attempts) - len(shown)


def segments_of(account: Summary) -> tuple[Segment, ...]:
    """Return the run's time in its order, with the seconds of the account: each bucket comes to the same sum.

    The ledger has an attempt's training as one stretch, since nobody has told when its steps waited for data. What the
    account knows of it is spread over all of it. Of thousands of segments the shortest become parts of others.
    """
    lasting = [one for one in account.stretches if one.seconds > 0]
    groups: dict[int | None, list[Stretch]] = {}
    for one in lasting:
        groups.setdefault(one.account, []).append(one)
    idle = {Bucket.IDLE.value: account.buckets[Bucket.IDLE]}
    spent = {place: idle if place is None else account.attempts[place]["buckets"] for place in groups}
    if any(abs(_seconds(groups[place]) - sum(spent[place].values())) > _SAME_S for place in groups):
        # Of a very long run the ledger has joined stretches of different attempts: the sums hold over all of them.
        groups = {None: lasting}
        spent = {None: {bucket.value: seconds for bucket, seconds in account.buckets.items()}}
    found = [segment for place, stretches in groups.items() for segment in _spread(stretches, spent[place])]
    joined: list[Segment] = []
    for segment in sorted(found, key=lambda one: one.began_at):
        last = joined[-1] if joined else None
        here = segment.bucket, segment.attempt, segment.began_at
        is_next = last is not None and (last.bucket, last.attempt, last.ended_at) == here
        joined.append(_joined(joined.pop(), segment) if is_next else segment)
    return tuple(_fewer(joined, MOST_SEGMENTS))


def _seconds(stretches: Iterable[Stretch]) -> float:
    return sum(one.seconds for one in stretches)


def _spread(stretches: Sequence[Stretch], spent: Mapping[str, float]) -> Iterable[Segment]:
    """Yield a segment for each stretch, so that the parts of all add up to the seconds of each bucket in `spent`.

    A stretch is its own bucket, but for training: that is what the other stretches have left of each bucket.
    """
    told: dict[str, float] = {}
    for one in stretches:
        if one.bucket is not Bucket.PRODUCTIVE:
            told[one.bucket.value] = told.get(one.bucket.value, 0.0) + one.seconds
    own = {name: min(1.0, spent.get(name, 0.0) / seconds) for name, seconds in told.items()}
    left = {name: seconds - told.get(name, 0.0) * own.get(name, 0.0) for name, seconds in spent.items()}
    left = {name: seconds for name, seconds in left.items() if seconds > _SAME_S}
    left_s = sum(left.values())
    for one in stretches:
        name = one.bucket.value
        own_s = one.seconds * (own.get(name, 0.0) if left else 1.0)
        parts = {name: own_s} if own_s > 0 else {}
        for other, seconds in left.items() if own_s < one.seconds else ():
            parts[other] = parts.get(other, 0.0) + (one.seconds - own_s) * seconds / left_s
        yield Segment(_most_of(parts), one.began_at, one.ended_at, one.account, parts)


def _most_of(parts: Mapping[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def _joined(first: Segment, second: Segment) -> Segment:
    """Return two segments that follow one another as one."""
    names = dict.fromkeys([*first.parts, *second.parts])
    parts = {name: first.parts.get(name, 0.0) + second.parts.get(name, 0.0) for name in names}
    longer = max(first, second, key=lambda one: one.ended_at - one.began_at)
    return Segment(_most_of(parts), first.began_at, second.ended_at, longer.attempt, parts)


def _fewer(segments: Sequence[Segment], most: int) -> list[Segment]:
    """Return so many segments at most: the shortest have become parts of those before them."""
    too_many = len(segments) - most
    if too_many <= 0:
        return list(segments)
    limit_s = sorted(one.ended_at - one.began_at for one in segments)[too_many]
    kept = [segments[0]]
    for one in segments[1:]:
        before = kept[-1]
        shortest = min(one.ended_at - one.began_at, before.ended_at - before.began_at)
        if too_many > 0 and shortest <= limit_s:
            too_many -= 1
            kept[-1] = _joined(before, one)
        else:
            kept.append(one)
    return kept


def standstill_cards(account: Summary | None) -> tuple[StandstillFacts, ...]:
    """Return the standstills that matter, of many the longest, in the order of time."""
    told = [
        StandstillFacts(
            id=f"stood-{one.began_at:.0f}-{one.rank}",
            at=one.began_at,
            seconds=one.seconds,
            text=as_sentence(words_of(one, attempt)),
            attempt=attempt,
            job_number=of_job.job_number,
        )
        for of_job in (standstills_of(account) if account is not None else ())
        for one, attempt in zip(of_job.found, of_job.attempts, strict=True)
    ]
    longest = sorted(told, key=lambda one: -one.seconds)[:MOST_STANDSTILLS]
    return tuple(sorted(longest, key=lambda one: one.at))


def pins_of(
    incidents: Sequence[IncidentFacts],
    events: Iterable[Mapping[str, Any]],
    standstills: Sequence[StandstillFacts] = (),
) -> tuple[Pin, ...]:
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
    pins = sorted(pins, key=lambda pin: pin.at)[-MOST_PINS:]
    pins += [Pin(one.id, one.at, "hang", one.text) for one in standstills]
    return tuple(sorted(pins, key=lambda pin: pin.at))


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
