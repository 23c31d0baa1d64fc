"""`resilience why`: every incident of a run directory, for a person or as JSON."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resilience_sdk.cli.common import aligned, open_run_dir, page_row, print_json, print_lines, reading_parser
from resilience_sdk.core.journal import Event, read_journal
from resilience_sdk.core.lease import current_holder
from resilience_sdk.core.run_directory import RunDirectory
from resilience_sdk.core.words import one_line, when
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.health.findings import HealthSign, signs_near
from resilience_sdk.history.recurrence import recurrence_words, recurrences
from resilience_sdk.incidents import Incident, IncidentStore, stall_at, standing_words
from resilience_sdk.report import why_page
from resilience_sdk.report.outcome import read_outcome
from resilience_sdk.report.run_state import live_ranks, state_of
from resilience_sdk.report.why_page import JobEnding

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


_MOST_SIGNS = 4  # said of one incident; the JSON has all


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
    lines = [f"  health      {_line(sign, incident)}" for sign in signs[:_MOST_SIGNS]]
    if rest := signs[_MOST_SIGNS:]:
        lines.append(f"  health      and {len(rest)} more within 10 minutes before and 5 after")
    return lines


def _signs(incident: Incident, events: Sequence[Mapping[str, Any]]) -> list[HealthSign]:
    return [] if incident.detected_at is None else signs_near(incident.detected_at, events)


def _line(sign: HealthSign, incident: Incident) -> str:
    event = sign.event
    when = f"{abs(sign.after_s):.0f} s {'before' if sign.before else 'after'}"
    same = ", the same cause" if event.get("cause") and event.get("cause") == incident.cause else ""
    why = f": {event['why']}" if event.get("why") else ""
    return one_line(f"{when}, on {event.get('host')}, {event.get('what')}{why}{same}")


_WIDEST = 110  # columns; a longer line is hard to read on any terminal


def main(argv: Sequence[str]) -> int:
    """Print the incidents, oldest first, and return 0; an empty run directory has none and says so."""
    parser = reading_parser("why", "Print every incident: which rank, where, why, and what to do next.")
    parser.add_argument("--last", action="store_true", help="only the newest incident")
    parser.add_argument("--incident", metavar="ID", help="only this one, such as 0001-hang")
    parser.add_argument("--verbose", action="store_true", help="all evidence and whole stacks, one fact a row")
    options = parser.parse_args(argv)
    run_dir = open_run_dir(options.run_dir)
    known = _read(run_dir)
    incidents = _chosen(known, options.incident, last=options.last)
    is_part = options.last or options.incident is not None
    events = read_journal(run_dir.journal).events
    notes = [] if is_part else find_notes(events)
    ending = _ending(run_dir, events)
    untold = None if is_part or ending.verdict is not None else untold_stall(run_dir, incidents, events)
    again = recurrences(run_dir.path, incidents)
    if options.json:
        checkpoints = {"checkpoints": notes} if notes else {}
        signs = find_signs(incidents, events)
        health = {"health": signs} if signs else {}
        stall = {"stall": untold.to_json()} if untold is not None else {}
        history = {"history": again} if again else {}
        told = {"incidents": [incident.to_json() for incident in incidents]}
        print_json({**told, **checkpoints, **health, **stall, **history})
        return 0
    if not incidents:
        print_lines([f"no incident in {run_dir.path}"])
    newest = known[-1].id if known else None
    health_lines = {incident.id: render_signs(incident, events) for incident in incidents}
    for name, answer in again.items():
        health_lines[name] = [f"  history     {recurrence_words(answer)}", *health_lines[name]]
    if options.verbose:
        for number, incident in enumerate(incidents):
            signs_of, its_end = health_lines[incident.id], ending if incident.id == newest else None
            lines = why_page.render(incident, str(run_dir.incidents), signs_of, ending=its_end)
            print_lines(([""] if number else []) + lines)
    else:
        width = min(_WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        print_lines(why_page.page(incidents, ending, signs=health_lines, newest=newest, width=width))
        if incidents:
            print_lines([f"More: resilience why --verbose {run_dir.path}"])
    if untold is not None:
        print_lines(["", *_render_untold(untold)])
    if notes:
        print_lines(["", *render_notes(notes)])
    print_lines(["", *aligned([page_row(run_dir)])])
    return 0


def _read(run_dir: RunDirectory) -> list[Incident]:
    try:
        return IncidentStore(run_dir.path).all()
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {run_dir.incidents}: {error.strerror}; ask its owner, or check its permissions"
        ) from None


def _ending(run_dir: RunDirectory, events: Sequence[Mapping[str, Any]]) -> JobEnding:
    """Return what became of the newest job, as far as it has told; an outcome of the one before it is none."""
    outcome = None
    with contextlib.suppress(ConfigError):
        outcome = read_outcome(run_dir)
    if outcome is not None and outcome["ended_at"] is not None:
        started_at = state_of(events).started_at
        outcome = None if started_at is not None and outcome["ended_at"] < started_at else outcome
    return JobEnding.of(outcome, running=current_holder(run_dir) is not None or bool(live_ranks(run_dir)))


def untold_stall(
    run_dir: RunDirectory, incidents: Sequence[Incident], events: Sequence[Mapping[str, Any]]
) -> Incident | None:
    """Return what stood still when the newest job was killed together with whoever would have written it down.

    None where it runs, has told its end, or nothing is known to have stood still.
    """
    state = state_of(events)
    if state.attempt is None or state.attempt_ended or state.last_event_at is None or current_holder(run_dir):
        return None
    told = [e for e in events if (e.get("job"), e.get("attempt")) == (state.job, state.attempt)]
    told = [e for e in told if e["t"] >= (state.started_at or 0.0)]
    known = [i for i in incidents if i.attempt == state.attempt and (i.detected_at or 0.0) >= (state.started_at or 0.0)]
    exits = {e["rank"]: float(e["t"]) for e in told if e["event"] == Event.RANK_EXIT.value and "rank" in e}
    stall = stall_at(told, state.last_event_at, ended=exits)
    if stall is None or any(i.kind == "hang" and i.recovered_at is None for i in known):
        return None
    return stall.hang(state.attempt, state.last_event_at, "its launcher was killed too, and told nothing")


def _render_untold(hang: Incident) -> list[str]:
    """Return lines for a terminal about a stall that has no incident."""
    lines = [f"The job was killed while {one_line(standing_words(hang))}; it has no incident of that."]
    return lines + [f"  {one_line(e.source):<10}  {one_line(e.text)}" for e in hang.evidence[:-1]]


def _chosen(incidents: list[Incident], wanted: str | None, *, last: bool) -> list[Incident]:
    if wanted is not None:
        # `3` and `0003` are the same incident to a person.
        found = [i for i in incidents if i.id == wanted or _number(i.id) == _number(wanted)]
        if not found:
            known = ", ".join(str(i.id) for i in incidents) or "there is none"
            raise ConfigError(f"no incident {wanted!r}; known: {known}")
        return found
    return incidents[-1:] if last else incidents


def _number(text: str | None) -> int | None:
    digits = (text or "").partition("-")[0] if "-" in (text or "") else (text or "")
    return int(digits) if digits.isdecimal() and digits.isascii() else None
