"""What `resilience why` says of checkpoints: which were not written, not loaded, or put in quarantine, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from resilience_sdk.cli.common import one_line, when
from resilience_sdk.events import Event

_WORDS = {
    Event.CKPT_FAIL.value: "was not written",
    Event.CKPT_SKIP.value: "was not loaded",
    Event.CKPT_QUARANTINE.value: "is in quarantine",
}
_MOST = 10


def find_notes(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `{at, step, what, why}` of every checkpoint that something was wrong with, oldest first.

    A damaged checkpoint is found again by every resume; it is listed once, when it was found first.
    """
    notes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        what = _WORDS.get(str(event.get("event")))
        if what is not None:
            if "time_left_s" in event:  # a job that was asked to leave
                what = "was not written"
            why = str(event.get("why") or event.get("error") or "no reason given")
            note = {"at": event["t"], "step": event.get("step"), "what": what, "why": why}
            notes.setdefault((note["step"], what, why), note)
    return list(notes.values())


def render_notes(notes: list[dict[str, Any]]) -> list[str]:
    """Return the newest notes as lines for a terminal."""
    lines = [f"checkpoints: {len(notes)} with a fault" + (f", the newest {_MOST}" if len(notes) > _MOST else "")]
    for note in notes[-_MOST:]:
        lines.append(f"  {when(note['at'])}  step {one_line(note['step'])} {note['what']}: {one_line(note['why'])}")
    return lines
