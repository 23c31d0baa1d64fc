"""The outcome of a job: `outcome.json` for programs, what a person is to do, and the record of each ended attempt.

Written by our launcher, and by the monitor where a foreign launcher's exit code hides the verdict.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from resilience_sdk.core.atomic_write import write_whole
from resilience_sdk.core.console import say_once
from resilience_sdk.core.journal import Event, Journal
from resilience_sdk.core.json_records import to_values
from resilience_sdk.core.redaction import redact
from resilience_sdk.incidents import Evidence, Incident, IncidentStore, event_fields
from resilience_sdk.incidents.stalls import ENDING, Stall, stall_at
from resilience_sdk.postmortem.exit_codes import JobVerdict
from resilience_sdk.postmortem.facts import AttemptFacts, unix_s
from resilience_sdk.recorder.page_reader import snapshot_to_json


@attrs.frozen
class Outcome:
    """The end of one job. Times are Unix seconds."""

    verdict: JobVerdict
    exit_code: int
    reason: str
    job: str
    run_dir: str
    node: str
    started_at: float
    ended_at: float
    attempts: int
    what: str | None = None
    """The last fault in one line: which rank, how, in which step."""
    incidents: tuple[str, ...] = ()
    checkpoint: int | None = None
    """Newest step that can be resumed from."""
    resume: str | None = None
    """Command line that goes on from there."""
    stood: str | None = None
    """What stood still when somebody ended the job, in words: to start it again is a retry that counts."""
    free: bool = False
    """It ended for a hang that costs nothing of a budget, so a retry does not count."""
    not_taken: tuple[str, ...] = ()
    """Checkpoints that a resume does not take, each with the reason: newer than the one that it takes, or all."""
    advice: str | None = None
    """What to do before it is started again, where more is known than the verdict tells."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of `outcome.json`: every key always there, null for what is not known."""
        return to_values(self)


_HINTS = {
    JobVerdict.STOP: "fix the program, then run it again",
    JobVerdict.GIVE_UP: "find the cause before you run it again",
    JobVerdict.HARDWARE: "requeue it without that node",
    JobVerdict.PREEMPTED: "requeue it",
}
_WHEN = {JobVerdict.STOP: ", once it is repaired", JobVerdict.HARDWARE: " on another node"}
TO_RESUME = ("to resume", "to run it again")
"""How the lines begin that end with a command to copy."""


def hint_of(verdict: str) -> str | None:
    """Return what to do after a verdict (`Verdict` or its value); None where there is nothing to say."""
    return _HINTS.get(verdict)  # type: ignore[call-overload, no-any-return]


def to_resume(verdict: JobVerdict, command: str, checkpoint: int | None) -> str:
    """Return the line with the command that goes on, from a checkpoint if there is one, and when or where it helps."""
    resumes = checkpoint is not None and verdict is not JobVerdict.STOP
    return f"{TO_RESUME[0 if resumes else 1]}{_WHEN.get(verdict, '')}: {command}"


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write `outcome.json`, whole or not at all, without secrets; a full disk is said and not raised."""
    try:
        write_whole(path, json.dumps(redact(outcome.to_json()), indent=1) + "\n")
    except OSError as error:
        say_once("outcome", f"cannot write {path}: {error.strerror}; the verdict is exit code {outcome.exit_code}")


FROM_OUTSIDE = frozenset({"rank_killed_sigkill", "preemption_sigterm", "user_interrupt"})
"""Causes of a death that was somebody else's doing."""


