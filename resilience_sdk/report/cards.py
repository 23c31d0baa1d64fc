"""The cards of a report: each incident, each save and each finding as it is shown, bounded in number and length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resilience_sdk.attribution.exceptions import is_users_frame
from resilience_sdk.attribution.taxonomy import lookup, meaning
from resilience_sdk.core.console import printable
from resilience_sdk.core.journal import Event
from resilience_sdk.core.words import one_line
from resilience_sdk.history.recurrence import recurrence_words, recurrences
from resilience_sdk.incidents import CURE, Culprit, Incident
from resilience_sdk.incidents.record import compact_ranks
from resilience_sdk.report.digest import number, step_of
from resilience_sdk.report.facts import CheckpointFacts, FindingFacts, IncidentFacts, StackFacts
from resilience_sdk.report.run_view import RunView, sign_words, signs_of
from resilience_sdk.report.why_page import JobEnding, words_of

MOST_INCIDENTS = 100
MOST_CHECKPOINTS = 300
MOST_FINDINGS = 100
_MOST_CULPRITS = 16
_MOST_STACKS = 8
_MOST_FRAMES = 64
_MOST_EVIDENCE = 24
_MOST_SIGNS = 4
_MOST_TEXT = 2000


def text(value: object, most: int = _MOST_TEXT) -> str:
    """Return job text of bounded length without control characters."""
    told = printable(str(value)[: 4 * most])
    return told if len(told) <= most else told[:most] + " ... (cut)"


def incident_cards(view: RunView, incidents: Sequence[Incident]) -> tuple[IncidentFacts, ...]:
    """Return the newest incidents, oldest first."""
    shown = incidents[-MOST_INCIDENTS:]
    ending, newest = view.ending, incidents[-1].id if incidents else None
    again = recurrences(Path(view.run_dir.path), shown)
    return tuple(
        _card(
            incident,
            ending if incident.id == newest else None,
            rerun=ending.resume if incident.id == newest else None,
            before=recurrence_words(again[incident.id]) if incident.id in again else None,
            signs=[("health", sign_words(sign, incident)) for sign in signs_of(incident, view.events)[:_MOST_SIGNS]],
        )
        for incident in shown
    )


def _card(
    incident: Incident,
    ending: JobEnding | None,
    *,
    rerun: str | None,
    before: str | None,
    signs: Sequence[tuple[str, str]],
) -> IncidentFacts:
    words = words_of(incident, ending)
    cause = incident.cause
    is_known = cause is not None and lookup(cause).cause == cause
    evidence = [(one_line(e.source), text(e.text)) for e in incident.evidence if e.source != CURE]
    return IncidentFacts(
        id=incident.id or "?",
        kind=incident.kind or "unknown",
        attempt=incident.attempt,
        at=incident.detected_at,
        headline=text(words.headline),
        paragraph=text(words.paragraph, 4 * _MOST_TEXT),
        culprits=tuple(
            (one.rank, _line(one.node), _line(one.told_step), _line(one.section))
            for one in incident.culprits[:_MOST_CULPRITS]
        ),
        victims=compact_ranks(incident.victims)[:_MOST_TEXT],
        category=_line(incident.category),
        cause=_line(cause),
        meaning=meaning(cause) if is_known and cause is not None else None,
        action=_line(incident.action),
        what_to_change=text(words.what_to_change) or None,
        confidence=incident.confidence,
        latency_s=incident.detection_latency_s,
        recovered_at=incident.recovered_at,
        recovery_s=incident.recovery_s,
        lost_steps=incident.lost_steps,
        stacks=tuple(_stack(one) for one in [c for c in incident.culprits if c.stack][:_MOST_STACKS]),
        evidence=(*evidence[:_MOST_EVIDENCE], *signs),
        rerun=None if rerun is None else printable(rerun),
        before=before,
    )


def _stack(culprit: Culprit) -> StackFacts:
    frames = culprit.stack[:_MOST_FRAMES]
    return StackFacts(
        rank=culprit.rank,
        node=_line(culprit.node),
        frames=tuple(one_line(frame) for frame in frames),
        is_users=tuple(is_users_frame(frame) for frame in frames),
    )


def _line(value: str | None) -> str | None:
    return one_line(value) if value else None


_OUTCOMES = {
    Event.CKPT_COMMIT.value: "committed",
    Event.CKPT_FAIL.value: "failed",
    Event.CKPT_SKIP.value: "skipped",
    Event.CKPT_QUARANTINE.value: "quarantined",
    Event.FRAMEWORK_CKPT.value: "committed",
}


def checkpoint_cards(events: Iterable[Mapping[str, Any]]) -> tuple[tuple[CheckpointFacts, ...], int]:
    """Return what became of the saves in the order of time, and how many are left out: of the good ones the older."""
    found: list[CheckpointFacts] = []
    seen: set[tuple[object, ...]] = set()
    for event in events:
        outcome = _OUTCOMES.get(event["event"])
        if outcome is None:
            continue
        step, told_by = step_of(event), event.get("by")
        why = event.get("why") or event.get("error") or (f"written by {told_by}" if told_by else None)
        one = CheckpointFacts(
            at=float(event["t"]),
            step=step if step >= 0 else None,
            outcome=outcome,
            seconds=number(event.get("seconds")),
            stall_s=number(event.get("stall_s")),
            size_bytes=size if type(size := event.get("bytes")) is int and 0 <= size < 1 << 62 else None,
            why=None if why is None else one_line(why),
        )
        # A damaged checkpoint is found again by every resume, and one that a framework writes is told by each rank.
        key = (one.step, outcome, one.why) if outcome != "committed" or told_by else (len(found), "", "")
        if key not in seen:
            seen.add(key)
            found.append(one)
    faulty = [place for place, one in enumerate(found) if one.outcome != "committed"][-MOST_CHECKPOINTS:]
    room = MOST_CHECKPOINTS - len(faulty)
    good = [place for place, one in enumerate(found) if one.outcome == "committed"]
    kept = sorted([*faulty, *(good[-room:] if room else [])])
    return tuple(found[place] for place in kept), len(found) - len(kept)


_STATUSES = {"degraded": "warning", "failed": "failure"}


def finding_cards(events: Iterable[Mapping[str, Any]]) -> tuple[FindingFacts, ...]:
    """Return what is wrong with the nodes' health, or was: the newest of each kind on each node, the worst first."""
    newest: dict[tuple[str, str], FindingFacts] = {}
    for event in events:
        if event["event"] != Event.HEALTH.value or not isinstance(event.get("what"), str):
            continue
        node = event.get("host") if isinstance(event.get("host"), str) else None
        key = node or "", one_line(event["what"])
        before = newest.get(key)
        if event.get("ok") is True:
            if before is not None and not before.text.endswith(GOOD_AGAIN):
                newest[key] = FindingFacts(
                    before.at, node, before.check, before.status, before.text + GOOD_AGAIN, None, before.count
                )  # fmt: skip
        elif event.get("ok") is False:
            newest[key] = FindingFacts(
                at=float(event["t"]),
                node=_line(node),
                check=key[1],
                status=_STATUSES.get(str(event.get("status")), "warning"),
                text=one_line(event.get("why") or event.get("evidence") or "no details"),
                cure=_line(cure) if isinstance(cure := event.get("cure"), str) else None,
                count=1 + (before.count if before is not None else 0),
            )
    worst = sorted(newest.values(), key=lambda one: (one.text.endswith(GOOD_AGAIN), one.status != "failure", -one.at))
    return tuple(worst[:MOST_FINDINGS])


GOOD_AGAIN = " (good again since)"
"""How the text of a finding ends that no longer holds."""
