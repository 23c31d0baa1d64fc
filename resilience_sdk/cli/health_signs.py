"""What was wrong with the nodes' health around an incident, for a person or as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.cli.common import one_line
from resilience_sdk.health.watching import Sign, signs_near
from resilience_sdk.incidents import Incident

_MOST = 4  # said of one incident; the JSON has all


def find_signs(incidents: Sequence[Incident], events: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return by incident the health events around it, those that tell most first, each with `after_s`."""
    return {
        str(incident.id): [{"after_s": round(sign.after_s, 3), **sign.event} for sign in signs]
        for incident in incidents
        if (signs := _signs(incident, events))
    }


def render_signs(incident: Incident, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines for a terminal; a sign with the incident's own cause says so."""
    signs = _signs(incident, events)
    lines = [f"  health      {_line(sign, incident)}" for sign in signs[:_MOST]]
    if rest := signs[_MOST:]:
        lines.append(f"  health      and {len(rest)} more within 10 minutes before and 5 after")
    return lines


def _signs(incident: Incident, events: Sequence[Mapping[str, Any]]) -> list[Sign]:
    return [] if incident.detected_at is None else signs_near(incident.detected_at, events)


def _line(sign: Sign, incident: Incident) -> str:
    event = sign.event
    when = f"{abs(sign.after_s):.0f} s {'before' if sign.before else 'after'}"
    same = ", the same cause" if event.get("cause") and event.get("cause") == incident.cause else ""
    why = f": {event['why']}" if event.get("why") else ""
    return one_line(f"{when}, on {event.get('host')}, {event.get('what')}{why}{same}")
