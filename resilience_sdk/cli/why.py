"""`resilience why`: every incident of a run directory, for a person or as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from resilience_sdk.cli.checkpoint_notes import find_notes, render_notes
from resilience_sdk.cli.common import one_line, open_run_dir, print_json, print_lines, reading_parser, when
from resilience_sdk.cli.health_signs import find_signs, render_signs
from resilience_sdk.errors import ConfigError, RunDirectoryError
from resilience_sdk.incidents import Culprit, Incident, IncidentStore, count_words
from resilience_sdk.incidents.report import compact_ranks, headline
from resilience_sdk.journal import read_journal
from resilience_sdk.run_directory import RunDirectory

_MOST_CULPRITS = 8
_MOST_FRAMES = 8


def main(argv: Sequence[str]) -> int:
    """Print the incidents, oldest first, and return 0; an empty run directory has none and says so."""
    parser = reading_parser("why", "Print every incident: which rank, where, why, and what to do next.")
    parser.add_argument("--last", action="store_true", help="only the newest incident")
    parser.add_argument("--incident", metavar="ID", help="only this one, such as 0001-hang")
    options = parser.parse_args(argv)
    run_dir = open_run_dir(options.run_dir)
    incidents = _chosen(_read(run_dir), options.incident, last=options.last)
    is_part = options.last or options.incident is not None
    events = read_journal(run_dir.journal).events
    notes = [] if is_part else find_notes(events)
    if options.json:
        checkpoints = {"checkpoints": notes} if notes else {}
        signs = find_signs(incidents, events)
        health = {"health": signs} if signs else {}
        print_json({"incidents": [incident.to_json() for incident in incidents], **checkpoints, **health})
        return 0
    if not incidents:
        print_lines([f"no incident in {run_dir.path}"])
    for number, incident in enumerate(incidents):
        print_lines(([""] if number else []) + render(incident, str(run_dir.incidents), render_signs(incident, events)))
    if notes:
        print_lines(["", *render_notes(notes)])
    return 0


def _read(run_dir: RunDirectory) -> list[Incident]:
    try:
        return IncidentStore(run_dir.path).all()
    except OSError as error:
        raise RunDirectoryError(
            f"cannot read {run_dir.incidents}: {error.strerror}; ask its owner, or check its permissions"
        ) from None


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


def render(incident: Incident, directory: str, signs: Sequence[str] = ()) -> list[str]:
    """Return one incident as lines for a terminal; everything that a job wrote is flattened to one line.

    `signs` are lines of what was wrong with the nodes' health around it.
    """
    lines = [f"{one_line(incident.id or '?')}  {_one_line_headline(incident)}"]
    latency = incident.detection_latency_s
    after = "" if latency is None else f", {latency:.1f} s after it happened"
    attempt = "" if incident.attempt is None else f", attempt {incident.attempt}"
    lines.append(f"  detected    {when(incident.detected_at)}{after}{attempt}")
    for culprit in incident.culprits[:_MOST_CULPRITS]:
        lines += _culprit(culprit)
    if rest := incident.culprits[_MOST_CULPRITS:]:
        several = "s" if len({c.rank for c in rest}) > 1 else ""
        lines.append(f"  culprits    also rank{several} {compact_ranks(c.rank for c in rest)}")
    if incident.victims:
        several = "s" if len(set(incident.victims)) > 1 else ""
        lines.append(f"  victims     rank{several} {compact_ranks(incident.victims)}")
    confidence = "" if incident.confidence is None else f", confidence {incident.confidence:.2f}"
    cause = f"{one_line(incident.cause or 'unknown')} ({one_line(incident.category or 'unknown')})"
    lines.append(f"  cause       {cause}{confidence}")
    lines += [f"  evidence    {one_line(e.source)}: {one_line(e.text)}" for e in incident.observed]
    lines += signs
    lines.append(f"  action      {one_line(incident.action or 'unknown')}")
    lines += [f"  to do       {one_line(incident.advice)}"] if incident.advice else []
    lines.append(f"  recovered   {_recovery(incident)}")
    lines.append(f"  more in     {one_line(directory)}/{one_line(incident.id or '?')}/report.md")
    return lines


def _one_line_headline(incident: Incident) -> str:
    return one_line(headline(incident)).replace("`", "")


def _culprit(culprit: Culprit) -> list[str]:
    place = [f"rank {culprit.rank}"]
    place += [f"node {one_line(culprit.node)}"] if culprit.node else []
    place += [culprit.told_step] if culprit.told_step else []
    place += [f"section {one_line(culprit.section)}"] if culprit.section else []
    lines = [f"  culprit     {', '.join(place)}"]
    lines += [f"                at {one_line(frame)}" for frame in culprit.stack[:_MOST_FRAMES]]
    if len(culprit.stack) > _MOST_FRAMES:
        lines.append(f"                and {len(culprit.stack) - _MOST_FRAMES} more frames")
    return lines


def _recovery(incident: Incident) -> str:
    steps = "" if incident.lost_steps is None else f"; {count_words(incident.lost_steps)} to be repeated"
    if incident.recovered_at is None:
        if incident.kind == "slow":
            return "not while the attempt ran"
        return f"not yet{steps}" if incident.action not in ("stop", "none") else f"no{steps}"
    took = "" if incident.recovery_s is None else f", {incident.recovery_s:.1f} s after the detection"
    return f"{when(incident.recovered_at)}{took}{steps}"
