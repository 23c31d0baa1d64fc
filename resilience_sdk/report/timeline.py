"""The timeline of a run: its attempts, the stretches of its time, the pins on it, and what happened, in sentences.

All of it follows from the events that a digest has kept and from the account of goodput. Lists are bounded: of what is
too much the newest is shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from resilience_sdk.core.journal import Event
from resilience_sdk.core.words import one_line
from resilience_sdk.goodput.ledger import Stretch, shortened
from resilience_sdk.goodput.summary import Summary
from resilience_sdk.incidents import compact_ranks, count_words
from resilience_sdk.report.digest import LossRows, number, step_of
from resilience_sdk.report.facts import AttemptFacts, IncidentFacts, Pin, Segment
from resilience_sdk.report.series import attempt_at

MOST_ATTEMPTS = 200
MOST_SEGMENTS = 600
MOST_PINS = 200
MOST_EVENTS = 100
_MOST_ALIKE = 32  # events, among which one that says the same is left out: each node tells of what concerns all
_SAME_STOP_S = 600.0


def beginnings_of(account: Summary) -> list[float]:
    """Return when each attempt began, in the order of time."""
    return [float(one["began_at"]) for one in account.attempts]


def attempts_of(account: Summary, incidents: Iterable[IncidentFacts]) -> tuple[tuple[AttemptFacts, ...], int]:
    """Return the newest attempts, oldest first, and how many are left out. An incident belongs to the one before it."""
    beginnings = beginnings_of(account)
    ids: dict[int, list[str]] = {}
    for incident in incidents:
        if incident.at is not None and beginnings:
            ids.setdefault(attempt_at(beginnings, incident.at), []).append(incident.id)
    shown = list(enumerate(account.attempts))[-MOST_ATTEMPTS:]
    found = tuple(
        AttemptFacts(
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
    told: deque[tuple[float, str, str]] = deque(maxlen=MOST_EVENTS)
    alike: deque[tuple[str, str]] = deque(maxlen=_MOST_ALIKE)
    for event in events:
        say = _SENTENCES.get(event["event"])
        sentence = say(event) if say is not None else None
        if sentence:
            key = event["event"], one_line(sentence)
            if key not in alike:
                alike.append(key)
                told.append((float(event["t"]), *key))
    return tuple(told)


def _words(event: Mapping[str, Any], *keys: str) -> str | None:
    """Return the texts of an event under these keys, joined; None where there is none."""
    return ": ".join(value for key in keys if isinstance(value := event.get(key), str) and value) or None


def _run_start(event: Mapping[str, Any]) -> str:
    return f"job {event.get('job')} starts"


def _attempt_start(event: Mapping[str, Any]) -> str:
    size, nodes = event.get("world_size"), event.get("nodes")
    ranks = f" with {size} rank{'' if size == 1 else 's'}" if type(size) is int else ""
    spread = f" on {nodes} nodes" if type(nodes) is int and nodes > 1 else ""
    return f"attempt {event.get('attempt')} starts{ranks}{spread}"


def _resume(event: Mapping[str, Any]) -> str:
    step = step_of(event)
    return "training goes on" + (f" after {count_words(step)}" if step >= 0 else "")


def _recovered(event: Mapping[str, Any]) -> str:
    took, lost = number(event.get("recovery_s")), event.get("lost_steps")
    after = "" if took is None else f" {took:.1f} s later"
    again = f", {count_words(lost)} to be repeated" if type(lost) is int and lost > 0 else ""
    return f"{event.get('id')}: all ranks step again{after}{again}"


def _incident(event: Mapping[str, Any]) -> str:
    return f"{event.get('id')}: {_words(event, 'summary') or _words(event, 'cause') or 'no details'}"


def _rank_exit(event: Mapping[str, Any]) -> str | None:
    code, signal = event.get("exit_code"), event.get("signal")
    if event.get("ended_by_launcher") is True or (code == 0 and not signal):
        return None
    how = f"is ended by {signal}" if signal else f"exits with {code}"
    return f"rank {event.get('rank')} {how}"


def _stop_agreed(event: Mapping[str, Any]) -> str:
    step = step_of(event)
    return "all ranks agreed to stop" + (f" at step {step}" if step >= 0 else "")


def _saved_badly(event: Mapping[str, Any]) -> str:
    step = step_of(event)
    why = event.get("why") or event.get("error") or "no reason given"
    which = f"the checkpoint after {count_words(step)}" if step >= 0 else "a checkpoint"
    return f"{which}: {why}"


def _numerics(event: Mapping[str, Any]) -> str | None:
    found, step = event.get("found"), step_of(event)
    at = f" at step {step}" if step >= 0 else ""
    if found == "good":
        return f"the numbers are good again{at}"
    return f"{event.get('what')} is {event.get('value')}{at} on rank {event.get('rank')}"


def _health(event: Mapping[str, Any]) -> str | None:
    if event.get("ok") is not False:
        return None
    return f"{event.get('host')}: {_words(event, 'what', 'why') or 'something is wrong'}"


def _straggler(event: Mapping[str, Any]) -> str | None:
    said = _words(event, "text")
    if said is None or event.get("what") not in ("found", "over", "load", "settings"):
        return None
    return f"over: {said}" if event.get("what") == "over" else said


def _decision(event: Mapping[str, Any]) -> str | None:
    return _words(event, "verdict", "reason")


def _signal_sent(event: Mapping[str, Any]) -> str | None:
    ranks = event.get("ranks")
    told = [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else []
    return f"{event.get('signal')} to ranks {compact_ranks(told)}: {event.get('why')}" if told else None


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
    Event.RUN_START.value: _run_start,
    Event.ATTEMPT_START.value: _attempt_start,
    Event.RANK_EXIT.value: _rank_exit,
    Event.INCIDENT.value: _incident,
    Event.RECOVERED.value: _recovered,
    Event.DECISION.value: _decision,
    Event.RESUME.value: _resume,
    Event.STALL.value: lambda event: _words(event, "text"),
    Event.SIGNAL_SENT.value: _signal_sent,
    Event.STOP_AGREED.value: _stop_agreed,
    Event.PREEMPT_NOTICE.value: lambda event: _words(event, "source", "reason"),
    Event.CKPT_FAIL.value: _saved_badly,
    Event.CKPT_SKIP.value: _saved_badly,
    Event.CKPT_QUARANTINE.value: _saved_badly,
    Event.NUMERICS.value: _numerics,
    Event.STRAGGLER.value: _straggler,
    Event.HEALTH.value: _health,
    Event.DEGRADED.value: lambda event: _words(event, "what", "why", "message"),
    Event.MONITOR_REPLACED.value: lambda event: f"the monitor of {event.get('host')} was replaced",
    Event.FINISHED.value: lambda event: "training is complete" if event.get("rank") is None else None,
}