def record(store: IncidentStore, journal: Journal, kind: str, incident: Incident, facts: AttemptFacts) -> Incident:
    """Write an incident with the pages and stacks of the attempt's ranks.

    Without an id where the disk has no room for it; then the store keeps it.
    """
    stacks = {rank: trace.stacks for rank, trace in facts.traces.items() if trace.stacks}
    for rank, trace in facts.traces.items():
        frames = (trace.exception or {}).get("frames")
        if isinstance(frames, list) and frames:
            raised = "\n".join(["raised at, innermost first:", *map(str, frames)])
            stacks[rank] = f"{raised}\n\n{stacks.get(rank, '')}".rstrip() + "\n"
    pages = {rank: snapshot_to_json(page) for rank, page in facts.pages.items()}
    try:
        written = store.create(kind, incident, stacks, pages)
    except OSError as error:
        say_once("incident", f"the incident cannot be written into {store.path} now, it is kept in memory: {error}")
        journal.emit(Event.DEGRADED, what="incident", why=str(error))
        store.keep(
            kind, incident, stacks, pages, written=lambda late: journal.emit(Event.INCIDENT, **event_fields(late))
        )
        return attrs.evolve(incident, kind=kind)
    journal.emit(Event.INCIDENT, **event_fields(written))
    return written


def standing_hang(
    store: IncidentStore, facts: AttemptFacts, at: float, *, late_counts: bool = False
) -> Incident | Stall | None:
    """Return what stood still at that time (Unix seconds): a hang that was reported and did not go on, else a stall.

    `late_counts`: as `stall_at` takes it.
    """
    beats = {rank: page.main_lane.beat_ns for rank, page in facts.pages.items()}
    moved = {rank: unix_s(beat_ns) for rank, beat_ns in beats.items() if beat_ns}
    hangs: list[Incident] = []
    with contextlib.suppress(OSError):
        hangs = store.of_attempt(facts.attempt, facts.began_at, "hang")
    if hangs and not _went_on(hangs[-1], facts, at, moved):
        return hangs[-1]
    return stall_at(facts.events, at, ended=facts.ended_at, moved=moved, late_counts=late_counts)


def record_standing(
    store: IncidentStore,
    journal: Journal,
    facts: AttemptFacts,
    at: float,
    by: str,
    *,
    corrected: Callable[[Incident], Incident] = lambda incident: incident,
    late_counts: bool = False,
) -> Incident | None:
    """Write down what stood still when `by` ended it at that time, and return that incident; None where nothing did.

    A hang that was only reported is now one after which the job has to start again. `corrected` may change a new one
    by what else is known. Never raises for a disk.
    """
    found = standing_hang(store, facts, at, late_counts=late_counts)
    if found is None:
        return None
    incident = _ended(found, by) if isinstance(found, Incident) else corrected(found.hang(facts.attempt, at, by))
    try:
        if isinstance(found, Incident):
            return store.update(str(found.id), action=incident.action, evidence=incident.evidence)
        pages = {rank: snapshot_to_json(page) for rank, page in facts.pages.items()}
        incident, is_ours = store.create_once("hang", incident, found.stacks, pages, same=_is_of(facts))
    except (OSError, KeyError) as error:
        is_ours = not isinstance(found, Incident)
        say_once("incident", f"cannot write the incident into {store.path}: {error}")
    if is_ours:
        journal.emit(Event.INCIDENT, **event_fields(incident))
    return incident


def _is_of(facts: AttemptFacts) -> Callable[[Incident], bool]:
    """Return what tells the incident of the same attempt, which another node has written meanwhile."""

    def is_twin(other: Incident) -> bool:
        of_this_job = other.attempt == facts.attempt and (other.detected_at or 0.0) >= facts.began_at
        return of_this_job and any(item.source == ENDING for item in other.evidence)

    return is_twin


def _went_on(hang: Incident, facts: AttemptFacts, at: float, moved: Mapping[int, float]) -> bool:
    """Tell whether a hang was over: closed, or all ranks of this node have made a step since."""
    if hang.recovered_at is not None:
        return True
    return bool(moved) and all((hang.detected_at or 0.0) < moved.get(rank, 0.0) <= at for rank in facts.pages)


def _ended(hang: Incident, by: str) -> Incident:
    """Return a hang with who ended it, told once: several nodes come here."""
    if any(item.source == ENDING for item in hang.evidence):
        return hang
    told = Evidence(ENDING, f"then it was ended: {by}")
    action = "restart" if hang.action in (None, "none") else hang.action
    return attrs.evolve(hang, action=action, evidence=(*hang.evidence, told))
