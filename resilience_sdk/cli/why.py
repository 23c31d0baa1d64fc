"""`resilience why`: every incident of a run directory, for a person or as JSON."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from resilience_sdk.cli.common import aligned, open_run_dir, page_row, print_json, print_lines, reading_parser
from resilience_sdk.core.words import one_line, when
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.history.recurrence import recurrence_words, recurrences
from resilience_sdk.incidents import Incident, IncidentStore
from resilience_sdk.report import why_page
from resilience_sdk.report.run_view import (
    RunView,
    find_notes,
    look_at,
    sign_words,
    signs_of,
    untold_stall,
    untold_words,
)
from resilience_sdk.report.standstills import standstills_of

_MOST = 10


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
        if (signs := signs_of(incident, events))
    }


def render_signs(incident: Incident, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines for a terminal; a sign with the incident's own cause says so."""
    signs = signs_of(incident, events)
    lines = [f"  health      {sign_words(sign, incident)}" for sign in signs[:_MOST_SIGNS]]
    if rest := signs[_MOST_SIGNS:]:
        lines.append(f"  health      and {len(rest)} more within 10 minutes before and 5 after")
    return lines


_WIDEST = 110  # columns; a longer line is hard to read on any terminal


def main(argv: Sequence[str]) -> int:
    """Print the incidents, oldest first, and return 0; an empty run directory has none and says so."""
    parser = reading_parser("why", "Print every incident: which rank, where, why, and what to do next.")
    parser.add_argument("--last", action="store_true", help="only the newest incident")
    parser.add_argument("--incident", metavar="ID", help="only this one, such as 0001-hang")
    parser.add_argument("--verbose", action="store_true", help="all evidence and whole stacks, one fact a row")
    options = parser.parse_args(argv)
    run_dir = open_run_dir(options.run_dir)
    view = look_at(run_dir)
    known = _read(view)
    incidents = _chosen(known, options.incident, last=options.last)
    is_part = options.last or options.incident is not None
    events, ending = view.events, view.ending
    notes = [] if is_part else find_notes(events)
    untold = None if is_part or ending.verdict is not None else untold_stall(view, incidents)
    stood = [] if is_part else standstills_of(view.account())
    again = recurrences(run_dir.path, incidents)
    if options.json:
        checkpoints = {"checkpoints": notes} if notes else {}
        signs = find_signs(incidents, events)
        health = {"health": signs} if signs else {}
        stall = {"stall": untold.to_json()} if untold is not None else {}
        history = {"history": again} if again else {}
        told = {"incidents": [incident.to_json() for incident in incidents]}
        went_on = {"standstills": [one for of_job in stood for one in of_job.to_json()]} if stood else {}
        print_json({**told, **checkpoints, **health, **stall, **went_on, **history})
        return 0
    if not incidents:
        print_lines([f"no incident in {run_dir.path}"])
    newest = known[-1].id if known else None
    health_lines = {incident.id: render_signs(incident, events) for incident in incidents}
    for name, answer in again.items():
        health_lines[name] = [f"  history     {recurrence_words(answer)}", *health_lines[name]]
    if options.verbose:
        for number, incident in enumerate(incidents):
            lines_of, its_end = health_lines[incident.id], ending if incident.id == newest else None
            lines = why_page.render(incident, str(run_dir.incidents), lines_of, ending=its_end)
            print_lines(([""] if number else []) + lines)
    else:
        width = min(_WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
        print_lines(why_page.page(incidents, ending, signs=health_lines, newest=newest, width=width))
        if incidents:
            print_lines([f"More: resilience why --verbose {shlex.quote(str(run_dir.path))}"])
    if untold is not None:
        print_lines(["", *_render_untold(untold)])
    for of_job in stood:
        job = f"in job {of_job.job_number}: " if len(stood) > 1 else ""
        print_lines(["", f"stood still: {job}{of_job.sentence()}"])
    if notes:
        print_lines(["", *render_notes(notes)])
    print_lines(["", *aligned([page_row(run_dir)])])
    return 0


def _read(view: RunView) -> list[Incident]:
    try:
        return IncidentStore(view.run_dir.path).all_told(view.events)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {view.run_dir.incidents}: {error.strerror}; ask its owner, or check its permissions"
        ) from None


def _render_untold(hang: Incident) -> list[str]:
    """Return lines for a terminal about a stall that has no incident."""
    return [untold_words(hang)] + [f"  {one_line(e.source):<10}  {one_line(e.text)}" for e in hang.evidence[:-1]]


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
